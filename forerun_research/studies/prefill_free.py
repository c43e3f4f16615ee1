"""Free-running answers: how far a greedy answer from drafted K/V stays that of exact prefill, and where it parts.

`compounding` gives the exact answer token by token; here each answer goes on from its own tokens. `upgraded after n`:
the first n tokens come from drafted K/V, then the prompt and those tokens are computed exactly, as `LLM.upgrade` does
it, and the answer goes on; what is left of the error are the tokens already said. `exact, continued after n` takes the
same way with exact prefill's own tokens: where that parts, it is by rounding. An answer that parted may still be right:
`free-code` (`prefill_free_code.py`) judges that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

from forerun.core import SamplingParams
from forerun.errors import BadRequest
from forerun_research.studies.intervals import bootstrap, wilson
from forerun_research.studies.plots import Figure, Line
from forerun_research.studies.prefill_drop import DROP
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase
from forerun_research.studies.prefill_score import adjusted, figures
from forerun_research.studies.prefill_subject import StudyAnswer, StudySubject
from forerun_research.studies.study import EXACT, Setting

CONTINUED = "exact, continued after {}"


def upgraded_name(setting: str, tokens: int) -> str:
    return f"{setting}, upgraded after {tokens}"


def free_conditions(settings: Sequence[Setting], upgrade: int) -> list[str]:
    names = [name for s in settings for name in (s.name, upgraded_name(s.name, upgrade))]
    return [EXACT, CONTINUED.format(upgrade), *names]


def free_answers(
    subject: StudySubject, ids: list[int], setting: Setting | None, params: SamplingParams, upgrade: int
) -> tuple[StudyAnswer, StudyAnswer]:
    """A greedy answer as the setting says (None: exact), and the one that goes on exactly after its first `upgrade`
    tokens. Both start from cold caches and leave none."""
    if setting is not None and setting.prefill.source == DROP:
        raise BadRequest(f"setting {setting.name!r} drops tokens: nothing is there to upgrade", "leave it out")
    llm, tokens = subject.llm, params.max_tokens
    assert tokens is not None and tokens > upgrade  # measures say how long an answer is
    llm.clear_cache()
    with nullcontext() if setting is None else adjusted(subject.engine, setting):
        own = llm.generate(ids, replace(params, prefill="exact" if setting is None else setting.prefill))[0]
    about = figures(own.usage.prefill, own.usage.ttft_s)
    first = own.token_ids[:upgrade]
    rest: list[int] = []
    if len(own.token_ids) > upgrade:
        llm.upgrade()
        rest = llm.generate(ids + first, replace(params, max_tokens=tokens - upgrade))[0].token_ids
    llm.clear_cache()
    answers = [_answer(subject, said, params.stop, about) for said in (own.token_ids, first + rest)]
    return answers[0], answers[1]


def _answer(subject: StudySubject, tokens: list[int], stop: Sequence[str], about: dict[str, object]) -> StudyAnswer:
    text = subject.tokenizer.decode(tokens)
    ends = [at for mark in stop if (at := text.find(mark)) >= 0]
    return StudyAnswer(text[: min(ends)] if ends else text, tokens, about)


def free_run(
    subject: StudySubject,
    case: StudyCase,
    settings: Sequence[Setting],
    wanted: Sequence[str],
    before: Record | None,
    params: SamplingParams,
    upgrade: int,
) -> Iterator[tuple[str, StudyAnswer, StudyAnswer]]:
    """(condition, answer, exact prefill's answer) of the wanted conditions; `before` is exact prefill's record."""
    continued = CONTINUED.format(upgrade)
    if before is None or continued in wanted:
        exact, again = free_answers(subject, case.ids, None, params, upgrade)
        yield EXACT, exact, exact
        if continued in wanted:
            yield continued, again, exact
    else:
        exact = StudyAnswer(str(before["answer"]), list(before["answer ids"]), {})
    for setting in settings:
        names = (setting.name, upgraded_name(setting.name, upgrade))
        if any(name in wanted for name in names):
            answers = free_answers(subject, case.ids, setting, params, upgrade)
            yield from ((name, answer, exact) for name, answer in zip(names, answers, strict=True) if name in wanted)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens before the first one in which two answers differ; one that ends earlier differs there."""
    same = 0
    for ours, theirs in zip(left, right, strict=False):
        if ours != theirs:
            break
        same += 1
    return same


def free_record(answer: StudyAnswer, exact: StudyAnswer) -> Record:
    same = answer.token_ids == exact.token_ids
    return {
        "parted": None if same else common_prefix(answer.token_ids, exact.token_ids),
        "answer tokens": len(answer.token_ids),
        "exact tokens": len(exact.token_ids),
        "answer": answer.text,
        "answer ids": answer.token_ids,
        **answer.figures,
    }


def together(record: Record, tokens: int) -> bool:
    """Whether an answer was still exact prefill's after so many tokens, or ended as it did."""
    return record["parted"] is None or int(record["parted"]) >= tokens


@dataclass(frozen=True)
class FreeRunning(Measure):
    name: ClassVar[str] = "free-running"

    prompts: int = 64
    length: int = 3072
    tokens: int = 256  # of the answer, whatever ends it
    upgrade: int = 32
    marks: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256)  # tokens after which survivors are counted
    question: str = "Explain the text above in detail, one part after the other."
    texts: tuple[str, ...] = ("stdlib", "essays")
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.upgrade < self.tokens:
            raise ValueError(f"upgrade {self.upgrade} must lie within the {self.tokens} tokens of the answer")

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        pieces = subject.texts.mixed(self.texts, self.length - 64, self.prompts, self.seed)  # room for the question
        decode = subject.tokenizer.decode
        return [StudyCase(name, subject.ask(f"{decode(ids)}\n\n{self.question}")) for name, ids in pieces]

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return free_conditions(settings, self.upgrade)

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        params = SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        before = done.get(EXACT, {}).get(case.id)
        for name, answer, exact in free_run(subject, case, settings, wanted, before, params, self.upgrade):
            record = free_record(answer, exact)
            stood = self.tokens if record["parted"] is None else record["parted"]
            yield name, {"score": stood / self.tokens, **record, "tokens": len(case.ids)}

    def summary(self, found: Found) -> list[Row]:
        """Of each condition: the tokens before it parts (those that never do count in full), and the share of prompts
        that had not parted after so many."""
        table: list[Row] = []
        for name, cases in found.items():
            records = list(cases.values())
            stood = [float(r["score"]) * self.tokens for r in records]
            for mark in (mark for mark in self.marks if mark <= self.tokens):
                alive = sum(together(r, mark) for r in records)
                row: Row = {"setting": name, "prompts": len(records), "after tokens": mark, "the same": alive}
                row["score"] = alive / len(records)
                row["low"], row["high"] = wilson(alive, len(records))
                row["tokens before parting"] = fmean(stood)
                row["tokens before parting low"], row["tokens before parting high"] = bootstrap([stood])
                table.append(row)
        return table

    def figures(self, found: Found) -> list[Figure]:
        table, lines = self.summary(found), []
        for name in (name for name in found if name != EXACT):
            own = [row for row in table if row["setting"] == name]
            at = [float(row["after tokens"]) for row in own]
            lines.append(Line(name, at, *([float(row[key]) for row in own] for key in ("score", "low", "high"))))
        return [Figure("answers that are still exact prefill's", "tokens of the answer", "share of prompts", lines)]
