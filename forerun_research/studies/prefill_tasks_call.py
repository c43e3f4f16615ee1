"""A call far below its definition: the right completion is told by a function some thousand tokens above, nowhere else.

Two kinds: `keywords` (a call to be completed, whose keyword-only parameters have unusual names) and `constant` (an
assertion to be completed with the number that a function returns). Between definition and call stand whole functions
of a collection of Python files, so that nothing is cut in the middle; the distance is reached as nearly as whole
functions allow. Completions are parsed, never run. Names are made of two words each; that the file's other functions do
not use the same ones is not checked.
"""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.errors import BadRequest
from forerun_research.studies.prefill_measure import Record, StudyCase, TaskMeasure
from forerun_research.studies.prefill_needle import Haystack
from forerun_research.studies.prefill_subject import StudyAnswer, StudySubject
from forerun_research.studies.study import Setting

KINDS_OF_CALL = ("keywords", "constant")
MAX_FUNCTION_TOKENS = 256  # longer functions are left out: the distance is missed by less than one
VERBS = ("settle", "weigh", "moor", "ferry", "caulk", "hoist", "splice", "stow", "ballast", "dredge")
THINGS = ("tariff", "lantern", "pontoon", "manifest", "capstan", "bollard", "ledger", "keelson", "cordage", "beacon")
WHICH = ("amber", "tidal", "leeward", "brass", "winter", "quarter", "hollow", "northern", "second", "quiet")


def functions(source: str) -> list[str]:
    """The top-level functions of a Python file; none where it is not one."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
    found = [ast.get_source_segment(source, node) for node in body if isinstance(node, ast.FunctionDef)]
    return [text for text in found if text]


def call_keywords(completion: str) -> set[str] | None:
    """Names of the keywords of `f(1, COMPLETION`; None where it is no call. What stands after the call is not read."""
    for end in (at + 1 for at, sign in enumerate(completion) if sign == ")"):
        try:
            call = ast.parse(f"f(1, {completion[:end].strip()}", mode="eval").body
        except (SyntaxError, ValueError):
            continue
        return {keyword.arg or "" for keyword in call.keywords} if isinstance(call, ast.Call) else None
    return None


def literal(completion: str) -> Any:
    """The value on the first line; None where it is not one."""
    line = next(iter(completion.strip().splitlines()), "")
    try:
        return ast.literal_eval(line.partition("#")[0].partition(",")[0].strip())
    except (SyntaxError, ValueError):
        return None


@dataclass(frozen=True)
class CallAbove(TaskMeasure):
    name: ClassVar[str] = "call-above"

    prompts: int = 64  # the kinds taking turns
    distance: int = 4096  # tokens from the definition to the call
    before: int = 512  # tokens of other functions above the definition: what comes first is never drafted
    tokens: int = 40  # of the answer
    text: str = "stdlib"
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        units = [part for text in subject.texts.documents(self.text) for part in functions(text)]
        sizes = [len(subject.tokenizer.encode(f"\n\n\n{part}")) for part in units]
        short = [(part, size) for part, size in zip(units, sizes, strict=True) if size <= MAX_FUNCTION_TOKENS]
        if not short:
            raise BadRequest(f"{self.text} has no Python function of up to {MAX_FUNCTION_TOKENS} tokens", "name code")
        hay = Haystack([part for part, _ in short], [size for _, size in short])
        return [self.case(subject, hay, number) for number in range(self.prompts)]

    def case(self, subject: StudySubject, hay: Haystack, number: int) -> StudyCase:
        draw = random.Random(f"{self.seed} {self.distance} {number}")
        kind = KINDS_OF_CALL[number % len(KINDS_OF_CALL)]
        definition, call, wanted = _made(draw, kind)
        skip = draw.randrange(len(hay.parts))
        above = [part for part, _ in hay.cut(self.before, skip)]
        between = [part for part, _ in hay.cut(self.distance, skip + len(above))]
        ids = subject.tokenizer.encode("\n\n\n".join((*above, definition, *between, call)), add_special=True)
        if not subject.fits(len(ids) + self.tokens):
            raise BadRequest(f"a prompt of {len(ids)} tokens does not fit into the context", "lower the distance")
        return StudyCase(f"{kind} {number}", ids, {"group": kind, "wanted": wanted, "definition": definition})

    def answer(self, subject: StudySubject, case: StudyCase, setting: Setting | None) -> StudyAnswer:
        return subject.answer(case.ids, setting, self.tokens, ("\n\n",))

    def judge(self, case: StudyCase, answer: str, exact: str) -> Record:
        wanted = case.more["wanted"]
        given = call_keywords(answer) if case.more["group"] == "keywords" else literal(answer)
        right = given == (set(wanted) if case.more["group"] == "keywords" else wanted)
        return {"score": float(right), "same": answer == exact, "wanted": wanted}


def _made(draw: random.Random, kind: str) -> tuple[str, str, Any]:
    """Definition, beginning of the call, and what completes it."""
    name = f"{draw.choice(VERBS)}_{draw.choice(THINGS)}"
    if kind == "constant":
        number = draw.randrange(10_000, 100_000)
        definition = f'def {name}_code():\n    """The code of this {name.split("_")[1]}."""\n    return {number}'
        return definition, f"def test_{name}_code():\n    assert {name}_code() ==", number
    first, second = (
        f"{which}_{thing}" for which, thing in zip(draw.sample(WHICH, 2), draw.sample(THINGS, 2), strict=True)
    )
    definition = (
        f"def {name}(amount, *, {first}, {second}):\n"
        f'    """The amount by both rates."""\n'
        f"    return amount * {first} + {second}"
    )
    return definition, f"def test_{name}():\n    # all parameters given\n    total = {name}(12,", [first, second]
