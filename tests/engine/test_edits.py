"""Edit programs through the engine: copied lines enter the sequence and its K/V in one forward, with every drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.errors import BadRequest
from forerun.params import Grammar
from forerun.text.edit_program import CopyStep, ProgramReader, SourceLines
from tests.engine.common import Answer, finish, leaked, make_engine

TEXT = "".join(f"line {i} of the lamp\n" for i in range(1, 24))
COPIES = [{"temperature": 1.0, "seed": 3}, {"temperature": 1.5, "seed": 8}, {}]


def asked(engine: Engine, **values: Any) -> tuple[list[int], SamplingParams]:
    """A random model begins most steps with a copy if it may hardly write an n."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    rarely = {tokenizer.encode("n")[0]: -8.0, tokenizer.encode("<new")[1]: -8.0}
    values = {"max_tokens": 60, "grammar": Grammar.edit(TEXT), "logit_bias": rarely} | values
    return tokenizer.encode("write " + TEXT)[:200], SamplingParams(**values)


def run(engine: Engine, **values: Any) -> tuple[Answer, list[int], list[int]]:
    """The answer, all tokens of its sequence, and how many tokens of it each forward ran."""
    answer = Answer(engine, *asked(engine, **values))
    engine.process_inbox()
    seq, counts, before = engine.scheduler.sequences[0], [], 0
    while not engine.idle:
        engine.step()
        counts.append(seq.computed - before)
        before = seq.computed
    return answer, seq.tokens, counts


def steps_of(answer: Answer) -> list[CopyStep]:
    reader = ProgramReader(SourceLines(TEXT))
    reader.push(answer.text())
    return [step for step in reader.steps if isinstance(step, CopyStep)]


@pytest.mark.parametrize("values", COPIES)
def test_copied_lines_follow_in_the_sequence_and_run_at_once(
    values: dict[str, Any], tiny_folder: Callable[[str], Path]
):
    engine = make_engine(tiny_folder("qwen2"), max_num_batched_tokens=512)
    answer, tokens, counts = run(engine, speculation="off", **values)
    spans = ["".join(line + "\n" for line in SourceLines(TEXT).span(s)) for s in steps_of(answer) if s.last is not None]
    assert spans, "this seed copies nothing"
    sizes = [len(engine.tokenizer.encode(span)) for span in spans]  # type: ignore[union-attr]
    usage = answer.last.usage
    assert usage is not None and usage.copied == sum(sizes)
    assert usage.completion_tokens == len(answer.tokens()) == len(tokens) - 200 - usage.copied
    # one forward for the prompt, one a sampled token, and the lines of a copy run with the token that completed it
    assert len(counts) <= len(answer.tokens()) and all(size + 1 in counts for size in sizes[:-1])
    text = engine.tokenizer.decode(tokens[200:])  # type: ignore[union-attr]
    assert all(span in text for span in spans)
    assert leaked(engine) == 0


def test_tokens_after_a_copy_are_those_after_the_same_text(tiny_folder: Callable[[str], Path]):
    """K/V of copied lines is what a prompt with these lines has: every sampled token had the probability that it has
    in one forward over the whole sequence."""
    engine = make_engine(tiny_folder("qwen2"))
    answer, tokens, _ = run(engine, speculation="off", logprobs=0, **COPIES[0])
    found = [entry for event in answer.events for entry in event.logprobs]
    rows, at = engine.score(tokens).log_softmax(-1), 199
    copied = 0
    for entry in found:
        while tokens[at + 1] != entry.token_id or abs(float(rows[at, entry.token_id]) - entry.logprob) > 1e-3:
            at, copied = at + 1, copied + 1
        at += 1
    assert answer.last.usage is not None and copied == answer.last.usage.copied > 0 and at == len(tokens) - 1


@pytest.mark.parametrize("values", COPIES)
def test_drafters_change_nothing(values: dict[str, Any], tiny_folder: Callable[[str], Path]):
    def answer(drafter: str, **config: Any) -> tuple[str, list[int]]:
        engine = make_engine(tiny_folder("qwen2"), **config)
        found, tokens, _ = run(engine, speculation=drafter, **values)
        assert leaked(engine) == 0
        return found.text(), tokens

    plain = answer("off")
    for name in ("auto", "grammar+copy", "self"):
        assert answer(name) == plain
    assert answer("off", max_num_batched_tokens=17) == plain  # copied lines in several chunks


def test_a_preempted_program_goes_on_where_it_was(tiny_folder: Callable[[str], Path]):
    prompt, params = asked(make_engine(tiny_folder("qwen2")), speculation="off", **COPIES[0])
    prompts = [[first, *prompt] for first in (5, 6, 7)]

    def answers(**config: Any) -> list[Answer]:
        engine = make_engine(tiny_folder("qwen2"), **config)
        found = [Answer(engine, each, params) for each in prompts]
        finish(engine)
        assert leaked(engine) == 0
        return found

    roomy, tight = answers(), answers(kv_cache_tokens=648)  # of three sequences of up to 321 tokens
    assert [each.text() for each in tight] == [each.text() for each in roomy]
    assert all(each.last.usage is not None and each.last.usage.copied for each in roomy)
    assert any(each.last.usage is not None and each.last.usage.preemptions for each in tight)


def test_a_copy_that_the_context_has_no_room_for_ends_the_answer(tiny_folder: Callable[[str], Path]):
    engine = make_engine(tiny_folder("qwen2"), max_model_len=224)
    answer, tokens, _ = run(engine, speculation="off", **COPIES[0])
    assert answer.last.finish_reason == "length" and len(tokens) < 224 and leaked(engine) == 0


def test_what_edit_programs_refuse():
    with pytest.raises(BadRequest, match="conditional"):
        Grammar("edit", TEXT, "conditional")
    with pytest.raises(BadRequest, match="provisional"):
        SamplingParams(grammar=Grammar.edit(TEXT), prefill="provisional")
