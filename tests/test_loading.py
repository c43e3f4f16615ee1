"""How a model is opened: limits, precision, what the promise of equal bits depends on, and what is read from disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest, OutOfPages

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"device": "tpu"}, "tpu"),
        ({"max_model_len": 10**9}, "max_model_len is 1000000000"),
        ({"kv_cache_tokens": 3}, "kv_cache_tokens is 3"),
        ({"threads": -1}, "threads is -1"),
        ({"threads": "2"}, "threads is '2'"),
        ({"batch_invariant": "no"}, "batch_invariant is 'no'"),
        ({"batch_invariant": 0}, "batch_invariant is 0"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": "x"}, "max_model_len is 'x'"),
    ],
)
def test_bad_settings_are_named(tiny_folder: Callable[[str], Path], values: dict, says: str):
    with pytest.raises(BadRequest, match=says):
        LLM(str(tiny_folder("qwen3")), quiet=True, **values)


def test_a_pool_larger_than_memory_is_refused(tiny_folder: Callable[[str], Path]):
    with pytest.raises(OutOfPages, match="kv_cache_tokens is 1000000000000"):
        LLM(str(tiny_folder("qwen3")), quiet=True, threads=1, kv_cache_tokens=10**12)


BRANCHES = SamplingParams(max_tokens=6, temperature=1.2, seed=4, n=4, ignore_eos=True, speculation="off", logprobs=1)


def test_branches_may_attend_together_where_bits_may_differ(tiny_folder: Callable[[str], Path]):
    """int8 keeps its bits unless told otherwise; then answers are the same to rounding, and attention is shared."""
    said, groups = [], []
    for options in ({}, {"batch_invariant": False}, {"batch_invariant": False, "enable_prefix_caching": False}):
        with LLM(str(tiny_folder("qwen3")), dtype="int8", threads=1, quiet=True, **options) as made:
            attention: Any = made.decoder.attention
            shapes = _watch(attention)
            said.append(made.generate([5 + i % 300 for i in range(400)], BRANCHES)[0].choices)
            groups.append(4 in shapes)
    assert groups == [False, True, False]  # branches without a shared cache have pages of their own
    for others in said[1:]:
        for mine, theirs in zip(said[0], others, strict=True):
            ours, other = mine.logprobs[0].logprob, theirs.logprobs[0].logprob
            assert mine.token_ids[0] == theirs.token_ids[0] and other == pytest.approx(ours, abs=0.05)


def _watch(attention: Any) -> list[int]:
    """After each plan: how many tokens of the batch attend in groups."""
    seen, plan = [0], attention.plan

    def watched(batch: Any) -> None:
        plan(batch)
        seen.append(sum(len(group.tokens) for group in attention._groups))

    attention.plan = watched
    return seen


@pytest.mark.parametrize(("weights", "strict"), [("int8", True), ("float32", False)])
def test_the_promise_of_bits_is_about_int8(tiny_folder: Callable[[str], Path], weights: str, strict: bool):
    found = []
    for wanted in (True, False):
        with LLM(str(tiny_folder("qwen3")), dtype=weights, threads=1, quiet=True, batch_invariant=wanted) as made:
            found.append(made.decoder.attention.same_bits)  # type: ignore[attr-defined]
    assert found == [strict, False]


def test_a_model_with_one_other_neuron_reads_no_kv_of_the_first(tiny_folder: Callable[[str], Path], tmp_path: Path):
    """An edit between the rows that a sampled fingerprint reads."""
    edited = Path(shutil.copytree(tiny_folder("qwen3"), tmp_path / "edited"))
    tensors = load_file(edited / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][37] += 1.0
    save_file(tensors, edited / "model.safetensors", metadata={"format": "pt"})

    def from_disk(model: Path) -> int:
        with LLM(str(model), threads=1, quiet=True, disk=tmp_path / "kv") as made:
            return made.generate([7] * 100, PARAMS)[0].usage.served["disk"]

    assert from_disk(tiny_folder("qwen3")) == 0 and from_disk(tiny_folder("qwen3")) > 90
    assert from_disk(edited) == 0 and from_disk(edited) > 90


def test_bits_that_depend_on_a_batch_are_not_read_from_disk(tiny_folder: Callable[[str], Path], tmp_path: Path):
    def served(**options: Any) -> int:
        with LLM(str(tiny_folder("qwen3")), threads=1, quiet=True, disk=tmp_path, **options) as made:
            return made.generate([7] * 100, PARAMS)[0].usage.served["disk"]

    assert served(dtype="int8", batch_invariant=False) == 0
    assert served(dtype="int8") == 0  # was promised the bits of a token alone
    assert served(dtype="int8") == served(dtype="int8", batch_invariant=False) == 96
    assert served(dtype="float32", batch_invariant=False) == 0
    assert served(dtype="float32") == 96  # no such promise: nothing differs


def test_old_arguments_are_accepted_with_a_warning(tiny_folder: Callable[[str], Path]) -> None:
    old: Any = {"weights": "float32", "max_context": 64, "pool_tokens": 256, "max_batch": 4, "chunk_tokens": 32}
    with pytest.warns(DeprecationWarning) as caught:
        made = LLM(
            str(tiny_folder("llama")), threads=1, quiet=True, prefix_cache=False, draft=None, profile=None, **old
        )
    config = made.engine.config
    made.close()
    assert len(caught) == 8 and all(warning.filename == __file__ for warning in caught)
    assert (config.max_model_len, config.kv_cache_tokens, config.max_num_seqs) == (64, 256, 4)
    assert config.max_num_batched_tokens == 32 and not config.enable_prefix_caching
    with pytest.raises(BadRequest, match="weights and dtype are the same"):
        LLM(str(tiny_folder("llama")), weights="float32", dtype="float32")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "float32", "quantization": "int8"}, "dtype is 'float32' and quantization 'int8'"),
        ({"quantization": "awq"}, "quantization is 'awq'"),
        ({"gpu_memory_utilization": 0.9, "device": "cpu"}, "about CUDA"),
    ],
)
def test_what_cannot_be_opened_so(options: Any, error: str, tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(BadRequest, match=error):
        LLM(str(tiny_folder("llama")), threads=1, quiet=True, **options)


def test_a_model_recommends_its_own_settings(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with LLM(str(folder), dtype="float32", threads=1, quiet=True) as made:
        found = made.get_default_sampling_params()
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.95, 20)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0", "leave max_num_seqs out for the default"),
        ({"max_model_len": 10_000_000}, "max_model_len is 10000000, allowed is from 2 to", "leave it out for"),
    ],
)
def test_limits_have_hints_that_help(options: Any, message: str, hint: str, tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        LLM(str(tiny_folder("llama")), threads=1, quiet=True, **options)
    assert hint in caught.value.hint
