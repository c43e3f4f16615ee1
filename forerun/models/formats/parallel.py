"""How a draft model drafts several tokens in one forward (PARD): which token is the mask, how many it was trained for.

A folder in PARD's format is an ordinary model folder whose config.json names the mask as `pard_token`; how many tokens
it drafts is not part of that format, and `num_speculative_tokens` is what this package adds. Knows no drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.errors import CorruptModel

DEFAULT_PARALLEL_TOKENS = 8  # of a PARD folder that does not name a number: what its authors train and recommend
MAX_PARALLEL_TOKENS = 32


@dataclass(frozen=True)
class ParallelDrafting:
    mask_token: int
    tokens: int = DEFAULT_PARALLEL_TOKENS  # drafted in one forward: one by the last token, the others by masks


def read_parallel(root: dict[str, Any], vocab: int, source: str) -> ParallelDrafting | None:
    """What a config.json says; None where the model was not trained for it."""
    mask, tokens = root.get("pard_token"), root.get("num_speculative_tokens", DEFAULT_PARALLEL_TOKENS)
    if mask is None:
        return None
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocab:
        raise CorruptModel(
            f"{source}: pard_token is {mask!r}, the vocabulary has {vocab} tokens", "fetch or train the drafter again"
        )
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_PARALLEL_TOKENS:
        raise CorruptModel(
            f"{source}: num_speculative_tokens is {tokens!r}, between 1 and {MAX_PARALLEL_TOKENS} are possible",
            "fetch or train the drafter again",
        )
    return ParallelDrafting(mask, tokens)
