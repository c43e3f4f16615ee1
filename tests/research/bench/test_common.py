"""Arithmetic and prompts of the benches, without running one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forerun import data
from forerun.errors import BadRequest
from forerun_research.bench.common import Prompts, Setup, long_text, ratio, same_prefix, spread, summarise


def test_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 10.0]) == {"median": 3.0, "min": 1.0, "max": 10.0}
    found = summarise([{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 6.0}], ["a"])
    assert found == {"a": {"median": 2.0, "min": 1.0, "max": 3.0}}


def test_long_text_is_all_documents_or_all_prompts_of_a_file(tmp_path: Path) -> None:
    handbook, depot = data.text("documents/handbook.txt"), data.text("documents/depot.py")
    assert long_text() == f"{handbook}\n\n{depot}"
    lines = tmp_path / "mine.jsonl"
    lines.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert long_text(lines) == "one\n\ntwo"


def test_ratio_above_one_means_forerun_is_better() -> None:
    result = {"forerun": {"ms": {"median": 2.0}, "rate": {"median": 30.0}}}
    result["transformers"] = {"ms": {"median": 6.0}, "rate": {"median": 10.0}}
    assert ratio(result, "transformers", "ms") == 3.0
    assert ratio(result, "transformers", "rate", higher_is_better=True) == 3.0
    assert ratio(result, "none", "ms") is None


def test_same_prefix_counts_common_tokens() -> None:
    assert same_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert same_prefix([1, 2], [1, 2, 3]) == 2
    assert same_prefix([9], [1]) == 0


def test_prompts_have_the_length_asked_for(tiny_folder: Callable[[str], Path]) -> None:
    prompts = Prompts(Setup(str(tiny_folder("llama"))))
    whole = prompts.cut(100_000)
    assert len(whole) == 100_000
    assert prompts.cut(50, skip=7) == whole[7:57]
    asked = prompts.requests(40)  # more than ship: the rest are numbered, so none is a copy
    assert len({tuple(ids) for ids in asked}) == 40
    with pytest.raises(BadRequest, match="2048"):
        prompts.check(2049)


def test_random_shapes_need_no_tokenizer() -> None:
    prompts = Prompts(Setup("unused", shape="tiny"))
    assert len(prompts.cut(30)) == 30 and prompts.cut(30) != prompts.cut(30, skip=1)
    assert all(0 <= token < 512 for ids in prompts.requests(5) for token in ids)


@pytest.mark.parametrize(
    "wrong", [{"against": "vllm"}, {"shape": "70b"}, {"shape": "tiny", "against": "llama.cpp"}], ids=str
)
def test_wrong_setups_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(BadRequest):
        Setup("m", **wrong)  # type: ignore[arg-type]
