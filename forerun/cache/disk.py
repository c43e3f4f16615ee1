"""The disk tier: exact pages in segment files in one folder, bounded in bytes, the least recently used file goes first.

A thread of its own writes, so that no step waits for a disk; pages not yet written are read from memory. What cannot be
read, or is not what was written, is deleted and forgotten: the request computes it. When writing fails (full, read
only), that is logged once and writing ends; reading goes on. One process at a time owns a folder. Knows no tokens and
no pool.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from forerun.cache.segments import Damaged, Segment, read_header, read_pages, write_segment
from forerun.errors import BadRequest

SEGMENT_BYTES = 32 << 20  # a file has at least one page, and not much more than this
PENDING_BYTES = 256 << 20  # pages that wait to be written; beyond it pages that are merely evicted are dropped
SUFFIX = ".safetensors"

log = logging.getLogger("forerun")


class DiskTier:
    def __init__(self, folder: Path, nbytes: int, identity: str) -> None:
        self.folder, self.limit, self.identity = folder, nbytes, identity
        self.off = ""  # why nothing is written any more
        self.damaged = self.dropped = 0
        self._segments: OrderedDict[Path, Segment] = OrderedDict()  # least recently used first; other models' too
        self._where: dict[bytes, tuple[Segment, int]] = {}
        self._pending: OrderedDict[bytes, Tensor] = OrderedDict()
        self._pending_bytes = 0
        self._queue: deque[bytes] = deque()
        self._changed = threading.Condition()  # guards all of the above
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock_file = self._take_folder()
        self._scan()

    def _take_folder(self) -> TextIO | None:
        """The folder's lock; None where nothing can be written there, but read."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / "lock").open("a")
        except OSError as error:
            if not self.folder.is_dir():
                raise BadRequest(f"the disk tier cannot use {self.folder}: {error}", "give another folder") from error
            self._switch_off(error)
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise BadRequest(
                f"the disk tier in {self.folder} is in use by another LLM", "close that one, or give another folder"
            ) from error
        return file

    def _scan(self) -> None:
        """Find what earlier processes left; what was never finished is removed."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix == ".tmp" and not self.off:
                path.unlink(missing_ok=True)
            if path.suffix != SUFFIX:
                continue
            try:
                found.append((path.stat().st_mtime_ns, read_header(path)))
            except (Damaged, OSError) as error:
                self._discard(path, error)
        for _, segment in sorted(found, key=lambda pair: pair[0]):
            self._know(segment)
        self._shrink(0)

    # -- reading -------------------------------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        with self._changed:
            return key in self._pending or key in self._where

    def __len__(self) -> int:
        with self._changed:
            return len(self._where) + sum(key not in self._where for key in self._pending)

    @property
    def nbytes(self) -> int:
        with self._changed:
            return sum(segment.nbytes for segment in self._segments.values())

    def get(self, keys: Sequence[bytes], out: Tensor) -> int:
        """Read pages into `out` [n, ...]; how many, from the first, are there and sound."""
        done = 0
        while done < len(keys):
            with self._changed:
                waiting = self._pending.get(keys[done])
                place = self._where.get(keys[done])
            if waiting is not None:
                out[done] = waiting
                done += 1
            elif place is None:
                break
            else:
                run = self._run(place[0], keys[done:])
                try:
                    read_pages(place[0], run, out[done : done + len(run)])
                except (Damaged, OSError) as error:
                    self._discard(place[0].path, error)
                    continue  # pages of another segment may have the same key
                self._touch(place[0])
                done += len(run)
        return done

    def _run(self, segment: Segment, keys: Sequence[bytes]) -> list[int]:
        """Where the first keys lie in one segment, as far as they do."""
        with self._changed:
            places = [self._where.get(key, (None, 0)) for key in keys]
        return [index for _, index in takewhile(lambda place: place[0] is segment, places)]

    def _touch(self, segment: Segment) -> None:
        with self._changed:
            if segment.path in self._segments:
                self._segments.move_to_end(segment.path)
        if not self.off:
            try:
                _stamp(segment.path)
            except OSError as error:
                self._switch_off(error)

    def _discard(self, path: Path, error: Exception) -> None:
        log.warning("%s is not used: %s", path, error)
        self.damaged += 1
        self._remove(path)

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], data: Tensor, wait: bool = False) -> None:
        """Have pages written, data [n, ...] in memory that is not changed. `wait`: for room in the queue; else pages
        that find none are dropped."""
        page_bytes = data[0].nbytes
        with self._changed:
            for key, page in zip(keys, data, strict=True):
                if self.off or self._closed:
                    return
                if key in self._where or key in self._pending:
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
        """Write what waits and let go of the folder."""
        if self._closed:
            return
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.flush)
        if self._lock_file is not None:
            self._lock_file.close()

    def _start(self) -> None:
        if self._thread is None and self._queue and not self.off:
            self._thread = threading.Thread(target=self._write_loop, name="forerun-disk", daemon=True)
            self._thread.start()
            atexit.register(self.flush)  # without close() nothing is lost that was handed over

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                count = max(1, SEGMENT_BYTES // next(iter(self._pending.values())).nbytes)
                keys = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
                pages = [self._pending[key] for key in keys]
            try:
                self._write(keys, torch.stack(pages))
            except Exception as error:  # no caller sees this thread's errors: requests go on without it
                self._switch_off(error)
                return
            with self._changed:
                self._settle(keys)

    def _write(self, keys: list[bytes], data: Tensor) -> None:
        if data.nbytes > self.limit:  # a tier of less than one segment keeps what fits
            keep = int(self.limit * 0.9) // data[0].nbytes
            keys, data = keys[len(keys) - keep :], data[len(keys) - keep :]
            if not keep:
                return
        self._shrink(data.nbytes + (1 << 16))  # and its header
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        segment = write_segment(self.folder / name, self.identity, keys, data)
        _stamp(segment.path)
        self._know(segment)

    def _settle(self, keys: list[bytes]) -> None:
        for key in keys:
            page = self._pending.pop(key, None)  # gone already where writing was switched off meanwhile
            self._pending_bytes -= 0 if page is None else page.nbytes
        self._changed.notify_all()

    def _switch_off(self, error: Exception) -> None:
        """Nothing more is written; said once."""
        with self._changed:
            if self.off:
                return
            self.off = str(error) or type(error).__name__
            self._queue.clear()
            self._pending.clear()
            self._pending_bytes = 0
            log.warning("the disk tier in %s is read only from now on: %s", self.folder, self.off)
            self._changed.notify_all()

    # -- files ---------------------------------------------------------------------------------------------------------

    def _know(self, segment: Segment) -> None:
        with self._changed:
            self._segments[segment.path] = segment
            if segment.identity == self.identity:
                self._where |= {key: (segment, i) for i, key in enumerate(segment.keys)}

    def _shrink(self, coming: int) -> None:
        """Make room for so many bytes within the limit."""
        while True:
            with self._changed:
                total = sum(segment.nbytes for segment in self._segments.values())
                if total + coming <= self.limit or not self._segments or self.off:
                    return
                oldest = next(iter(self._segments))
            self._remove(oldest)

    def _remove(self, path: Path) -> None:
        with self._changed:
            segment = self._segments.pop(path, None)
            for key in segment.keys if segment is not None else []:
                if key in self._where and self._where[key][0] is segment:
                    del self._where[key]
        if not self.off:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._switch_off(error)


def _stamp(path: Path) -> None:
    """Used now, so that the order survives a restart; the system's own stamps are too coarse to tell files apart."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
