"""Which weights a checkpoint holds: what was computed with one model must not be read by another.

`fingerprint` hashes every stored tensor and the configuration, as far as they decide a model's numbers; names, the
order of a file and its container do not count. Two files are the same model when their matrices are stored alike.
Reading gigabytes takes seconds, so hashes of tensors are cached by the files' paths, sizes and times of change.
`sampled_fingerprint` reads some rows of each matrix only: good for a file's name, not for trusting what lies under it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from forerun.core.progress import track
from forerun.models.config import ModelConfig
from forerun.models.fetch.store import home, write_whole
from forerun.models.formats.checkpoint import Checkpoint, expected_shapes

SAMPLED_DIGITS = 32  # hex digits of a sampled fingerprint; a full one has 64
SAMPLED_ROWS, SAMPLED_EMBED_ROWS = 2, 16  # of every matrix of a layer; of the embedding and the head
HASH_BYTES = 1 << 26  # hashed at a time
# Names, where texts end and what becomes of them: they change no number
_IGNORED = ("family", "max_context", "eos_ids", "bos_id", "pooling")


def fingerprint(checkpoint: Checkpoint, quiet: bool = False) -> str:
    """64 hex digits that depend on every weight."""
    # Changed matrices are sums of floats, whose last bits differ between machines: what they are made of does not
    made_of = getattr(checkpoint, "hash_parts", None) or (lambda: _hash_tensors(checkpoint, quiet))
    weights = _cached(checkpoint, "weights", made_of)
    return hashlib.sha256(f"{_canonical(checkpoint.config)} {weights}".encode()).hexdigest()


def sampled_fingerprint(checkpoint: Checkpoint) -> str:
    """32 hex digits that depend on all norms and biases and on some rows of every matrix."""
    digest = hashlib.sha256(_canonical(checkpoint.config).encode())
    whole = _cached(checkpoint, f"samples {digest.hexdigest()}", lambda: _hash_samples(checkpoint, digest))
    return whole[:SAMPLED_DIGITS]


def _hash_samples(checkpoint: Checkpoint, digest: hashlib._Hash) -> str:
    for name, shape in sorted(expected_shapes(checkpoint.config).items()):
        if len(shape) == 1:
            values = checkpoint.tensor(name)
        else:
            count = SAMPLED_ROWS if name.startswith("layers.") else SAMPLED_EMBED_ROWS
            values = checkpoint.rows(name, _sample(shape[0], count))
        digest.update(f"{name} {shape}".encode() + _float_bytes(values))
    return digest.hexdigest()


def _hash_tensors(checkpoint: Checkpoint, quiet: bool) -> str:
    """Vectors as float32, which formats store differently; matrices as they are stored, block by block."""
    digest = hashlib.sha256()
    for name, shape in track(sorted(expected_shapes(checkpoint.config).items()), "checking weights", quiet):
        if len(shape) == 1:
            digest.update(f"{name} {shape} ".encode() + _float_bytes(checkpoint.tensor(name)))
            continue
        kind, raw = checkpoint.stored(name)
        digest.update(f"{name} {shape} {kind} ".encode())
        data = raw.contiguous().view(-1).numpy()  # bytes
        for start in range(0, len(data), HASH_BYTES):
            digest.update(data[start : start + HASH_BYTES].data)
    checkpoint.release()
    return digest.hexdigest()


def _float_bytes(values: torch.Tensor) -> bytes:
    return values.detach().float().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes()


def _sample(rows: int, count: int) -> torch.Tensor:
    """Rows spread over a matrix, its first and last among them."""
    return torch.linspace(0, rows - 1, min(rows, count), dtype=torch.float64).round().long()


def _canonical(config: ModelConfig) -> str:
    """The configuration as text, the same whatever file it was read from."""
    values = {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name not in _IGNORED}
    values |= {name: asdict(values[name]) for name in ("rope", "local_rope") if values[name] is not None}
    return json.dumps(_rounded(values), sort_keys=True)


def _rounded(value: Any) -> Any:
    """Numbers to six digits: some files keep them as float32, others in decimals."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return f"{value:.6g}" if isinstance(value, float) else value


# -- the cache: one small file for each set of weight files, named by their paths --------------------------------------


def _cached(checkpoint: Checkpoint, name: str, compute: Callable[[], str]) -> str:
    """A hash of the files as they are now: from the cache, or computed and kept there."""
    state = _file_state(checkpoint.files)
    known = _read_cached(state)
    if name not in known:
        known[name] = compute()
        if state and _file_state(checkpoint.files) == state:  # not rewritten meanwhile
            write_whole(_cache_file(state), json.dumps({"files": state, **known}))
    return known[name]


def _file_state(files: Sequence[Path]) -> list[list[Any]]:
    """Path, size and times of change of each file; the inode's time also moves where the other is set back."""
    try:
        found = [(str(file.resolve()), file.stat()) for file in files]
    except OSError:
        return []
    return [[path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in found]


def _cache_file(state: list[list[Any]]) -> Path:
    paths = "\n".join(entry[0] for entry in state)
    return home() / "fingerprints" / f"{hashlib.sha256(paths.encode()).hexdigest()[:32]}.json"


def _read_cached(state: list[list[Any]]) -> dict[str, str]:
    """By name; none where nothing is cached for these files as they are now, or what is cached cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        found = json.loads(_cache_file(state).read_text(encoding="utf-8"))
        if state and found["files"] == state:
            return {name: value for name, value in found.items() if isinstance(value, str) and len(value) == 64}
    return {}
