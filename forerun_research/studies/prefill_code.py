"""Code that is run to judge it: `humaneval-long` (a function to complete, far behind unrelated code) and `edits` (a
file with a bug to fix).

Whether an answer is right is decided by the tests that come with it, in a process of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun_research.studies.prefill_measure import Record, StudyCase, TaskMeasure
from forerun_research.studies.prefill_subject import StudyAnswer, StudySubject
from forerun_research.studies.sandbox import run_program
from forerun_research.studies.study import Setting

# A completion is over where something begins that is not part of the function.
STOPS = ("\ndef ", "\nclass ", "\nif __name__", "\nprint(", "\n@", "\nassert ", "\n#", "\n```")
_BLOCK = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)
_EDIT = "This file has a bug. Fix it and write the whole file again, changing nothing else.\n\n```python\n{}```"


def code_of(answer: str) -> str:
    """The longest fenced block of an answer; all of it where there is none."""
    blocks = _BLOCK.findall(answer)
    return max(blocks, key=len) if blocks else answer


def filler(subject: StudySubject, text: str, tokens: int, number: int, seed: int) -> str:
    """About so many tokens of code that have nothing to do with the task, other ones for each."""
    pieces = subject.texts.pieces(text, tokens, seed)
    return subject.tokenizer.decode(pieces[number % len(pieces)])


@dataclass(frozen=True)
class HumanEvalLong(TaskMeasure):
    name: ClassVar[str] = "humaneval-long"

    prompts: int = 164
    context: int = 4096  # tokens of unrelated code in front
    tokens: int = 384  # of the answer
    seconds: float = 10.0
    text: str = "stdlib"
    file: str = "HumanEval.jsonl.gz"
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        keys = ("task_id", "prompt", "test", "entry_point")
        return [self._case(subject, r, i) for i, r in enumerate(subject.texts.records(self.file, keys)[: self.prompts])]

    def _case(self, subject: StudySubject, record: dict[str, Any], number: int) -> StudyCase:
        before = filler(subject, self.text, self.context, number, self.seed)
        ids = subject.tokenizer.encode(f"{before}\n\n\n{record['prompt']}", add_special=True)
        return StudyCase(record["task_id"], ids, {key: record[key] for key in ("prompt", "test", "entry_point")})

    def answer(self, subject: StudySubject, case: StudyCase, setting: Setting | None) -> StudyAnswer:
        return subject.answer(case.ids, setting, self.tokens, STOPS)

    def judge(self, case: StudyCase, answer: str, exact: str) -> Record:
        more = case.more
        program = f"{more['prompt']}{answer}\n\n{more['test']}\n\ncheck({more['entry_point']})\n"
        outcome = run_program(program, self.seconds)
        return {"score": float(outcome.passed), "error": outcome.error, "same": answer == exact}


@dataclass(frozen=True)
class Edits(TaskMeasure):
    """Bug fixes of HumanEvalPack. Its files are short; `context` puts unrelated code in front of the request."""

    name: ClassVar[str] = "edits"

    prompts: int = 164
    context: int = 0
    tokens: int = 512
    seconds: float = 10.0
    text: str = "stdlib"
    file: str = "humanevalpack_python.jsonl"
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        keys = ("task_id", "prompt", "buggy_solution", "test")
        return [self._case(subject, r, i) for i, r in enumerate(subject.texts.records(self.file, keys)[: self.prompts])]

    def _case(self, subject: StudySubject, record: dict[str, Any], number: int) -> StudyCase:
        asked = _EDIT.format(record["prompt"] + record["buggy_solution"])
        if self.context:
            before = filler(subject, self.text, self.context, number, self.seed)
            asked = f"Another file of the project, for reference:\n\n```python\n{before}\n```\n\n{asked}"
        return StudyCase(record["task_id"], subject.ask(asked), {"test": record["test"], "prompt": record["prompt"]})

    def answer(self, subject: StudySubject, case: StudyCase, setting: Setting | None) -> StudyAnswer:
        return subject.answer(case.ids, setting, self.tokens)

    def judge(self, case: StudyCase, answer: str, exact: str) -> Record:
        # Imports of the file come first, in case the answer left them out: they are not what is tested.
        imports = "\n".join(line for line in case.more["prompt"].splitlines() if line.startswith(("import", "from ")))
        outcome = run_program(f"{imports}\n{code_of(answer)}\n\n{case.more['test']}\n", self.seconds)
        return {"score": float(outcome.passed), "error": outcome.error, "same": answer == exact}
