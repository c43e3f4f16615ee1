"""What tensors a configuration implies: every canonical name with its shape, to check files against when opened."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.errors import CorruptModel
from forerun.models.config import ModelConfig


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
            raise CorruptModel(
                f"{source}: tensor {names[name]!r} has shape {list(have)}, expected {list(want)}",
                "configuration and weights disagree: fetch or convert the model again",
            )
