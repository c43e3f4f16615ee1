"""Traces are read or refused; a replay counts what was read from cache, with and without guesses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.errors import BadRequest
from forerun_research.bench.agent_trace import AgentTrace, TraceTurn, read_trace, replay

HEAD = {"trace": "mine", "system": "You keep the light."}
FIRST = {"id": "a", "session": "main", "role": "user", "content": "Is the lamp lit?"}


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def test_the_shipped_trace_is_an_agent_s_day() -> None:
    trace = read_trace()
    assert len(trace.turns) == 40 and {turn.role for turn in trace.turns} == {"user", "tool"}
    sessions = {turn.session for turn in trace.turns}
    assert len(sessions) >= 3
    known = {turn.id: turn for turn in trace.turns}
    forks = [turn for turn in trace.turns if turn.after and known[turn.after].session != turn.session]
    assert len(forks) == len(sessions) - 1  # every other conversation branches from one before it
    assert len({turn.content for turn in trace.turns}) == 40
    assert len(read_trace(most=3).turns) == 3


def test_turns_follow_their_session_or_the_turn_they_name(tmp_path: Path) -> None:
    fork = {"session": "side", "from": "a", "role": "tool", "content": "oil: 3 litres", "max_tokens": 5}
    more = {"session": "main", "role": "user", "content": "And now?"}
    trace = read_trace(write(tmp_path / "t.jsonl", HEAD, FIRST, fork, more))
    assert trace.name == "mine"
    assert [(turn.id, turn.after) for turn in trace.turns] == [("a", None), ("3", "a"), ("4", "a")]
    assert trace.turns[1].message == {"role": "user", "content": "[tool result]\noil: 3 litres"}
    assert [turn.max_tokens for turn in trace.turns] == [32, 5, 32]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([HEAD], "no turn"),
        ([{"trace": "x"}, FIRST], "line 1: no `system`"),
        ([HEAD, FIRST, FIRST], "line 3: a turn called 'a'"),
        ([HEAD, FIRST | {"from": "z"}], "'z'"),
        ([HEAD, FIRST | {"role": "god"}], "role 'god'"),
        ([HEAD, FIRST | {"content": " "}], "content"),
        ([HEAD, FIRST | {"session": 3}], "session"),
        ([HEAD, FIRST | {"max_tokens": 0}], "max_tokens is 0"),
        ([HEAD, FIRST | {"tokens": 3}], "'tokens'"),
        ([HEAD, [1]], "line 2: not a JSON object"),
    ],
    ids=str,
)
def test_bad_traces_are_refused_with_their_line(tmp_path: Path, records: list[Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        read_trace(write(tmp_path / "t.jsonl", *records))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"system": "x"}\n{')
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    for name, said in (("missing", "missing"), ("broken", "line 2"), ("binary", "binary")):
        with pytest.raises(BadRequest, match=said):
            read_trace(tmp_path / f"{name}.jsonl")


def test_most_of_a_growing_conversation_is_read_from_cache(tiny_folder: Callable[[str], Path]) -> None:
    turns = [TraceTurn(str(i), "main", str(i - 1) if i else None, "user", f"Ship {i} passes.", 4) for i in range(10)]
    turns.append(TraceTurn("side", "side", "4", "tool", "fog until noon", 4))
    trace = AgentTrace("ships", "You count ships and write their names. " * 3, tuple(turns))
    with LLM(str(tiny_folder("llama")), threads=1, quiet=True, dtype="float32") as llm:
        plain, spec_state = (replay(llm, trace, name) for name in ("off", "lookup+suffix"))
        assert plain.cached_share == spec_state.cached_share > 0.75
        assert (
            plain.turns[0]["cached_tokens"] == 0 and plain.turns[10]["cached_tokens"] > plain.turns[4]["cached_tokens"]
        )
        record = plain.record()
        assert record["turns"] == 11 and record["stats"]["sessions"]["side"]["answers"] == 1
        served = plain.stats.served
        assert served["pool"] == plain.cached_tokens and sum(served.values()) == plain.prompt_tokens
        assert plain.stats.computed_per_answer > 0
