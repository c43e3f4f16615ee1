"""Stored responses on disk: a file for each, in a folder for each API key, so that they outlive the process.

Written whole or not at all, for the owner of the process only; the oldest of a key are removed first. What cannot be
written is logged once and lives as long as the process. Knows no HTTP and no threads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.cache.segments import json_digest

log = logging.getLogger("forerun.serve")


class ResponseFiles:
    """`max_files`, `max_bytes`: of one key. Only files that were there before this object are read: later ones are in
    the memory of the process that wrote them, which answers for them."""

    def __init__(self, folder: Path, max_files: int, max_bytes: int) -> None:
        self._folder, self._max_files, self._max_bytes = folder, max_files, max_bytes
        self._there, self._failed = set(folder.glob("*/*.json")), False

    def read(self, owner: str, response_id: str) -> dict[str, Any] | None:
        path = self._path(owner, response_id)
        if path not in self._there:
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["digest"] != json_digest(found["body"]):
                raise ValueError("its digest does not agree")
            return dict(found["body"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the file of response %s cannot be read: %s", response_id, error)
            return None

    def write(self, owner: str, response_id: str, body: dict[str, Any]) -> None:
        path = self._path(owner, response_id)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(temporary, "w", encoding="utf-8", opener=_private) as file:
                json.dump({"body": body, "digest": json_digest(body)}, file)
            os.replace(temporary, path)
            self._shrink(path.parent)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._failed:
                self._failed = True
                log.warning("responses will not survive this process: %s", error)

    def remove(self, owner: str, response_id: str) -> None:
        with suppress(OSError):
            self._path(owner, response_id).unlink(missing_ok=True)

    def _shrink(self, folder: Path) -> None:
        files = []
        for path in folder.glob("*.json"):
            with suppress(OSError):  # another process has removed it
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        count, total = len(files), sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:  # the latest stays, whatever its size
            if count <= self._max_files and total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            count, total = count - 1, total - size

    def _path(self, owner: str, response_id: str) -> Path:
        return self._folder / hashlib.sha256(owner.encode()).hexdigest()[:24] / f"{response_id}.json"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
