"""The C library of CPU kernels: compiled at first use, cached with a checksum, loaded.

The cache is keyed by sources, compiler and CPU; a file whose checksum is wrong is compiled anew. Any failure (no
compiler, one that fails or hangs, a folder that cannot be written) leaves the caller without a library and one warning
in the log; nothing half-written is ever loaded. Knows no model.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.models.fetch.store import home

log = logging.getLogger("forerun")

SOURCES = ("blocks.c", "attention.c", "draft_attention.c", "layers.c", "pool.c", "block.c", "ranking.c", "draw.c")
HEADERS = (
    "vec.h",
    "blocks.h",
    "tiles16.h",
    "amx.h",
    "amx16.h",
    "amx_attention.h",
    "tiles8.h",
    "attention.h",
    "layers.h",
    "pool.h",
)
ABI = 8  # of the functions below
COMPILE_S = 120.0  # a compiler that takes longer is given up
STALE_S = 3600.0  # a scratch folder this old was left by a process that was killed
CHECKSUM_BYTES = 32  # behind the library, which the loader does not read
THIS_CPU = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"  # which clang does not know there
FLAGS = ("-O3", THIS_CPU, "-shared", "-fPIC", "-std=gnu11")


class Unavailable(Exception):
    """Why there is no library."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it cannot be had; the reason is logged once."""
    try:
        return _load(_built())
    except Unavailable as problem:
        log.warning("no C kernels: %s; int8 products are used instead", problem)
        return None


def _built() -> Path:
    """The compiled library for these sources on this CPU, from the cache or made now."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64", "aarch64") or sys.platform != "linux":
        raise Unavailable(f"they are written for Linux on x86-64 and 64-bit ARM, this is {sys.platform} on {machine}")
    if machine != "aarch64" and "avx2" not in _cpu():
        raise Unavailable("this CPU has no AVX2")
    folder = home() / "kernels"
    path = folder / f"{build_key()}.so"
    if _whole(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = _compile(Path(scratch))
            made.write_bytes(made.read_bytes() + _checksum(made.read_bytes()))
            os.replace(made, path)  # atomic: two processes that compile at once both leave a whole file
    except OSError as error:
        raise Unavailable(f"cannot write to {folder}: {error.strerror or error}") from None
    return path


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).digest()


def _whole(path: Path) -> bool:
    """Whether the file is there as it was written: loading a truncated one would end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-CHECKSUM_BYTES:] == _checksum(content[:-CHECKSUM_BYTES])


