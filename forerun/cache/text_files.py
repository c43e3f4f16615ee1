"""Texts whose pages the disk tier holds: packed tokens, a file each, so that parts of them are found after a restart.

A page's key names all tokens up to its end and tells none of them; the search for a part of a text needs the tokens.
A file is named by a digest of its text and never changes, so that several processes may write into one folder; a file
that does not agree with its name is not used. Bounded, the oldest goes first. Knows no pages and no model.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path

MAX_TEXTS = 256
MAX_TEXT_BYTES = 16 << 20  # of all of them; a token has four
SUFFIX = ".tokens"

log = logging.getLogger("forerun")


class TextFiles:
    def __init__(self, folder: Path) -> None:
        self.folder, self.off = folder, False
        self._written: list[bytes] = []  # by this process, the oldest first

    def add(self, data: bytes) -> None:
        """Have a text written, unless it is the beginning of one that was; what it continues is removed."""
        if self.off or any(text.startswith(data) for text in self._written):
            return
        shorter = [text for text in self._written if data.startswith(text)]
        self._written = [text for text in self._written if text not in shorter][1 - MAX_TEXTS :] + [data]
        path = self._path(data)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
            for text in shorter:
                self._path(text).unlink(missing_ok=True)
            self._shrink()
        except OSError as error:
            self.off = True
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            log.warning("texts of the disk tier in %s are not kept from now on: %s", self.folder, error)

    def read(self) -> list[bytes]:
        """All of them, the oldest first; damaged files are left out."""
        found = []
        for _, _, path in self._files():
            try:
                data = path.read_bytes()
            except OSError:
                continue
            if self._path(data) == path:
                found.append(data)
        return found

    def _path(self, data: bytes) -> Path:
        return self.folder / f"{hashlib.blake2b(data, digest_size=16).hexdigest()}{SUFFIX}"

    def _files(self) -> list[tuple[int, int, Path]]:
        """When each was written, its bytes and path, the oldest first."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            try:
                about = path.stat()
            except OSError:  # another process has removed it
                continue
            found.append((about.st_mtime_ns, about.st_size, path))
        return sorted(found)

    def _shrink(self) -> None:
        files = self._files()
        count, total = len(files), sum(size for _, size, _ in files)
        for _, size, path in files:
            if count <= MAX_TEXTS and total <= MAX_TEXT_BYTES:
                return
            path.unlink(missing_ok=True)
            count, total = count - 1, total - size
