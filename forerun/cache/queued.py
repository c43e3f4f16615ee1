"""A tier that a thread of its own writes, so that no step waits; pages not yet written are read from memory.

What is common to the disk tier and the shared store: the queue, its bound in bytes, and that writing ends, logged once,
when it fails. How a page is written and found again is the subclass's. Knows no tokens and no pool.
"""

from __future__ import annotations

import atexit
import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

WRITE_BYTES = 32 << 20  # handed over at once: at least one page, and not much more than this
PENDING_BYTES = 256 << 20  # pages that wait to be written; beyond it pages that are merely evicted are dropped

log = logging.getLogger("forerun")


class QueuedTier(ABC):
    name: str  # in messages

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes
        self.off = ""  # why nothing is written any more
        self.damaged = self.dropped = 0
        self._pending: OrderedDict[bytes, Tensor] = OrderedDict()
        self._pending_bytes = 0
        self._queue: deque[bytes] = deque()
        self._changed = threading.Condition()  # guards all of the above
        self._thread: threading.Thread | None = None
        self._closed = False

    @abstractmethod
    def __contains__(self, key: bytes) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these pages are there."""
        return [key in self for key in keys]

    @abstractmethod
    def get(self, keys: Sequence[bytes], out: Tensor) -> int:
        """Read pages into `out` [n, ...]; how many, from the first, are there and sound."""

    @abstractmethod
    def _known(self, key: bytes) -> bool:
        """Whether it is written, as far as this process knows without asking others."""

    @abstractmethod
    def _write(self, keys: list[bytes], data: Tensor) -> None:
        """Called by the thread alone; what it raises ends all writing."""

    def put(self, keys: Sequence[bytes], data: Tensor, wait: bool = False) -> None:
        """Have pages written, data [n, ...] in memory that is not changed. `wait`: for room in the queue; else pages
        that find none are dropped."""
        page_bytes = data[0].nbytes
        with self._changed:
            for key, page in zip(keys, data, strict=True):
                if self.off or self._closed:
                    return
                if key in self._pending or self._known(key):
                    continue
                while wait and self._pending and self._pending_bytes + page_bytes > PENDING_BYTES and not self.off:
                    self._start()
                    self._changed.wait()
                if self._pending and self._pending_bytes + page_bytes > PENDING_BYTES:
                    self.dropped += 1
                    continue
                self._pending[key] = page
                self._pending_bytes += page_bytes
                self._queue.append(key)
            self._start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written, or writing has ended."""
        with self._changed:
            while self._pending and not self.off and not self._closed:
                self._start()
                self._changed.wait()

    def close(self) -> None:
        """Write what waits; nothing more is written after."""
        if self._closed:
            return
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.flush)

    def _start(self) -> None:
        if self._thread is None and self._queue and not self.off:
            self._thread = threading.Thread(target=self._write_loop, name=f"forerun-{self.name}", daemon=True)
            self._thread.start()
            atexit.register(self.flush)  # without close() nothing is lost that was handed over

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                count = max(1, WRITE_BYTES // next(iter(self._pending.values())).nbytes)
                keys = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
                pages = [self._pending[key] for key in keys]
            try:
                self._write(keys, torch.stack(pages))
            except Exception as error:  # no caller sees this thread's errors: requests go on without it
                self._switch_off(error)
                return
            with self._changed:
                self._remove_pending(keys)

    def _remove_pending(self, keys: list[bytes]) -> None:
        for key in keys:
            page = self._pending.pop(key, None)  # gone already where writing was switched off meanwhile
            self._pending_bytes -= 0 if page is None else page.nbytes
        self._changed.notify_all()

    def _switch_off(self, error: Exception) -> None:
        """Nothing more is written; logged once."""
        with self._changed:
            if self.off:
                return
            self.off = str(error) or type(error).__name__
            self._queue.clear()
            self._pending.clear()
            self._pending_bytes = 0
            log.warning("the %s tier in %s is read only from now on: %s", self.name, self._where_it_is(), self.off)
            self._changed.notify_all()

    @abstractmethod
    def _where_it_is(self) -> str:
        """A folder or address, for messages."""