def _sweep(folder: Path) -> None:
    for left in folder.glob("tmp*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left)


def _compile(folder: Path) -> Path:
    here = Path(__file__).parent / "csrc"
    out, problems = folder / "kernels.so", []
    for compiler in _compilers():
        command = [*compiler, *FLAGS, "-o", str(out), *(str(here / name) for name in SOURCES), "-lm", "-lpthread"]
        try:
            failed, output = _run(command)
        except OSError as error:
            failed, output = 1, str(error)
        except subprocess.TimeoutExpired:
            failed, output = 1, f"it takes longer than {COMPILE_S:g} s"
        if not failed and out.is_file() and out.stat().st_size:
            return out
        problems.append(f"{compiler[0]}: {' '.join(output.split())[-200:] or 'it made no library'}")
    raise Unavailable("; ".join(problems) or "there is no C compiler (install gcc or clang, or pip install ziglang)")


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code and error output of a compiler; ended with its own children where it takes too long or Ctrl-C comes."""
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, errors="replace", start_new_session=True, **options) as process:
        try:
            _, output = process.communicate(timeout=COMPILE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def _compilers() -> list[list[str]]:
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise Unavailable(f"CC is {os.environ['CC']!r}: {error}") from None
    found = [named] if named else [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if importlib.util.find_spec("ziglang") is not None:
        found.append([sys.executable, "-m", "ziglang", "cc"])
    return found


@functools.cache
def _cpu(field: str | tuple[str, ...] = ("flags", "Features")) -> str:
    """What this CPU can do, as the kernel lists it (Features: on ARM), or another field, the first of these."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = next((line.partition(":")[2] for line in lines if line.startswith(field)), "")
    return " ".join(sorted(found.split()))


def cpu_kind() -> str:
    """What tells this CPU from those that need other code or another layout of weights."""
    about = f"{platform.machine()} {_cpu(('model name', 'CPU part'))} {_cpu()}"
    return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


def build_key() -> str:
    """What a compiled library depends on, the layout of packed blocks with it."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (*HEADERS, *SOURCES):
        digest.update((Path(__file__).parent / "csrc" / name).read_bytes())
    digest.update(f"{ABI} {FLAGS} {_cpu()} {platform.libc_ver()} {os.environ.get('CC', '')}".encode())
    return digest.hexdigest()


pointer, number, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Part(ctypes.Structure):
    """The structures of layers.c and attention.h, field by field."""

    _fields_ = [
        *(("type", whole), ("per", whole), ("rows", number), ("cols", number), ("packed", pointer), ("bytes", number)),
    ]


class Matrix(ctypes.Structure):
    _fields_ = [("parts", pointer), ("num_parts", number), ("rows", number), ("bias", pointer)]


class Cache(ctypes.Structure):
    _fields_ = [("k", pointer), ("v", pointer), ("slot_stride", number), ("head_stride", number)]


class Batch(ctypes.Structure):
    _fields_ = [
        *((name, number) for name in ("tokens", "heads", "kv_heads", "dim", "page_size", "table_stride", "share")),
        *((name, pointer) for name in ("positions", "slots", "kv_lens", "rows", "tables", "path_starts", "paths")),
    ]


class LayerWeights(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, pointer) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm", "rope")),
        *(("kv", Cache), ("window", number)),
    ]


class LayerShape(ctypes.Structure):
    _fields_ = [("hidden", number), ("eps", real), ("scale", real), ("gate", whole), ("rough", whole)]


class BlockWeights(ctypes.Structure):
    """Of block.c."""

    _fields_ = [
        *(("shape", pointer), ("layers", pointer), ("num_layers", number), ("taps", number)),
        *((name, Matrix) for name in ("fc", "state_in", "head")),
        *((name, pointer) for name in ("context", "hidden_norm", "final_norm", "depths")),
    ]


class RankCall(ctypes.Structure):
    """Of ranking.c."""

    _fields_ = [
        *((name, number) for name in ("depths", "vocab", "candidates", "children", "rank", "width")),
        *((name, real) for name in ("heat", "bias", "odds")),
        ("last", number),
        *((name, pointer) for name in ("logits", "ids", "previous", "next", "rows", "sure", "sure_previous")),
        *((name, pointer) for name in ("tokens", "found", "probs")),
    ]


# Arguments of each function, and what it returns
FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "fr_packed_bytes": ([whole, number, number], number),
    "fr_pack": ([whole, pointer, number, number, pointer, number, number, pointer], None),
    "fr_rows": ([whole, pointer, number, pointer, number, pointer], None),
    "fr_linear": ([pointer, pointer, pointer, real, number, pointer, pointer], None),
    "fr_linear_joined": ([pointer, pointer, pointer, number, real, number, pointer], None),
    "fr_gate": ([pointer, number, number, whole, pointer], None),
    "fr_store": ([pointer, pointer, pointer, Cache, pointer, pointer, pointer, real], None),
    "fr_store_made": ([pointer, pointer, number, pointer, pointer], None),
    "fr_attend_scratch": ([pointer], number),
    "fr_attend": ([pointer, pointer, Cache, number, real, pointer, pointer], None),
    "fr_attend_draft_scratch": ([pointer], number),
    "fr_attend_draft": ([pointer, pointer, Cache, number, real, pointer, pointer], None),
    "fr_tail_weights_scratch": ([pointer], number),
    "fr_tail_weights": ([pointer, pointer, Cache, number, real, pointer, pointer], None),
    "fr_layers_scratch": ([pointer, pointer, pointer], number),
    "fr_layers": ([pointer, pointer, number, number, pointer, pointer, pointer], None),
    "fr_vectors": ([pointer, number, pointer, pointer, pointer], None),
    "fr_context": ([pointer, pointer, pointer, pointer], None),
    "fr_block": ([pointer, pointer, pointer, pointer, pointer, pointer, pointer, pointer], None),
    "fr_rank": ([pointer], None),
    "fr_likeliest": ([pointer, number, number, number, number, pointer, pointer], None),
    "fr_draw": ([pointer, number, real, ctypes.c_double], number),
    "fr_quiesce": ([], None),
    "fr_set_threads": ([whole], None),
    "fr_pool_stats": ([pointer], None),
    "fr_isa": ([], ctypes.c_char_p),
}


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (arguments, result) in FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{path.name} cannot be loaded: {error}") from None
    return loaded
