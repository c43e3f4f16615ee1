"""Reads the GGUF container: header, metadata and tensor table, with the tensor data memory-mapped.

Knows bytes and block sizes; does not know architectures, tensor meanings or how a block becomes numbers. Every length
in the file is checked against the file's end before it is used, so a truncated file is an error here and not later.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.errors import CorruptModel, UnsupportedModel
from forerun.models.formats.dequant import block_size

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Types that dequant.py turns into numbers
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 30: "BF16",
}  # fmt: skip
# Types that exist in other people's files: an error can name them
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and how its rows are laid out; `shape` is in torch's order (rows first)."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int  # from the start of the file
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


def _damaged(path: Path, problem: str) -> CorruptModel:
    return CorruptModel(f"{path.name}: {problem}", "fetch or copy the file again; it is damaged or incomplete")


class _Reader:
    """A cursor over the mapped file that refuses to run past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.size = data, path, 0, len(data)

    def take(self, count: int, what: str) -> int:
        """Advance over `count` bytes and return where they start."""
        start = self.at
        if count > self.size - start:
            raise _damaged(self.path, f"{what} needs {count} bytes at offset {start}, the file ends at {self.size}")
        self.at = start + count
        return start

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        start = self.take(length, what)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def strings(self, count: int, what: str) -> list[str]:
        """An array of strings: the hot loop of opening a file, so bounds are checked by what unpack_from raises."""
        self.take(8 * count, what)  # each string has at least its length: rejects absurd counts before the loop
        at, data, unpack, found = self.at - 8 * count, self.data, struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                end = at + 8 + unpack(data, at)[0]
                found.append(data[at + 8 : end].decode("utf-8", errors="replace"))
                at = end
        except (struct.error, OverflowError, IndexError):
            at = self.size + 1
        self.at = min(at, self.size)
        if at > self.size:
            self.take(1 + self.size, what)
        return found

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        raise _damaged(self.path, f"{what} has value type {kind}, known are 0 to 12")

    def array(self, what: str) -> list[Any]:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind == _STRING:
            return self.strings(count, what)
        if kind in _SCALARS:
            code = _SCALARS[kind]
            start = self.take(struct.calcsize("<" + code) * count, what)
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        raise _damaged(self.path, f"{what} is an array of value type {kind}")


class GGUFFile:
    """An opened GGUF file: `metadata`, `tensors`, and each tensor's bytes as a view of the mapping."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                # A private writable map: torch views it without copying, nothing can reach the file
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:  # mmap of an empty file
            raise _damaged(path, "it is empty") from error
        reader = _Reader(self._map, path)
        tensor_count, pair_count = self._header(reader)
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = reader.string("a metadata key")
            self.metadata[key] = reader.value(reader.number("I", key), f"metadata {key!r}")
        self.tensors = self._tensor_table(reader, tensor_count)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def _header(self, reader: _Reader) -> tuple[int, int]:
        magic = self._map[:4]
        if magic != MAGIC:
            hint = "give a GGUF file"
            raise CorruptModel(f"{self.path.name} starts with {magic!r}, a GGUF file with {MAGIC!r}", hint)
        reader.take(4, "the magic")
        version = reader.number("I", "the version")
        if version not in VERSIONS:
            swapped = version >> 24 in VERSIONS and version & 0xFFFFFF == 0
            what = "is big-endian" if swapped else f"has GGUF version {version}"
            hint = "convert it again"
            raise UnsupportedModel(f"{self.path.name} {what}, readable are little-endian versions 2 and 3", hint)
        return reader.number("Q", "the tensor count"), reader.number("Q", "the metadata count")

    def _tensor_table(self, reader: _Reader, count: int) -> dict[str, TensorInfo]:
        entries = []
        for _ in range(count):
            name = reader.string("a tensor name")
            rank = reader.number("I", name)
            if not 1 <= rank <= 4:
                raise _damaged(self.path, f"tensor {name!r} has {rank} dimensions, the limit is 4")
            dims = [reader.number("Q", name) for _ in range(rank)]
            entries.append((name, dims, reader.number("I", name), reader.number("Q", name)))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise _damaged(self.path, f"general.alignment is {alignment!r:.80}, it must be a multiple of 8")
        for name, _, _, at in entries:
            if at % alignment:  # numbers could not be read in place
                raise _damaged(self.path, f"tensor {name!r} lies at {at}, not a multiple of the alignment {alignment}")
        base = -(-reader.at // alignment) * alignment
        return {name: self._tensor_info(name, dims, kind, base + at, reader.size) for name, dims, kind, at in entries}

    def _tensor_info(self, name: str, dims: list[int], kind: int, offset: int, size: int) -> TensorInfo:
        if kind not in TYPES:
            known = ", ".join(TYPES.values())
            raise UnsupportedModel(
                f"{self.path.name}: tensor {name!r} has type {OTHER_TYPES.get(kind, kind)}, supported are {known}",
                "use another quantisation of the model, for example Q4_K_M or Q8_0",
            )
        type_name, (block, block_bytes) = TYPES[kind], block_size(TYPES[kind])
        cols, rows = dims[0], math.prod(dims[1:])
        if cols % block:
            problem = f"rows of {name!r} have {cols} weights, {type_name} needs a multiple of {block}"
            raise _damaged(self.path, problem)
        info = TensorInfo(name, tuple(reversed(dims)), type_name, offset, rows, cols // block * block_bytes)
        if offset + info.nbytes > size:
            raise _damaged(self.path, f"tensor {name!r} ends at byte {offset + info.nbytes}, the file at {size}")
        return info

    def raw(self, name: str) -> torch.Tensor:
        """The tensor's bytes as stored, a view of the mapping."""
        info = self.tensors[name]
        return self._bytes[info.offset : info.offset + info.nbytes].view(info.rows, info.row_bytes)  # [rows, row_bytes]

    def release(self) -> None:
        """Drop the resident pages of the mapping; they are read from the file again when touched."""
        self._map.madvise(mmap.MADV_DONTNEED)
