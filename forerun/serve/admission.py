"""Admission control: how many answers may be open at once, in total and per key, and whether new ones are accepted.

Half of all places are shared out among the keys by their weights: whatever the others do, a key finds its part of them
free. The rest is for whichever request comes first. Only the event loop's thread uses it. Knows no HTTP beyond the
errors it raises, and no engine.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.serve.config import ApiKey, ApiKeys
from forerun.serve.errors import ApiError

MAX_RETRY_AFTER_S = 60
MEAN_WEIGHT = 0.1  # of the latest request in the moving mean of request times
RESERVED_SHARE = 0.5  # of all places, for keys that have few answers open


class AdmissionControl:
    """`max_running` answers are computed at once, `max_queued` more may wait. `keys`: those that share the places."""

    def __init__(self, max_running: int, max_queued: int, keys: ApiKeys | None = None) -> None:
        self._keys = keys
        self.max_running, self.max_open = max_running, max_running + max_queued
        self.num_open = 0  # answers that are not complete, queued ones too
        self.draining = False
        self._open_by_key: Counter[str] = Counter()
        self._mean_s = 1.0

    @contextmanager
    def admit(self, answers: int, key: ApiKey | None) -> Iterator[None]:
        """Count that many answers as open until the block ends; raises 429 with a time to retry where it is full."""
        self._check(answers, key)
        start = time.monotonic()
        self._count(answers, key)
        try:
            yield
        finally:
            self._count(-answers, key)
            self._mean_s += MEAN_WEIGHT * (time.monotonic() - start - self._mean_s)

    def check_accepting(self) -> None:
        if self.draining:
            hint = "try again in a moment: another one may take its place"
            raise ApiError(503, "this server is shutting down", hint, code="draining", headers={"Retry-After": "5"})

    def _check(self, answers: int, key: ApiKey | None) -> None:
        self.check_accepting()
        limit = self.max_open if key is None or key.limit is None else min(self.max_open, key.limit)
        if answers > limit:
            raise ApiError(400, f"the request wants {answers} answers at once, the limit is {limit}", "lower n")
        if self.num_open + answers > self.max_open:
            raise self._busy(f"{self.num_open} answers are open, the limit is {self.max_open}", "queue_full")
        if key is not None and key.limit is not None and self._open_by_key[key.name] + answers > key.limit:
            open_now = self._open_by_key[key.name]
            raise self._busy(f"this key has {open_now} answers open, its limit is {key.limit}", "key_limit")
        if key is not None and self.num_open + answers > self.max_open - self._reserved_for_others(key, answers):
            own = self._open_by_key[key.name]
            raise self._busy(f"this key has {own} answers open, and the places left are for other keys", "key_share")

    def _reserved_for_others(self, key: ApiKey, answers: int) -> int:
        """Places that other keys have not taken of their parts; a key within its own part finds all places free."""
        keys = self._keys.keys if self._keys is not None else ()
        unit = RESERVED_SHARE * self.max_open / (sum(each.weight for each in keys) or 1.0)
        if self._open_by_key[key.name] + answers <= int(unit * key.weight):
            return 0
        return sum(max(0, int(unit * k.weight) - self._open_by_key[k.name]) for k in keys if k.name != key.name)

    def _busy(self, message: str, code: str) -> ApiError:
        rounds = max(1.0, self.num_open / self.max_running)
        wait = min(MAX_RETRY_AFTER_S, max(1, math.ceil(self._mean_s * rounds / 2)))
        return ApiError(429, message, f"try again in {wait} s", code=code, headers={"Retry-After": str(wait)})

    def _count(self, answers: int, key: ApiKey | None) -> None:
        self.num_open += answers
        if key is not None:
            self._open_by_key[key.name] += answers
