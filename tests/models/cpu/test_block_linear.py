"""Products on a file's own blocks, against numbers dequantised by the `gguf` package, for every format."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from forerun import LLM, SamplingParams
from forerun.models.cpu import choice
from forerun.models.cpu.block_linear import FORMATS, BlockLinear, PackedBlocks, Q8Linear, problem, set_threads
from forerun.models.cpu.quantise import q8_0, quantise
from forerun.models.linear import Linear, rms_norm

ROWS, COLS = 70, 768  # the last group of 16 rows is not full
SCALED_AT = {
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}  # float16 numbers of a block


def test_threads_of_the_kernels_run_on_all_cores_though_the_one_that_starts_them_is_bound_to_one():
    def threads() -> set[int]:
        return set(map(int, os.listdir("/proc/self/task")))

    done = threading.Event()
    free = threading.Thread(target=done.wait)
    free.start()  # as those that OpenMP has bound to other cores
    own, before = os.sched_getaffinity(0), threads()
    os.sched_setaffinity(0, {min(own)})
    try:
        set_threads(len(before) + 2)  # more than there can be
        started = threads() - before
        assert started and all(os.sched_getaffinity(thread) == own for thread in started)
        assert os.sched_getaffinity(0) == {min(own)}
    finally:
        os.sched_setaffinity(0, own)
        set_threads(torch.get_num_threads())
        done.set()
        free.join()


def stored(name: str, rows: int = ROWS, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    """Random blocks as a file has them, and the matrix they stand for."""
    rng, kind = np.random.default_rng(seed), gguf.GGMLQuantizationType[name]
    per, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, COLS // per, size), dtype=np.uint8)
    for at in SCALED_AT.get(name, (0,)):
        scales = (rng.standard_normal((rows, COLS // per)) * 0.01).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8).reshape(rows, COLS // per, 2)
    raw = raw.reshape(rows, -1)
    return torch.from_numpy(raw), quants.dequantize(raw, kind)


def rounded(x: torch.Tensor, per: int) -> np.ndarray:
    """Activations as the kernels round them: a scale for 32 values; in blocks of 256 they are powers of two apart."""
    if per == 1:
        return x.numpy()
    groups = x.numpy().reshape(len(x), -1, per // 32, 32)
    peak = np.abs(groups).max(-1, keepdims=True)
    top = peak.max(-2, keepdims=True)
    power = np.minimum(np.floor(np.log2(top / np.maximum(peak, 1e-30), where=top > 0, out=np.zeros_like(peak))), 14)
    inverse = (np.where(top > 0, np.float32(127) / np.maximum(top, 1e-30), 0) * 2.0**power).astype(np.float32)
    return (np.rint(groups * inverse) * (top / np.float32(127) / 2.0**power)).reshape(x.shape)


def inputs(rows: int) -> torch.Tensor:
    x = torch.randn(rows, COLS, generator=torch.Generator().manual_seed(1))
    x[0] *= 50  # outliers
    x[-1] = 0  # nothing to scale by
    return x


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", FORMATS)
def test_the_product_is_that_of_the_blocks(name: str) -> None:
    raw, weight = stored(name)
    x, linear = inputs(11), BlockLinear([(name, raw)])
    expected = rounded(x, FORMATS[name][1]).astype(np.float64) @ weight.astype(np.float64).T
    got = linear(x).numpy()
    assert (linear.out_features, linear.in_features) == (ROWS, COLS)
    assert np.abs(got - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", FORMATS)
def test_a_large_value_takes_the_scale_of_the_32_beside_it_alone(name: str) -> None:
    raw, weight = stored(name)
    x = inputs(4)[1:3]
    x[0, 300], x[1, 5] = 900.0, -40000.0
    expected = rounded(x, FORMATS[name][1]).astype(np.float64) @ weight.astype(np.float64).T
    assert np.abs(BlockLinear([(name, raw)])(x).numpy() - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    linear, x = BlockLinear([(name, stored(name)[0])]), inputs(37)
    together = linear(x)
    for rows in (1, 2, 5, 8, 32):
        assert torch.equal(linear(x[3 : 3 + rows]), together[3 : 3 + rows])


@pytest.mark.usefixtures("kernels")
def test_norm_bias_residual_and_several_formats_in_one_call() -> None:
    parts = {"Q4_K": stored("Q4_K"), "Q6_K": stored("Q6_K", 33, 1), "Q8_0": stored("Q8_0", 16, 2)}
    bias, norm = torch.randn(ROWS + 33 + 16), (torch.rand(COLS) + 0.5, 1e-5)
    x = inputs(6)
    add = torch.randn(6, len(bias))
    linear = BlockLinear([(name, raw) for name, (raw, _) in parts.items()], bias)
    weight = torch.cat([torch.from_numpy(dense) for _, dense in parts.values()])
    exact = rms_norm(x, norm) @ weight.T + bias + add
    assert float((linear(x, norm=norm, add=add) - exact).norm() / exact.norm()) < 0.01  # activations have eight bits


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows", [3, 37])
def test_threads_change_no_bit(rows: int) -> None:
    raw, x = stored("Q4_K", 512)[0], inputs(rows)
    results = []
    for threads in (1, 2, 8):
        set_threads(threads)
        try:
            results.append(BlockLinear([("Q4_K", raw)])(x))
        finally:
            set_threads(torch.get_num_threads())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("widths", [(256, 512), (768,), (32, 64, 672), (8, 760)])
def test_joined_parts_are_normed_each_by_itself(widths: tuple[int, ...], rows: int) -> None:
    """Parts of 8 do not fill a vector: torch joins them."""
    linear = BlockLinear([("Q8_0", stored("Q8_0")[0])], torch.randn(ROWS))
    parts = [(1.0 + 50 * i) * torch.randn(rows, width) for i, width in enumerate(widths)]
    ours, theirs = linear.joined(parts, 1e-6), Linear.joined(linear, parts, 1e-6)
    # what lies between two steps of eight bits may go either way
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-3
    assert torch.equal(linear.joined([part[:1] for part in parts], 1e-6), ours[:1])


def test_formats_without_a_kernel_are_named() -> None:
    assert problem({"Q4_K", "Q6_K"}) == ""
    assert "BF16, Q3_K" in problem({"Q3_K", "Q4_K", "BF16"})


def test_int8_is_taken_where_it_is_clearly_faster_and_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratios, worth in (((2.0, 2.0), False), ((2.0, 1.1), True)):
        monkeypatch.setattr(choice, "_ratios", lambda ratios=ratios: ratios)
        assert choice.blocks_are_worth_it() is worth
    monkeypatch.setattr(torch.backends, "quantized", SimpleNamespace(supported_engines=["qnnpack"]))  # as on ARM
    monkeypatch.setattr(choice, "_ratios", lambda: pytest.fail("int8 cannot be timed here"))
    assert choice.blocks_are_worth_it()


def test_the_default_model_answers_from_its_own_blocks() -> None:
    params = SamplingParams(max_tokens=16)
    prompts = [f"The capital of {country} is" for country in ("France", "Italy", "Spain")]
    with LLM(quantization="file", quiet=True) as llm:
        assert llm.precision.name == "file"
        together = [answer.token_ids for answer in llm.generate(prompts, params)]
        llm.clear_cache()
        assert [llm.generate(prompt, params, speculation="off")[0].token_ids for prompt in prompts] == together
        assert "Paris" in llm.generate(prompts[0], params)[0].text


def test_a_float_matrix_as_eight_bit_blocks() -> None:
    weight, x = torch.randn(40, COLS), inputs(5)
    weight[3, 32:64] = 0  # a block without a scale
    exact = x @ weight.T
    assert float((Q8Linear(weight)(x) - exact).norm() / exact.norm()) < 0.01
    restored = torch.from_numpy(quants.dequantize(q8_0(weight).numpy(), gguf.GGMLQuantizationType.Q8_0))
    peaks = weight.view(40, -1, 32).abs().amax(-1)  # [rows, blocks]
    errors = (restored - weight).view(40, -1, 32).abs().amax(-1)
    assert bool((errors <= peaks / 127 * 0.51 + 1e-3 * peaks).all())


@pytest.mark.parametrize(("bits", "cols"), [(4, 96), (4, 512), (8, 96)])
def test_a_matrix_quantised_in_parts_has_the_same_blocks(bits: int, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(ROWS, cols, generator=torch.Generator().manual_seed(3)).half()
    whole = PackedBlocks(*quantise(weight, bits))
    monkeypatch.setattr("forerun.models.cpu.block_linear.QUANTISED_WEIGHTS", 33 * cols)  # two groups of rows
    parts = PackedBlocks.quantised(weight, bits)
    assert (parts.format, parts.rows, parts.cols) == (whole.format, ROWS, cols)
    assert torch.equal(parts.packed, whole.packed)


def test_the_choice_is_timed_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several wait for each other, and beside a busy program the slowest would choose for all later starts."""
    used, before = list[int](), torch.get_num_threads()
    monkeypatch.setattr(choice, "set_threads", used.append)
    torch.set_num_threads(2)
    try:
        seen = list[int]()
        monkeypatch.setattr(choice, "_ratio", lambda *_: seen.append(torch.get_num_threads()) or 1.0)
        assert choice._measure() == (1.0, 1.0)
        assert seen == [1, 1] and used == [1, 2] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
