"""Segment files: some pages of K/V in one safetensors file, each page with its key and checksum.

Written to a temporary name and renamed, so that a file is whole or not there. The header carries whose K/V it is (the
identity: weights, precision, page size), the pages' keys and checksums, and a digest of all that; what does not agree
with it is never handed out. Knows no tokens, no pool, and not which files there are.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "forerun-kv-1"
MAX_HEADER_BYTES = 1 << 24  # bytes; more is no header of ours


class Damaged(Exception):
    """A file, or a page of it, is not what was written."""


@dataclass
class Segment:
    """What a file's header says."""

    path: Path
    identity: str
    keys: list[bytes]
    checksums: list[int]
    start: int  # where the first page's bytes begin
    page_bytes: int
    nbytes: int  # of the file


def write_segment(path: Path, identity: str, keys: Sequence[bytes], data: Tensor, writer: str = "") -> Segment:
    """Write pages, data [n, ...]; raises `OSError`, and then leaves nothing behind. `writer`: in the temporary name."""
    checksums = [zlib.crc32(_bytes(page)) for page in data]
    about = {
        "format": FORMAT,
        "identity": identity,
        "keys": json.dumps([key.hex() for key in keys]),
        "checksums": json.dumps(checksums),
        "page_bytes": str(data[0].nbytes),
    }
    temporary = path.with_suffix(f".{writer}.tmp")
    try:
        save_file({"kv": data.contiguous()}, temporary, metadata=about | {"digest": json_digest(about)})
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, (OSError, KeyboardInterrupt, SystemExit)):
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error  # safetensors has an error of its own for all
    return read_header(path)


def read_header(path: Path) -> Segment:
    """Raises `Damaged` where the file is no segment, or not a whole one; `OSError` where it cannot be read."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise Damaged(f"{path.name} has no header")
        raw = file.read(length)
    try:
        about = json.loads(raw)["__metadata__"]
        said = about.pop("digest")
        if said != json_digest(about) or about["format"] != FORMAT:
            raise Damaged(f"the header of {path.name} does not agree with its digest")
        keys = [bytes.fromhex(key) for key in json.loads(about["keys"])]
        checksums, page_bytes = json.loads(about["checksums"]), int(about["page_bytes"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"the header of {path.name} is damaged: {error}") from error
    if size != 8 + length + len(keys) * page_bytes:
        raise Damaged(f"{path.name} has {size} bytes, its header says {8 + length + len(keys) * page_bytes}")
    return Segment(path, about["identity"], keys, checksums, 8 + length, page_bytes, size)


def read_pages(segment: Segment, indices: Sequence[int], out: Tensor) -> None:
    """Read pages into `out`, contiguous [n, ...]; raises `Damaged` where a page is not what was written."""
    if out[0].nbytes != segment.page_bytes:
        raise Damaged(f"{segment.path.name} has pages of {segment.page_bytes} bytes, not {out[0].nbytes}")
    with segment.path.open("rb", buffering=0) as file:
        for index, page in zip(indices, out, strict=True):
            room = _bytes(page)
            file.seek(segment.start + index * segment.page_bytes)
            if file.readinto(room) != segment.page_bytes or zlib.crc32(room) != segment.checksums[index]:  # type: ignore[attr-defined]
                raise Damaged(f"page {index} of {segment.path.name} does not agree with its checksum")


def _bytes(page: Tensor) -> memoryview:
    return page.contiguous().view(-1).view(torch.uint8).numpy().data


def json_digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
