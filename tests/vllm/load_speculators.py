"""Loads a drafter's folder with vLLM's own loader and saves what its parts compute.

python FILE TARGET FOLDER INPUT OUTPUT, in a process of its own, because vLLM's state is one of processes. The CPU build
cannot run such drafters: its model runner refuses them, and the one that runs them needs Triton.
"""

from __future__ import annotations

import os
import sys

from safetensors.torch import load_file, save_file


def main(target: str, folder: str, given: str, out: str) -> None:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    arguments = EngineArgs(model=target, dtype="float32", skip_tokenizer_init=True, enforce_eager=True)
    config = arguments.create_engine_config()
    config.speculative_config = speculative = SpeculativeConfig(
        model=folder,
        num_speculative_tokens=4,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{out}.init", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        model = get_model(vllm_config=config, model_config=speculative.draft_model_config, prefix="draft")
        inputs = load_file(given)
        before = model.markov_embed(inputs["tokens"])
        found = {
            "features": model.model.hidden_norm(model.combine_hidden_states(inputs["hidden"])),
            "markov": model.model.markov_head.markov_w2.weight @ before.T,  # its vocabulary is padded
            "confidence": model.compute_confidence(inputs["rows"], before),
            "ids": model.map_draft_to_target(inputs["columns"]),
        }
    save_file({name: value.detach().contiguous() for name, value in found.items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
