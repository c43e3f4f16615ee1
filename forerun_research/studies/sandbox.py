"""Runs a program that a model wrote: in another process, in an empty folder, with limits on time, memory and files.

A fence against accidents, not against malice: the program runs as the same user and could reach the network.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MAX_MEMORY_BYTES = 2 << 30  # bytes of address space
MAX_FILE_BYTES = 1 << 20  # bytes of any file it writes

# Limits are set by the child itself before it reads the program: a hook between fork and exec is unsafe with threads.
_START = """
import resource, sys
seconds, memory, file = (int(value) for value in sys.argv[1:4])
for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, file)):
    resource.setrlimit(kind, (limit, limit))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with open(sys.argv[4], encoding="utf-8") as source:
    code = compile(source.read(), "program.py", "exec")
exec(code, {"__name__": "__main__"})
"""


@dataclass(frozen=True)
class ProgramResult:
    passed: bool  # it ended by itself with status 0
    timed_out: bool = False
    error: str = ""  # the last line it wrote to stderr


def run_program(program: str, seconds: float = 10.0) -> ProgramResult:
    """Whether a Python program ends well within so many seconds."""
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        path = Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8", errors="replace")
        limits = [str(int(seconds) + 1), str(MAX_MEMORY_BYTES), str(MAX_FILE_BYTES), str(path)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, *limits],
            cwd=folder,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return ProgramResult(False, timed_out=True, error=f"still running after {seconds:g} s")
        finally:
            _end(process)
    lines = stderr.decode("utf-8", errors="replace").strip().splitlines()
    return ProgramResult(process.returncode == 0, error=lines[-1][:200] if lines and process.returncode else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The program and whatever it started: they share a session of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()
