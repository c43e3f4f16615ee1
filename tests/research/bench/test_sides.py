"""Sides in processes of their own: order of runs, results, errors that come through."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import main
from forerun.errors import BadRequest, ModelNotFound
from forerun_research.bench import sides
from forerun_research.bench.sides import SideProcess, SideSpec, alternate, open_side


class FakeSide:
    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order

    def call(self, method: str, *args: Any) -> dict[str, int]:
        self.order.append(self.name)
        return {"run": len(self.order)}


def test_runs_alternate_and_the_first_is_for_warmth() -> None:
    order: list[str] = []
    samples = alternate([FakeSide("a", order), FakeSide("b", order)], 2, "decode")  # type: ignore[list-item]
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert samples == {"a": [{"run": 3}, {"run": 5}], "b": [{"run": 4}, {"run": 6}]}


def test_errors_of_a_side_keep_their_kind_and_hint() -> None:
    with pytest.raises(ModelNotFound, match="no-such-model") as caught:
        SideProcess(SideSpec("forerun", "no-such-model"))
    assert caught.value.hint


@pytest.mark.parametrize("fails", [False, True])
def test_a_side_whose_parent_has_gone_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    ours, theirs = multiprocessing.Pipe()

    class Interrupted:
        def about(self) -> dict[str, Any]:
            return {}

        def decode(self) -> None:
            ours.close()
            if fails:
                raise RuntimeError("in the middle of a measurement")

    monkeypatch.setattr(sides, "open_side", lambda spec: Interrupted())
    ours.send(("decode", ()))
    sides._serve(theirs, SideSpec("forerun", "none"))  # raises nothing


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(BadRequest, match="vllm"):
        open_side(SideSpec("vllm", "m"))


def test_llama_cpp_wants_a_gguf_file_or_its_package(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(BadRequest) as caught:
        open_side(SideSpec("llama.cpp", str(tiny_folder("llama"))))
    assert ".gguf" in str(caught.value) or "not installed" in str(caught.value)


def bench(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as left:
        main(["bench", *args, "--random-shape", "tiny", "--device", "cpu", "--threads", "1", "--runs", "1", "--json"])
    out = capsys.readouterr().out
    assert left.value.code in (0, None), out
    assert len(out.splitlines()) == 1
    return json.loads(out)


def test_decode_against_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "decode", "--dtype", "float32", "--tokens", "8", "--context", "20")
    assert found["bench"] == "decode" and found["same_tokens"] == 8
    ours, theirs = found["forerun"], found["transformers"]
    assert found["ratio"] == pytest.approx(theirs["ms_per_token"]["median"] / ours["ms_per_token"]["median"], abs=1e-3)
    assert ours["rss_bytes"] > 0 and theirs["peak_bytes"] >= theirs["rss_bytes"]
    assert found["hardware"]["threads"] == 1 and found["hardware"]["cpu"]


def test_prefill_alone_with_a_shared_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "prefill", "--against", "none", "--tokens", "64", "--shared", "48")
    assert found["ratio"] is None and list(found["forerun"]["ttft_s"]) == ["64"]
    assert found["shared"]["cached_tokens"] == 48


def test_batch_against_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "batch", "--requests", "3", "--tokens", "4")
    assert found["requests"] == 3 and found["ratio"] > 0
    assert found["transformers"]["tokens_per_s"]["median"] > 0


def test_forward_costs_by_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "forward", "--context", "32")
    assert list(found["ratio"]) == ["1", "2", "4", "8", "16"] and found["ratio"]["1"] == 1.0
