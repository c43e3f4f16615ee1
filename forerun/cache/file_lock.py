"""A lock between processes: a file that one of them holds, until it releases it or ends, however it ends.

Works on one machine and on shared folders whose file system has locks (NFS has). Knows nothing of what it guards.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

POLL_S = 0.005


class FileLock:
    """Not for threads: each holder has an object of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def acquire(self, seconds: float = 0.0) -> bool:
        """Whether it is held now; raises `OSError` where the file cannot be made or the file system has no locks."""
        end = time.monotonic() + seconds
        while True:
            file = self.path.open("a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current(file):
                    self._file = file
                    return True
            except BlockingIOError:
                pass
            except OSError:
                file.close()
                raise
            file.close()
            if time.monotonic() >= end:
                return False
            time.sleep(POLL_S)

    def _is_current(self, file: TextIO) -> bool:
        """Whether the file is still the one of that name: its last holder may have removed it."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Release it, and remove the file where it is held."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
        self.release()
