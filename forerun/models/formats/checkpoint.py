"""The contract between files and the decoder: canonical names, lazily read tensors, nothing about formats.

Canonical names: `embed`, `final_norm`, `head` (absent when tied), and per layer `layers.{i}.` + `attn_norm`, `q`, `k`,
`v`, `o`, `q_bias`, `k_bias`, `v_bias`, `q_norm`, `k_norm`, `post_attn_norm`, `mlp_norm`, `gate`, `up`, `down`,
`post_mlp_norm`. Matrices are [out, in]. Norm weights are final multipliers (a loader adds Gemma's 1), and q/k rows are
in the half-split rotary order (a loader undoes GGUF's interleaving), so the decoder has one rule for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from forerun.errors import CorruptModel, ForerunError
from forerun.models.config import ModelConfig

if TYPE_CHECKING:
    from forerun.text.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """An opened model: its configuration and its tensors by canonical name."""

    config: ModelConfig
    quantised: bool  # the file's own matrices are quantised (GGUF Qx), so int8 loses little beside it
    source: str  # what to call it in messages
    files: tuple[Path, ...]  # that hold the weights

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, dequantised to float32, or in its own float dtype."""
        ...

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` of a matrix as float32 [len(ids), in], without dequantising the rest."""
        ...

    def stored(self, name: str) -> tuple[str, torch.Tensor]:
        """A matrix as the file has it, rows in canonical order: its type (`dequantise`) and bytes [out, row_bytes]."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def release(self) -> None:
        """Let the operating system drop pages read so far (they stay mapped and can be read again)."""
        ...


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
        raise CorruptModel(
            f"{source}: tensor {name!r} holds infinities or NaN", "fetch or copy the model again; it is damaged"
        )
    return tensor
