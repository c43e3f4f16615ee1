"""Parts of many responses on their way from a replica to a front, as many at a time as there are.

One item of a Ray stream costs about a millisecond on either side, and a step of the engine has a token for each of its
streams: all of them travel as one item. A request's own call carries no parts; it is open as long as the request is, so
that Ray counts and cancels it. Knows no Ray and no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

GATHER_S = 0.002  # after a first part, for those of the same step
LINGER_S = 1.0  # a stream of parts without open requests: less than draining may take, more than between two turns

Batch = list[tuple[int, Any]]  # number of a request, and its part; None: it has ended


@dataclass
class _Outbox:
    open: int = 0  # requests
    parts: asyncio.Queue[tuple[int, Any]] = field(default_factory=asyncio.Queue)


class Outboxes:
    """Of a replica, one for each front."""

    def __init__(self) -> None:
        self._boxes: defaultdict[str, _Outbox] = defaultdict(_Outbox)

    async def fill(self, front: str, number: int, parts: AsyncIterator[tuple[str, Any]]) -> None:
        """Send all parts of a request, which come with a name that all have."""
        box = self._boxes[front]
        box.open += 1
        try:
            async for _, part in parts:
                box.parts.put_nowait((number, part))
        finally:
            box.open -= 1
            box.parts.put_nowait((number, None))

    async def batches(self, front: str) -> AsyncIterator[Batch]:
        """Until no request has been open for a while."""
        box, idle_since = self._boxes[front], time.monotonic()
        while True:
            try:
                found = [await asyncio.wait_for(box.parts.get(), LINGER_S / 4)]
            except TimeoutError:
                if box.open:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > LINGER_S and box.parts.empty():
                    break
                continue
            idle_since = time.monotonic()
            await asyncio.sleep(GATHER_S)
            while not box.parts.empty():
                found.append(box.parts.get_nowait())
            yield found
        del self._boxes[front]  # a request that arrives now makes another
