"""The contract between files and the decoder: canonical names and their shapes, lazily read tensors, and opening a
model by what its path is. Knows no format.

Canonical names: `embed`, `final_norm`, `head` (absent when tied), and per layer `layers.{i}.` + `attn_norm`, `q`, `k`,
`v`, `o`, `q_bias`, `k_bias`, `v_bias`, `q_norm`, `k_norm`, `post_attn_norm`, `mlp_norm`, `gate`, `up`, `down`,
`post_mlp_norm`. Matrices are [out, in]. Norm weights are final multipliers (a loader adds Gemma's 1), and q/k rows are
in the half-split rotary order (a loader undoes GGUF's interleaving), so the decoder has one rule for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from forerun.errors import CorruptModel, ForerunError, ModelNotFound, UnsupportedModel
from forerun.models.config import MAX_SIZE, ModelConfig
from forerun.text.tokenizer import Tokenizer

_PATH_HINT = "give a .gguf file, or a folder with config.json, tokenizer.json and .safetensors files"


class Checkpoint(Protocol):
    """An opened model: its configuration and its tensors by canonical name."""

    config: ModelConfig
    quantised: bool  # the file's own matrices are quantised (GGUF Qx), so int8 loses little beside it
    source: str  # what to call it in messages
    files: tuple[Path, ...]  # that hold the weights

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """The whole tensor, dequantised to float32, or in its own float dtype. `device`: where that is done; a GPU
        dequantises in a second what takes a host most of a minute."""

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` of a matrix as float32 [len(ids), in], without dequantising the rest."""

    def stored(self, name: str) -> tuple[str, torch.Tensor]:
        """A matrix as the file has it, rows in canonical order: its type (`dequantise`) and bytes [out, row_bytes]."""

    def tokenizer(self) -> Tokenizer: ...

    def release(self) -> None:
        """Let the operating system drop pages read so far (they stay mapped and can be read again)."""


class ConfigKeys:
    """What a file says about its model, by `prefix` and key; `source` names the model in messages."""

    def __init__(self, values: Mapping[str, Any], source: str, where: str, prefix: str = "") -> None:
        self._values, self.source, self._where, self._prefix = values, source, where, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(self._prefix + key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # some GGUF converters write one entry per layer
        if not isinstance(value, int) or not 1 <= value <= most:
            problem = "is missing" if value is None else f"is {value!r:.80}, expected a whole number from 1 to {most}"
            what = f"{self.source}: {self._prefix}{key} {problem} in {self._where}"
            raise CorruptModel(what, "fetch or convert the model again")
        return value

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.source}: {what} is not supported", "choose another model of the same family")


def unsupported_architecture(source: str, found: Any, supported: Iterable[str]) -> UnsupportedModel:
    problem = f"{source}: architecture {found!r} is not supported; supported are {', '.join(supported)}"
    return UnsupportedModel(problem, "choose a model of a supported architecture")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Files come from anywhere: whatever Python makes of a value of the wrong kind in them, the file is damaged."""
    try:
        yield
    except ForerunError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise CorruptModel(f"{what} is inconsistent ({detail:.200})", "fetch or convert the model again") from error


def checked(tensor: torch.Tensor, name: str, source: str) -> torch.Tensor:
    """The tensor, if all of it are numbers; one infinity or NaN (a damaged scale) would spoil every answer."""
    low, high = map(float, tensor.aminmax())  # one pass at the speed of memory; a NaN comes through
    if not (math.isfinite(low) and math.isfinite(high)):
        hint = "fetch or copy the model again; it is damaged"
        raise CorruptModel(f"{source}: tensor {name!r} holds infinities or NaN", hint)
    return tensor


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder will ask for, by canonical name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden), "final_norm": (hidden,)}
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (config.q_size, hidden),
        "k": (config.kv_size, hidden),
        "v": (config.kv_size, hidden),
        "o": (hidden, config.q_size),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {"q_bias": (config.q_size,), "k_bias": (config.kv_size,), "v_bias": (config.kv_size,)}
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.post_norms:
        layer |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{part}": shape for part, shape in layer.items()}
    return shapes


def check_shapes(
    stored: Mapping[str, tuple[int, ...]], names: Mapping[str, str], config: ModelConfig, source: str
) -> None:
    """Every expected tensor is stored under its name in the file (`names`: canonical to stored) with its shape."""
    for name, want in expected_shapes(config).items():
        have = stored.get(names[name])
        if have is None:
            raise CorruptModel(f"{source}: tensor {names[name]!r} is missing", "fetch or convert the model again")
        if have != want:
            hint = "configuration and weights disagree: fetch or convert the model again"
            raise CorruptModel(f"{source}: tensor {names[name]!r} has shape {list(have)}, expected {list(want)}", hint)


def open_checkpoint(path: Path) -> Checkpoint:
    """The model at `path`, opened but not read: tensors are read when asked for."""
    if path.is_dir():
        from forerun.models.formats.hf import FolderCheckpoint

        ggufs = sorted(path.glob("*.gguf"))
        if not (path / "config.json").exists() and len(ggufs) == 1:
            return open_checkpoint(ggufs[0])
        with reading(f"{path.resolve().name}: its configuration"):
            return FolderCheckpoint(path)
    if not path.exists():
        raise ModelNotFound(f"no model at {path}", _PATH_HINT)
    if path.suffix != ".gguf":
        raise ModelNotFound(f"{path.name} is neither a folder nor a .gguf file", _PATH_HINT)
    from forerun.models.formats.gguf_checkpoint import GGUFCheckpoint

    with reading(f"{path.name}: its metadata"):
        return GGUFCheckpoint(path)
