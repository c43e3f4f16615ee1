"""What a weights mode loses against float32: KL divergence, top-1 agreement and perplexity on a text.

Teacher-forced: both runs read the same text, and the distributions for every next token are compared. Knows nothing
of how a precision works; it asks the engine for logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun import data
from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.models.build import block_problem_of, choose_device
from forerun.models.fetch.store import resolve
from forerun.models.formats.checkpoint import open_checkpoint

REFERENCE = "float32"
COMPARED_ROWS = 128  # distributions compared at once: bounds the temporaries to this many times the vocabulary


@dataclass(frozen=True)
class Quality:
    """One weights mode on one text, measured against float32."""

    weights: str
    text: str  # what the text is called
    tokens: int
    kl: float  # mean over positions of KL(float32 || this), in nats
    top1: float  # share of positions where both would choose the same token
    perplexity: float
    reference_perplexity: float


def measure_modes(
    model: str,
    modes: Sequence[str] = (),
    texts: Mapping[str, str] | None = None,
    *,
    tokens: int = 512,
    device: str = "auto",
    threads: int | None = None,
) -> list[Quality]:
    """Every mode on every text; float32 runs once. Default: what this machine offers, on the shipped prose and code."""
    texts = texts or {"prose": data.text("quality_prose.txt"), "code": data.text("quality_code.txt")}
    options = {"device": device, "threads": threads}
    reference = _score(model, REFERENCE, texts, tokens, options)
    results = []
    for weights in modes or default_modes(model, device):
        scored = _score(model, weights, texts, tokens, options)
        results += [compare(weights, name, ids, reference[name][1], logits) for name, (ids, logits) in scored.items()]
    return results


def default_modes(model: str, device: str) -> tuple[str, ...]:
    """The modes worth asking about: those that are not float32, and a file's own blocks where it has some."""
    if choose_device(device).type == "cuda":
        return ("bf16",)
    return ("fp16", "int8") if block_problem_of(open_checkpoint(resolve(model))) else ("fp16", "int8", "file")


def _score(
    model: str, weights: str, texts: Mapping[str, str], tokens: int, options: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Token ids and logits of each text; the model is closed again before the next one is opened."""
    dtype, quantization = ("auto", weights) if weights == "file" else (weights, None)
    with LLM(
        model, dtype=dtype, quantization=quantization, max_model_len=max(tokens + 1, 2), quiet=True, **options
    ) as llm:
        scored = {}
        for name, text in texts.items():
            ids = llm.tokenizer.encode(text, add_special=True)[:tokens]
            if len(ids) < 2:
                raise BadRequest(f"the text {name!r} has {len(ids)} tokens, at least 2 are needed", "use a longer text")
            scored[name] = torch.tensor(ids), llm.engine.score(ids).float().cpu()  # [T], [T, V]
    return scored


def compare(weights: str, name: str, ids: Tensor, reference: Tensor, logits: Tensor) -> Quality:
    """Both sets of logits [T, V] are for the same ids [T]; row t is for what comes after token t."""
    count = len(ids)
    kl, agree, nll, reference_nll = 0.0, 0, 0.0, 0.0
    for lo in range(0, count - 1, COMPARED_ROWS):
        hi = min(lo + COMPARED_ROWS, count - 1)
        p = F.log_softmax(reference[lo:hi].float(), dim=-1)  # [R, V]
        q = F.log_softmax(logits[lo:hi].float(), dim=-1)  # [R, V]
        following = ids[lo + 1 : hi + 1, None]  # [R, 1]
        kl += float(F.kl_div(q, p, log_target=True, reduction="sum"))
        agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        reference_nll -= float(p.gather(1, following).sum())
        nll -= float(q.gather(1, following).sum())
    positions = count - 1
    perplexity, reference_perplexity = math.exp(nll / positions), math.exp(reference_nll / positions)
    return Quality(weights, name, count, kl / positions, agree / positions, perplexity, reference_perplexity)
