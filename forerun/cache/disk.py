"""The disk tier: exact pages in segment files in one folder, bounded in bytes, the least recently used file goes first.

What cannot be read, or is not what was written, is deleted and forgotten: the request computes it. When writing fails
(full, read only), that is logged once and writing ends; reading goes on. Several processes may share a folder, on
several machines too: each writes segments of its own and finds those of the others. Knows no tokens and no pool.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import uuid
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from torch import Tensor

from forerun.cache.file_lock import FileLock
from forerun.cache.queued import QueuedTier
from forerun.cache.segments import Damaged, Segment, read_header, read_pages, write_segment
from forerun.errors import BadRequest

LIST_INTERVAL_S = 0.05  # at least, between two looks for segments of other processes
STAMP_TICK_S = 2.0  # a folder's time of change may be as coarse: within it, a change may leave the time as it was
WRITE_LOCK_S = 5.0  # for the lock; a process that is stopped while it holds it stops no other for longer
SUFFIX = ".safetensors"

log = logging.getLogger("forerun")


def make_folder(folder: Path) -> None:
    """Where it is not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if not folder.is_dir():
            raise BadRequest(f"the disk tier cannot use {folder}: {error}", "give another folder") from error


class DiskTier(QueuedTier):
    name = "disk"

    def __init__(self, folder: Path, nbytes: int, identity: str) -> None:
        super().__init__(nbytes)
        self.folder, self.identity = folder, identity
        self._segments: dict[Path, Segment] = {}  # other models' too
        self._where: dict[bytes, tuple[Segment, int]] = {}
        self._folder_time, self._changed_at, self._listed_at = -1, 0.0, 0.0  # nanoseconds; seconds of our own clock
        self._newest_ns = 0  # the latest time of use of any file
        self._lock = FileLock(folder / "lock")  # of whichever process writes a segment
        self._alive = FileLock(folder / f"{uuid.uuid4().hex[:12]}.writer")  # held until this one is closed or killed
        self._take_folder()
        self._remove_unfinished()
        self._find_segments()
        self._shrink(0)

    def _take_folder(self) -> None:
        """Where nothing can be written there, it is read."""
        make_folder(self.folder)
        try:
            self._alive.acquire(WRITE_LOCK_S)
        except OSError as error:
            self._switch_off(error)

    def _remove_unfinished(self) -> None:
        """Files that processes began which have ended: the lock of such a process is free."""
        if self.off:
            return
        for path in self.folder.glob("*.writer"):
            lock = FileLock(path)
            if path != self._alive.path and lock.acquire():
                lock.remove()
        alive = {path.stem for path in self.folder.glob("*.writer")}
        for path in self.folder.glob("*.tmp"):
            if path.stem.split(".")[-1] not in alive:
                path.unlink(missing_ok=True)

    def _find_segments(self) -> None:
        """Segments that other processes have written or removed since the last time, where the folder has changed."""
        now = time.monotonic()
        with self._changed:
            if now - self._listed_at < LIST_INTERVAL_S:
                return
            self._listed_at, known = now, set(self._segments)
        try:
            found = self._changed_paths(now)
        except OSError:  # a shared folder that does not answer: what is known stays known, and reading it fails alone
            return
        if found is None:
            return
        for path in known - found:
            self._forget(path)
        for path in found - known:
            try:
                self._know(read_header(path))
            except (Damaged, OSError) as error:
                self._discard(path, error)

    def _changed_paths(self, now: float) -> set[Path] | None:
        """Segments in the folder; None where it is as it was."""
        changed_ns = self.folder.stat().st_mtime_ns
        if changed_ns != self._folder_time:
            self._folder_time, self._changed_at = changed_ns, now
        elif now - self._changed_at > STAMP_TICK_S:
            return None
        return {path for path in self.folder.iterdir() if path.suffix == SUFFIX}

    # -- reading -------------------------------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        with self._changed:
            if key in self._pending or key in self._where:
                return True
        self._find_segments()
        with self._changed:
            return key in self._where

    def __len__(self) -> int:
        with self._changed:
            return len(self._where) + sum(key not in self._where for key in self._pending)

    @property
    def nbytes(self) -> int:
        with self._changed:
            return sum(segment.nbytes for segment in self._segments.values())

    def get(self, keys: Sequence[bytes], out: Tensor) -> int:
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
        if not self.off:
            try:
                self._stamp(segment.path)
            except FileNotFoundError:
                self._forget(segment.path)
            except OSError as error:
                self._switch_off(error)

    def _discard(self, path: Path, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ESTALE):  # another process evicted it
            self._forget(path)
            return
        log.warning("%s is not used: %s", path, error)
        self.damaged += 1
        self._remove(path)

    # -- writing -------------------------------------------------------------------------------------------------------

    def _known(self, key: bytes) -> bool:
        return key in self._where

    def _where_it_is(self) -> str:
        return str(self.folder)

    def close(self) -> None:
        """Write what waits and release the folder."""
        if not self._closed:
            super().close()
            self._alive.remove()

    def _write(self, keys: list[bytes], data: Tensor) -> None:
        """One process at a time: none writes what another has just written, and all together stay within the limit."""
        held = self._lock.acquire(WRITE_LOCK_S)
        try:
            self._listed_at = 0.0
            self._find_segments()
            new = [i for i, key in enumerate(keys) if key not in self._where]
            if data[0].nbytes * len(new) > self.limit:  # a tier of less than one segment keeps what fits
                new = new[len(new) - int(self.limit * 0.9) // data[0].nbytes :]
            if not new:
                return
            self._shrink(data[0].nbytes * len(new) + (1 << 16))  # and its header
            path = self.folder / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}{SUFFIX}"
            segment = write_segment(path, self.identity, [keys[i] for i in new], data[new], self._alive.path.stem)
            self._stamp(segment.path)
            self._know(segment)
        finally:
            if held:
                self._lock.release()

    # -- files ---------------------------------------------------------------------------------------------------------

    def _know(self, segment: Segment) -> None:
        with self._changed:
            self._segments[segment.path] = segment
            if segment.identity == self.identity:
                self._where |= {key: (segment, i) for i, key in enumerate(segment.keys)}

    def _shrink(self, coming: int) -> None:
        """Make room for so many bytes within the limit: the files go first that no process has used for longest."""
        with self._changed:
            sizes = {path: segment.nbytes for path, segment in self._segments.items()}
        used: dict[Path, int] = {}
        for path in sizes:
            try:
                used[path] = path.stat().st_mtime_ns
            except OSError:
                self._forget(path)
        self._newest_ns = max(self._newest_ns, *used.values(), 0)
        total = sum(sizes[path] for path in used)
        for path in sorted(used, key=lambda path: used[path]):
            if total + coming <= self.limit or self.off:
                return
            self._remove(path)
            total -= sizes[path]

    def _forget(self, path: Path) -> None:
        with self._changed:
            segment = self._segments.pop(path, None)
            for key in segment.keys if segment is not None else []:
                if key in self._where and self._where[key][0] is segment:
                    del self._where[key]

    def _remove(self, path: Path) -> None:
        self._forget(path)
        if not self.off:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._switch_off(error)

    def _stamp(self, path: Path) -> None:
        """Used now, so that the order survives a restart; the system's own stamps are too coarse to tell files apart.
        Later than all others, whatever the clock: those of several machines may differ."""
        self._newest_ns = now = max(time.time_ns(), self._newest_ns + 1)
        os.utime(path, ns=(now, now))
