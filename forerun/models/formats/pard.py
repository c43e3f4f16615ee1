"""Draft models that draft several tokens in one forward, as PARD folders: ordinary model folders whose config.json
names the mask as `pard_token`.

How many tokens one drafts is not part of that format: `num_speculative_tokens` is what this package adds, and under
`forerun` the fingerprint of the target that a model was trained for, acceptance by depth and how it was made. vLLM
reads such a folder as `{"method": "draft_model", "parallel_drafting": true}`, this package as `draft_model=FOLDER`.
Knows no drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forerun.errors import CorruptModel
from forerun.models.formats.checkpoint import Checkpoint
from forerun.models.formats.hf_writer import write_hf_folder

DEFAULT_PARALLEL_TOKENS = 8  # of a PARD folder that does not name a number: what its authors train and recommend
MAX_PARALLEL_TOKENS = 32


@dataclass(frozen=True)
class ParallelDrafting:
    mask_token: int
    tokens: int = DEFAULT_PARALLEL_TOKENS  # drafted in one forward: one by the last token, the others by masks
    outcomes: dict[str, list[list[float]]] = field(default_factory=dict)  # kind of text -> accepted and tried by depth
    target: str = ""  # fingerprint of the model it was trained for, where a folder has it


def read_parallel(root: dict[str, Any], vocab: int, source: str) -> ParallelDrafting | None:
    """What a config.json says; None where the model was not trained for it."""
    mask, tokens = root.get("pard_token"), root.get("num_speculative_tokens", DEFAULT_PARALLEL_TOKENS)
    if mask is None:
        return None
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocab:
        hint = "fetch or train the drafter again"
        raise CorruptModel(f"{source}: pard_token is {mask!r}, the vocabulary has {vocab} tokens", hint)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_PARALLEL_TOKENS:
        problem = f"{source}: num_speculative_tokens is {tokens!r}, between 1 and {MAX_PARALLEL_TOKENS} are possible"
        raise CorruptModel(problem, "fetch or train the drafter again")
    found = root.get("forerun")
    about = found if isinstance(found, dict) else {}
    return ParallelDrafting(mask, tokens, about.get("outcomes", {}), str(about.get("target", "")))


def write_pard(
    checkpoint: Checkpoint,
    parallel: ParallelDrafting,
    folder: Path,
    quiet: bool = False,
    facts: dict[str, Any] | None = None,
) -> None:
    """The checkpoint's weights in bfloat16, its tokenizer, and a configuration with the mask; `facts`: how it was
    made."""
    about = {
        "pard_token": parallel.mask_token,
        "spd_type": "pard",
        "num_speculative_tokens": parallel.tokens,
        "forerun": {"target": parallel.target, "outcomes": parallel.outcomes, "facts": facts or {}},
    }
    write_hf_folder(checkpoint, folder, torch.bfloat16, about, quiet)
