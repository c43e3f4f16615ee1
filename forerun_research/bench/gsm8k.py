"""GSM8K as a task: questions with their numbers, two worked examples, and the number that an answer ends with."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from forerun.llm import Messages

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_EXAMPLES = (  # of our own making, so that no question of the data is shown
    (
        "A baker has 24 rolls and sells 3 bags of 6. How many rolls are left?",
        "3 bags of 6 rolls are 3 * 6 = 18 rolls. 24 - 18 = 6 rolls are left.\n#### 6",
    ),
    (
        "Tom reads 12 pages a day for a week, and then 6 more. How many pages did he read?",
        "In a week he reads 12 * 7 = 84 pages. Together he read 84 + 6 = 90 pages.\n#### 90",
    ),
)


@dataclass(frozen=True)
class MathQuestion:
    text: str
    answer: float

    @property
    def messages(self) -> Messages:
        shown = [
            {"role": role, "content": text}
            for question, answer in _EXAMPLES
            for role, text in (("user", question), ("assistant", answer))
        ]
        return [*shown, {"role": "user", "content": self.text}]


def read_questions(path: Path) -> list[MathQuestion]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [MathQuestion(row["question"], float(row["answer"].rsplit("####", 1)[1].replace(",", ""))) for row in rows]


def final_number(text: str) -> float | None:
    """The number after `####`, else the last one."""
    found = _NUMBER.findall(text.rsplit("####", 1)[-1]) or _NUMBER.findall(text)
    return float((found[0] if "####" in text else found[-1]).replace(",", "")) if found else None
