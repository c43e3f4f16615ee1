"""What drafted prefill costs, in multiply-adds of matrices, as a share of exact prefill. Knows only shapes."""

from __future__ import annotations

from forerun.models.config import ModelConfig
from forerun.prefill.calibration.model_pair import FIRST, TAIL
from forerun.prefill.maps import Maps


def layer_macs(config: ModelConfig) -> int:
    """One token through the matrices of one layer."""
    return config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)


def model_macs(config: ModelConfig) -> int:
    return config.num_layers * layer_macs(config)


def reading_cost(target: ModelConfig, draft: ModelConfig | None, base: int, top: int) -> float:
    """A token read by the source, in tokens of the target's prefill, without the maps; a draft runs `top` layers."""
    return base / target.num_layers if draft is None else top * layer_macs(draft) / model_macs(target)


def whole_cost(target: ModelConfig, maps: Maps, reading: float, alone: bool, share: float, prompt: int) -> float:
    """Reading, maps and recomputing, the first tokens and the tail among it, as a share of exact prefill.

    `alone`: recomputed tokens of a source that is the target start where its reading ended.
    """
    recomputed = min(1.0, share + (FIRST + TAIL) / prompt)
    left = 1.0 - maps.base / target.num_layers if alone else 1.0
    return reading + maps.macs / model_macs(target) + recomputed * left
