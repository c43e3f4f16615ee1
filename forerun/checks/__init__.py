"""Checks: what `forerun check` and `forerun models info --quality` run, and one result of a check."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that was checked. `checked` is False where nothing was drafted, so that nothing could go wrong."""

    part: str  # of the check: exact, sampled, greedy or consistency
    name: str
    passed: bool
    detail: str
    checked: bool = True
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return ("pass" if self.checked else "not checked") if self.passed else "FAIL"
