"""Log-probabilities of a prompt's own tokens, for `echo` with `logprobs`.

The K/V is exact, so that the request's own prefill reads it afterwards. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.core import TokenLogprob
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.llm import LLM
from forerun.models.execution.runner import Span
from forerun.serve.prompt_pieces import run_pieces


def prompt_logprobs(
    llm: LLM, request: Request, check_cancelled: Callable[[], None] = lambda: None
) -> list[TokenLogprob]:
    """One for each token but the first, which follows nothing."""
    ids, params, client = request.prompt_ids, request.params, request.client
    found: list[TokenLogprob] = []

    def score(engine: Engine, span: Span) -> None:
        stop, tree = span.entries.stop, engine.scheduler.tree
        span.logits_indices = range(len(span.ids))
        with torch.inference_mode():
            logprobs = torch.log_softmax(engine.runner.forward([span]).logits.float(), -1)
            found.extend(_entries(logprobs, ids[span.first + 1 : stop + 1], params.logprobs or 0))
        if params.cache and stop == len(ids) - 1 and tree is not None:
            tree.insert(ids[:stop], span.pages, client.name, client.weight)

    run_pieces(llm, ids, len(ids) - 1, score, check_cancelled)
    return found


def _entries(logprobs: Tensor, tokens: list[int], most: int) -> list[TokenLogprob]:
    """`logprobs`: [tokens, V]; `most`: likeliest tokens of each row."""
    own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    top = logprobs.topk(most)
    likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    pairs = [list(zip(ids, values, strict=True)) for ids, values in likeliest]
    return [TokenLogprob(token, value, each) for token, value, each in zip(tokens, own, pairs, strict=True)]
