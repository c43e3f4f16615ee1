"""Answers under a grammar, through the engine: what it allows and nothing else, with every drafter as without."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, ForerunError, Grammar, SamplingParams
from forerun.core import SamplingParams as Params
from forerun.errors import BadRequest
from tests.engine.common import Answer, finish, leaked, make_engine

PHONE = Grammar("regex", r"[0-9]{3}-[0-9]{4} (mobile|home)")
PROMPTS = [[5, 6, 7, 8] * 4, list(range(20, 60)), [9, 9, 40, 41, 9, 9]]


@pytest.mark.parametrize("values", [{}, {"temperature": 1.5, "seed": 2}, {"temperature": 0.7, "seed": 1, "top_k": 3}])
def test_speculation_changes_nothing_under_a_grammar(values: dict[str, Any], tiny_folder: Callable[[str], Path]):
    def answers(drafter: str) -> list[str]:
        engine = make_engine(tiny_folder("qwen2"))
        asked = Params(max_tokens=40, grammar=PHONE, speculation=drafter, **values)
        found = [Answer(engine, prompt, asked) for prompt in PROMPTS]
        finish(engine)
        assert leaked(engine) == 0 and all(a.last.finish_reason == "stop" for a in found)
        return [answer.text() for answer in found]

    plain = answers("off")
    assert all(re.fullmatch(PHONE.source, text) for text in plain)
    for name in ("auto", "grammar", "lookup", "suffix+copy"):
        assert answers(name) == plain


def test_a_dead_end_ends_one_request_and_no_other(tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(tiny_folder("qwen2"))
    caught = Answer(engine, PROMPTS[0], Params(max_tokens=20, grammar=PHONE))
    free = Answer(engine, PROMPTS[1], Params(max_tokens=20, ignore_eos=True))
    engine.process_inbox()
    seq = next(s for s in engine.scheduler.sequences if s.grammar is not None)

    def dead(path: object) -> None:
        raise ForerunError("nothing may follow")

    for _ in range(4):
        engine.step()
    monkeypatch.setattr(seq.grammar, "allowed", dead)
    finish(engine)
    assert caught.last.finish_reason == "error" and isinstance(caught.last.error, ForerunError)
    assert free.last.finish_reason == "length" and len(free.tokens()) == 20
    assert leaked(engine) == 0


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), quiet=True, max_model_len=1024) as made:
        yield made


def test_a_real_model_writes_the_json_it_was_asked_for(llm: LLM):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    asked = [{"role": "user", "content": "Invent a lighthouse keeper. Answer with JSON: name and age."}]
    texts = []
    for speculate in ("off", "auto", "grammar"):
        params = SamplingParams(
            max_tokens=60, grammar=Grammar("json_schema", json.dumps(schema)), speculation=speculate
        )
        answer = llm.chat(asked, params)[0]
        texts.append(answer.text)
        assert answer.finish_reason == "stop"
    assert len(set(texts)) == 1
    found = json.loads(texts[0])
    assert set(found) == {"name", "age"} and isinstance(found["age"], int)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", "{not json"), "JSON"),
        (Grammar("regex", "(unclosed"), "regex"),
        (Grammar("lark", "start: missing"), "Lark"),
        (Grammar("regex", "[^\\x00-\\U0010FFFF]"), "regex"),
    ],
)
def test_bad_grammars_are_refused_before_anything_runs(llm: LLM, grammar: Grammar, words: str):
    with pytest.raises(BadRequest, match=words) as error:
        llm.generate("The", SamplingParams(grammar=grammar))
    assert error.value.hint
    assert llm.engine.idle
