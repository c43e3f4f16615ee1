"""Plans for tiny models of every family: what they measure, keep and refuse, and what runs by them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from forerun import LLM
from forerun.cli import main
from forerun.errors import BadRequest
from forerun.inputs import weight_goal
from forerun.models.cpu import planning
from forerun.models.cpu.attention import FusedLayers, PagedCpuAttention
from forerun.models.cpu.importance import UnitCost, WeightGoal
from forerun.models.cpu.layer_kl import FIRST_COMPARED, FLOAT, Sweep
from forerun.models.cpu.planning import plan_weights, unit_bytes
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.packed_cache import PackedFile
from tests.tiny import FAMILIES

PROMPTS = [[5 * i + j * j % 97 for j in range(20)] for i in range(4)]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def whole(folder: Path, bits: int) -> int:
    return sum(size[bits] for size in unit_bytes(open_checkpoint(folder).config))


def kl_of(reference: LLM, llm: LLM) -> float:
    found = []
    for ids in PROMPTS:
        p, q = (F.log_softmax(each.engine.score(ids)[FIRST_COMPARED:].float(), -1) for each in (reference, llm))
        found.append(F.kl_div(q, p, log_target=True, reduction="sum") / len(p))
    return float(torch.stack(found).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sweep_measures_what_the_built_model_does(family: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder(family)
    goal = (whole(folder, 8) + whole(folder, 4)) // 2
    with LLM(folder, memory=goal, quiet=True) as llm, LLM(folder, dtype="float32", quiet=True) as reference:
        bits = tuple(map(int, llm.precision.plan.split(",")))
        assert {4, 8} == set(bits) and llm.memory_stats()["weights"] <= goal
        units = len(bits)
        swept = Sweep(open_checkpoint(folder), PROMPTS).kl([bits, (FLOAT,) * units, (16,) * units], "", quiet=True)
        assert swept[0] == pytest.approx(kl_of(reference, llm), rel=0.03)
    assert abs(swept[1]) < 1e-9 and abs(swept[2]) < 1e-5 < swept[0]


def test_a_profile_is_measured_once(tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(tiny_folder("llama"))
    goal = WeightGoal(quality=0.02)
    first = plan_weights(checkpoint, goal, lambda: PROMPTS, quiet=True)
    assert first.kl is not None and first.kl <= 0.02 and min(first.bits) < 16
    with monkeypatch.context() as patch:
        patch.setattr(planning, "Sweep", None)  # would fail
        assert plan_weights(checkpoint, goal, lambda: PROMPTS, quiet=True) == first
    (kept,) = planning.folder().glob("*.json")
    kept.write_text(kept.read_text().replace("[", "[null, ", 1))
    assert plan_weights(checkpoint, goal, lambda: PROMPTS, quiet=True).bits == first.bits
    gone = kept.with_name("gone.json")
    gone.write_text('{"files": ["/nowhere/model.safetensors"]}')
    planning.remove_orphans()
    assert kept.exists() and not gone.exists()


def test_layers_that_cost_more_together_than_alone_step_back() -> None:
    class Stacked:
        def __init__(self) -> None:
            self.asked: list[tuple[int, ...]] = []

        def measured(self, bits: tuple[int, ...]) -> float:
            self.asked.append(bits)
            return 3 * sum(units[i].kl[b] for i, b in enumerate(bits)) + 1e-6

    units = [UnitCost.measured({16: 160, 8: 85, 4: 45}, 0.002 * (i + 1), 1e-5) for i in range(6)]
    profile = Stacked()
    plan = planning._for_quality(profile, units, 0.02)  # type: ignore[arg-type]
    assert plan.kl is not None and plan.kl <= 0.02 and len(profile.asked) == 2 and 4 in plan.bits
    with pytest.raises(BadRequest, match="16 bits in all layers") as problem:
        planning._for_quality(profile, units, 1e-7)  # type: ignore[arg-type]
    assert "quality=1.1e-06" in str(problem.value.hint)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_streamed_layers_are_the_same_bits(
    family: str, tiny_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(family)
    seen: list[str] = []
    release = PackedFile.release
    monkeypatch.setattr(PackedFile, "release", lambda self, *names: (seen.extend(names), release(self, *names)))
    with LLM(folder, memory=whole(folder, 4), quiet=True) as resident:
        expected = [resident.engine.score(ids) for ids in PROMPTS]
        answer = resident.generate(PROMPTS[0], max_tokens=12)[0].choices[0].token_ids
    assert not seen
    for _ in range(2):  # written, then read from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING), LLM(folder, memory=whole(folder, 4) - 1, quiet=True) as llm:
            assert "3 of" in caplog.text and "tokens/s here" in caplog.text
            seen.clear()
            assert all(torch.equal(llm.engine.score(ids), e) for ids, e in zip(PROMPTS, expected, strict=True))
            assert llm.generate(PROMPTS[0], max_tokens=12)[0].choices[0].token_ids == answer
        layers = [int(name.split(".")[1]) for name in seen]
        last = llm.config.num_layers
        assert set(layers) == {last - 3, last - 2, last - 1} and layers[:7] == [last - 3] * 7  # in order, each whole


def test_streamed_layers_do_not_stay_in_memory(tiny_folder: Callable[[str], Path], own_home: Path) -> None:
    """What the kernel counts as resident of the mapped file, after a forward."""
    folder = tiny_folder("qwen3")
    with LLM(folder, memory=whole(folder, 4) - 1, quiet=True) as llm:
        llm.engine.score(PROMPTS[0])
        lines = Path("/proc/self/smaps").read_text().splitlines()
        # of this model's file: models of other tests in this process may have theirs mapped too
        mapped = next(i for i, line in enumerate(lines) if line.endswith(".packed") and str(own_home) in line)
        figures = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[mapped + 1 : mapped + 5]}
    sizes = unit_bytes(llm.config)
    streamed = sum(size[4] for size in sizes[1:4])
    assert figures["Size"] > streamed and figures["Rss"] <= figures["Size"] - streamed


def test_streaming_needs_the_cache_folder(tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE_GB", "0")
    folder = tiny_folder("llama")
    with pytest.raises(BadRequest, match="cannot be read from disk") as problem:
        LLM(folder, memory=whole(folder, 4) - 1, quiet=True)
    assert "FORERUN_CACHE_GB" in str(problem.value.hint)


def test_enough_memory_is_16_bits(tiny_folder: Callable[[str], Path]) -> None:
    with LLM(tiny_folder("qwen3"), memory="1G", quiet=True) as llm:
        assert set(llm.precision.plan.split(",")) == {"16"} and "KL" not in llm.load_report.bits
        assert llm.generate("The lamp", max_tokens=3)[0].choices[0].token_ids
    assert not list(planning.folder().glob("*"))


def test_16_bit_layers_run_in_one_call_with_the_others(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("qwen3")
    with LLM(folder, memory=(whole(folder, 16) + whole(folder, 8)) // 2, quiet=True) as llm:
        assert {"16", "8"} <= set(llm.precision.plan.split(","))
        runner = llm.engine.runner
        assert isinstance(runner.decoder.attention, PagedCpuAttention)
        assert FusedLayers.possible(runner.decoder.layers, runner.kv)
        whole_prompt = llm.engine.score(PROMPTS[0])
        assert torch.equal(llm.engine.score(PROMPTS[0][:7]), whole_prompt[:7])  # bits do not depend on the batch


def test_what_cannot_be_quantised_is_refused(
    tiny_folder: Callable[[str], Path], tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(BadRequest, match="quantised already"):
        LLM(tiny_gguf("llama", "Q8_0"), memory="1G")
    for memory, quality, weights, device, said in (
        ("1G", 0.1, "auto", cpu, "either decides"),
        ("1G", None, "int8", cpu, "they are given: int8"),
        ("much", None, "auto", cpu, "memory is 'much'"),
        (True, None, "auto", cpu, "memory is True"),
        (0, None, "auto", cpu, "memory is 0"),
        (None, 0.0, "auto", cpu, "quality is 0.0"),
        (None, "good", "auto", cpu, "quality is 'good'"),
        (None, 0.1, "auto", torch.device("cuda"), "the device is cuda"),
    ):
        with pytest.raises(BadRequest, match=said):
            weight_goal(memory, quality, weights, device)  # type: ignore[arg-type]
    assert weight_goal(None, None, "int8", cpu) is None
    monkeypatch.setattr(planning, "library", lambda: None)
    with pytest.raises(BadRequest, match="need the C kernels"):
        LLM(tiny_folder("llama"), quality=0.1)


def test_the_command_line_asks_for_both(tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "The lamp", "-m", str(tiny_folder("llama")), "-n", "3", "--stats"]
    for option in (["--memory", "180K"], ["--weights-quality", "0.02"]):
        with pytest.raises(SystemExit) as left:
            main([*asked, *option])
        assert not left.value.code and "bits; head in" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main([*asked, "--memory", "1K"])
    assert left.value.code and "this model needs" in capsys.readouterr().err
