"""Events from the thread that steps the engine to an event loop: one wake-up for all events of a step.

Waking a loop costs a system call, and the stepping thread would pay it for every stream of its batch. Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Undelivered items for the readers of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[asyncio.Queue[T], T]] = deque()
        self._announced = False

    def put(self, inbox: asyncio.Queue[T], item: T) -> None:
        """From any thread; raises where the loop is closed."""
        self._waiting.append((inbox, item))
        if self._announced:  # the loop has not started to deliver: it will find this item, too
            return
        self._announced = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            self._announced = False
            raise

    def _deliver(self) -> None:
        self._announced = False  # before the queue is read: later items announce themselves again
        while self._waiting:
            inbox, item = self._waiting.popleft()
            inbox.put_nowait(item)
