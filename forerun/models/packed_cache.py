"""Packed weights on disk: what a start computes from a model's file is written once and memory-mapped afterwards.

One file for each set of weights, precision, CPU and version of the packing code: the tensors, a table of them, a
trailer. A file appears under its name whole or not at all. Opening one checks its size, its table and some blocks,
others at every start; `verify` checks all of them. The files together are bounded in bytes, the least recently used
goes first. A folder that is full or cannot be written costs one line in the log. Knows tensors by name, no model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import random
import shutil
import struct
import tempfile
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from forerun.models.fetch.store import home, sweep

log = logging.getLogger("forerun")

LIMIT_VARIABLE = "FORERUN_CACHE_GB"  # of all packed weights together; 0: none are kept
DEFAULT_LIMIT_GB = 8.0  # the largest known model in three precisions
MIN_FREE_BYTES = 1 << 30  # left on the disk for others
BLOCK_BYTES = 1 << 20  # of one checksum
CHECKED_BLOCKS = 24  # at every start: 25 ms, where all of a gigabyte would be a second
ALIGNMENT = 4096  # of a tensor, so that its pages hold no other
SUFFIX = ".packed"
_MAGIC = b"FRPACK1\n"
_TRAILER = struct.Struct("<8sQI")  # magic, bytes of the table, its checksum
_TYPES = {str(t).removeprefix("torch."): t for t in (torch.uint8, torch.int8, torch.float32)}


class DamagedPacking(Exception):
    """What is wrong with a file of packed weights."""


@dataclass(frozen=True)
class PackedKey:
    """What packed weights depend on; other values are other files."""

    model: str  # fingerprint of all weights
    weights: str  # precision, and for which use
    cpu: str
    code: str  # hash of the code that packs

    @property
    def path(self) -> Path:
        name = hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()
        return folder() / f"{name}{SUFFIX}"


@dataclass(frozen=True)
class PackedEntry:
    """One file, as `forerun models cache` lists it."""

    path: Path
    model: str  # what its file is called
    weights: str
    bytes: int
    used: float  # when it was last opened, seconds since 1970
    files: tuple[str, ...]  # that the weights came from


def folder() -> Path:
    return home() / "packed"


def limit_bytes() -> int:
    given = os.environ.get(LIMIT_VARIABLE, "")
    try:
        return int(float(given or DEFAULT_LIMIT_GB) * 1e9)
    except (ValueError, OverflowError):
        log.warning("%s is %r, no number of gigabytes; %g is taken", LIMIT_VARIABLE, given, DEFAULT_LIMIT_GB)
        return int(DEFAULT_LIMIT_GB * 1e9)


class PackedFile:
    """An opened file: its tensors are views of the mapping, shared with other processes that map it."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _TRAILER.size:
                raise DamagedPacking(f"it has {size} bytes")
            # A private writable map: torch views it without copying, nothing can reach the file
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        magic, length, checksum = _TRAILER.unpack_from(self._map, size - _TRAILER.size)
        self._end = size - _TRAILER.size - length  # of the tensors
        if magic != _MAGIC or self._end < 0:
            raise DamagedPacking("it has no trailer")
        text = self._map[self._end : size - _TRAILER.size]
        if zlib.crc32(text) != checksum:
            raise DamagedPacking("its table has another checksum")
        self.table: dict[str, Any] = json.loads(text)
        self.bytes = size
        self._view = memoryview(self._map)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def check(self, blocks: int | None = None) -> None:
        """Compare the checksums of all blocks, or of so many: the first, the last and random ones between."""
        checksums = self.table["blocks"]
        if len(checksums) != -(-self._end // BLOCK_BYTES):
            raise DamagedPacking(f"it has {self._end} bytes of tensors and {len(checksums)} checksums")
        chosen: Sequence[int] = range(len(checksums))
        if blocks is not None and len(checksums) > blocks:
            chosen = [0, len(checksums) - 1, *random.sample(chosen[1:-1], blocks - 2)]
        for i in chosen:
            if zlib.crc32(self._view[i * BLOCK_BYTES : min((i + 1) * BLOCK_BYTES, self._end)]) != checksums[i]:
                raise DamagedPacking(f"block {i} of {len(checksums)} has another checksum")

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape, start, length = self.table["tensors"][name]
        return self._bytes[start : start + length].view(_TYPES[dtype]).view(shape)

    @property
    def all_tensors(self) -> Tensor:
        """The bytes of all tensors, one after the other, with the gaps that align them."""
        return self._bytes[: self._end]

    def about(self, name: str) -> Any:
        """What was said about a tensor when it was added."""
        return self.table["about"].get(name)

    def release(self, *names: str) -> None:
        """Drop the resident pages of these tensors, or of all; they are read from the file again when touched."""
        if not names:
            self._map.madvise(mmap.MADV_DONTNEED)
        self._advise(mmap.MADV_DONTNEED, names)

    def prefetch(self, *names: str) -> None:
        """Let the system read these tensors ahead."""
        self._advise(mmap.MADV_WILLNEED, names)

    def _advise(self, advice: int, names: Sequence[str]) -> None:
        for name in names:
            _, _, start, length = self.table["tensors"][name]
            self._map.madvise(advice, start, length)


def load(key: PackedKey) -> PackedFile | None:
    """The packed weights of a key, if they are there and whole; a damaged file is removed."""
    path = key.path
    if limit_bytes() == 0 or not path.is_file():
        return None
    try:
        found = PackedFile(path)
        if found.table["key"] != asdict(key):
            raise DamagedPacking("it belongs to other weights")
        found.check(CHECKED_BLOCKS)
    except (DamagedPacking, OSError, ValueError, LookupError, TypeError) as problem:
        log.warning("packed weights are computed again: %s is damaged (%s)", path, problem)
        with suppress(OSError):
            path.unlink()
        return None
    with suppress(OSError):  # a read-only folder has no order of use
        os.utime(path)
    return found


class PackedWriter:
    """Writes the tensors of one key as they are made, in any thread; `commit` gives the file its name."""

    def __init__(self, key: PackedKey, model: str, files: Sequence[Path]) -> None:
        self._key, self._lock = key, threading.Lock()
        self._table: dict[str, Any] = {
            "key": asdict(key),
            "model": model,
            "files": [str(file.absolute()) for file in files],
            "tensors": {},
            "about": {},
            "blocks": [],
        }
        self._limit = limit_bytes()
        self._file: BinaryIO | None = None
        self._part = ""  # its name
        self._at, self._checksum = 0, 0
        self._failed = self._limit == 0
        self.bytes = 0  # of the file, once it has its name

    def add(self, name: str, tensor: Tensor, about: Any = None) -> None:
        """`about`: anything JSON can hold."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        with self._lock:
            if self._failed:
                return
            try:
                self._open(data.numel())
                self._write(bytes(-self._at % ALIGNMENT))
                dtype = str(tensor.dtype).removeprefix("torch.")
                self._table["tensors"][name] = [dtype, list(tensor.shape), self._at, data.numel()]
                if about is not None:
                    self._table["about"][name] = about
                self._write(data.numpy().data)
            except OSError as error:
                self._give_up(f"cannot write to {folder()}: {error.strerror or error}")

    def _open(self, more: int) -> None:
        if self._file is None:
            folder().mkdir(parents=True, exist_ok=True)
            sweep(folder(), ".part-")
            handle, self._part = tempfile.mkstemp(dir=folder(), prefix=f".part-{os.getpid()}-")
            self._file = os.fdopen(handle, "wb")
        if self._at + more > self._limit:
            self._give_up(f"they are larger than {LIMIT_VARIABLE}={self._limit / 1e9:g} allows")
        elif shutil.disk_usage(folder()).free < more + MIN_FREE_BYTES:
            self._give_up(f"less than {MIN_FREE_BYTES / 1e9:.0f} GB would be left free in {folder()}")

    def _write(self, data: bytes | memoryview) -> None:
        if self._failed:
            return
        assert self._file is not None
        self._file.write(data)
        done = 0
        while done < len(data):
            part = data[done : done + BLOCK_BYTES - self._at % BLOCK_BYTES]
            self._checksum = zlib.crc32(part, self._checksum)
            self._at, done = self._at + len(part), done + len(part)
            if self._at % BLOCK_BYTES == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._table["blocks"].append(self._checksum)
        self._checksum = 0

    def _give_up(self, why: str) -> None:
        log.warning("packed weights are not kept, the next start computes them again: %s", why)
        self._failed = True
        self._remove()

    def commit(self) -> None:
        """Whole, on the disk, and only then under its name."""
        with self._lock:
            if self._failed or self._file is None:
                return
            try:
                if self._at % BLOCK_BYTES:
                    self._end_block()
                text = json.dumps(self._table).encode()
                self._file.write(text + _TRAILER.pack(_MAGIC, len(text), zlib.crc32(text)))
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._part, self._key.path)
            except OSError as error:
                self._give_up(f"cannot write to {folder()}: {error.strerror or error}")
                return
            self._failed, self.bytes = True, self._at  # nothing more is added
        evict(self._limit, self._key.path)

    def discard(self) -> None:
        """Leave nothing behind, unless it was committed."""
        with self._lock:
            if not self._failed:
                self._failed = True
                self._remove()

    def _remove(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                os.unlink(self._part)


def entries() -> list[PackedEntry]:
    """All files, most recently used first; one that cannot be read has no model."""
    found = []
    for path in folder().glob(f"*{SUFFIX}"):
        with suppress(OSError):
            stat = path.stat()
            try:
                table = PackedFile(path).table
                model, weights, files = table["model"], table["key"]["weights"], tuple(table["files"])
            except (DamagedPacking, ValueError, LookupError, TypeError):
                model, weights, files = "", "", ()
            found.append(PackedEntry(path, model, weights, stat.st_size, stat.st_mtime, files))
    return sorted(found, key=lambda entry: -entry.used)


def verify(path: Path) -> str:
    """What is wrong with a file, all of it read; empty: nothing."""
    try:
        PackedFile(path).check()
    except (DamagedPacking, OSError, ValueError, LookupError, TypeError) as problem:
        return str(problem)
    return ""


def evict(limit: int, newest: Path | None = None) -> None:
    """Remove what was used longest ago until the rest is within the limit; `newest` stays."""
    files = []
    for path in folder().glob(f"*{SUFFIX}"):
        with suppress(OSError):  # another process may have removed it
            stat = path.stat()
            files.append((path != newest, -stat.st_mtime, stat.st_size, path))
    total = 0
    for _, _, size, path in sorted(files):
        total += size
        if total > limit:
            with suppress(OSError):
                path.unlink()


def remove(wanted: Sequence[PackedEntry]) -> int:
    """Delete these files; returns how many bytes they had. Processes that have them mapped keep them."""
    for entry in wanted:
        entry.path.unlink(missing_ok=True)
    return sum(entry.bytes for entry in wanted)


def orphans() -> list[PackedEntry]:
    """Files made from models that are no longer there."""
    return [entry for entry in entries() if not any(os.path.exists(file) for file in entry.files)]
