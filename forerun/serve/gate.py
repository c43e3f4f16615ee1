"""Who is let in: how many answers are open, for whom, and whether new ones may begin.

Only the event loop's thread uses it. Knows no HTTP beyond the errors it raises, and no engine.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.serve.errors import ApiError
from forerun.serve.keys import Key

LONGEST_WAIT = 60  # seconds that anybody is asked to stay away


class Gate:
    """`running` answers are computed at once, `waiting` more may queue."""

    def __init__(self, running: int, waiting: int) -> None:
        self.running, self.limit = running, running + waiting
        self.open = 0  # answers in the making
        self.draining = False
        self._of_key: Counter[str] = Counter()
        self._mean_s = 1.0  # a request's time, the latest counting most

    @contextmanager
    def enter(self, answers: int, key: Key | None) -> Iterator[None]:
        """Room for that many answers until the block ends, or an error that says when to come again."""
        self._check(answers, key)
        start = time.monotonic()
        self._count(answers, key)
        try:
            yield
        finally:
            self._count(-answers, key)
            self._mean_s += 0.1 * (time.monotonic() - start - self._mean_s)

    def check_open(self) -> None:
        if self.draining:
            hint = "try again in a moment: another one may take its place"
            raise ApiError(503, "this server is shutting down", hint, code="draining", headers={"Retry-After": "5"})

    def _check(self, answers: int, key: Key | None) -> None:
        self.check_open()
        most = self.limit if key is None or key.limit is None else min(self.limit, key.limit)
        if answers > most:
            raise ApiError(400, f"the request wants {answers} answers at once, the limit is {most}", "lower n")
        if self.open + answers > self.limit:
            raise self._busy(f"{self.open} answers are open, the limit is {self.limit}", "queue_full")
        if key is not None and key.limit is not None and self._of_key[key.name] + answers > key.limit:
            mine = self._of_key[key.name]
            raise self._busy(f"this key has {mine} answers open, its limit is {key.limit}", "key_limit")

    def _busy(self, message: str, code: str) -> ApiError:
        rounds = max(1.0, self.open / self.running)
        wait = min(LONGEST_WAIT, max(1, math.ceil(self._mean_s * rounds / 2)))
        return ApiError(429, message, f"try again in {wait} s", code=code, headers={"Retry-After": str(wait)})

    def _count(self, answers: int, key: Key | None) -> None:
        self.open += answers
        if key is not None:
            self._of_key[key.name] += answers
