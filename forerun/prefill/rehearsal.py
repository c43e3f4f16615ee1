"""What a device that compiles does before the first request: it drafts a prompt and times an exact one.

Kernels are compiled or loaded at their first use, libraries prepare products and attention for every number of rows,
memory is asked for: the first drafted prompt of a process took three times as long as the next ones. Knows no request;
nothing is learnt from the drafted prompt.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from forerun.decode.draft_context import DraftContext
from forerun.models.execution.runner import Runner, Span
from forerun.models.execution.timing import median_seconds
from forerun.params import Prefill
from forerun.prefill.forecast import PrefillForecast
from forerun.prefill.state import PrefillState

if TYPE_CHECKING:
    from forerun.prefill.prefiller import Prefiller

TIMED_TOKENS = (2048, 8192)  # of exact prefill, for the forecast, which compares lengths an octave apart
# of the drafted prompt: it runs every kernel that longer ones run, in some 20 ms once all are compiled
REHEARSED_TOKENS = 4096
REHEARSED = -2  # its number, which no sequence has
PREPARED_TOKENS = 16384  # of the longest prompts that are prepared for, two seconds for a pair: a step has no more


def rehearse(prefiller: Prefiller, ctx: DraftContext) -> None:
    """Make the profile's source, draft a prompt of equal tokens, and let the forecast know what exact prefill takes.
    Where the pool is too small for it, requests wait."""
    most = min(PREPARED_TOKENS, ctx.max_context)
    ctx.runner.decoder.attention.prepare_prompts(ctx.runner.kv[0], most)
    with suppress(torch.OutOfMemoryError):  # requests that long will say so, if there are any
        if (state := draft(prefiller, ctx, min(REHEARSED_TOKENS, ctx.max_context - 1))) is not None:
            state.source.prepare(prefiller.policy.shortest, most)
    prefiller.forecast = PrefillForecast(ctx.runner.decoder.device.type)
    for tokens in sorted({min(tokens, ctx.max_context - 1) for tokens in TIMED_TOKENS}):
        with suppress(torch.OutOfMemoryError):
            if (seconds := exact_seconds(ctx.runner, tokens)) is not None:
                prefiller.forecast.observe_exact(tokens, seconds)


def draft(prefiller: Prefiller, ctx: DraftContext, tokens: int) -> PrefillState | None:
    """What became of it; None where it cannot be drafted."""
    settings, pool, runner = Prefill("speculative"), ctx.pool, ctx.runner
    if prefiller.profile.kind == "chunk" or pool.pages_for(tokens) > pool.free:
        return None
    if prefiller.problem(settings, tokens) is not None:
        return None
    with pool.borrow(tokens) as pages:
        prompt = array("i", bytes(4 * tokens))
        state = PrefillState(REHEARSED, prompt, pages, 0, tokens, settings, len(runner.kv))
        state.keep_tail(prefiller.policy.tail)
        prefiller.begin(state, prefiller.source(settings))
        while not state.finished:
            prefiller.advance(state, tokens)
        prefiller.close(state)
    if ctx.draft_kv is not None:
        ctx.draft_kv.drop_partial(REHEARSED)
    return state


def exact_seconds(runner: Runner, tokens: int) -> float | None:
    """Of a prompt from nothing; a few milliseconds on a GPU."""
    pool = runner.pool
    if pool.pages_for(tokens) > pool.free:
        return None
    with pool.borrow(tokens) as pages:
        span = Span([0] * tokens, 0, pages, (tokens - 1,), prompt=True)
        return median_seconds(lambda: runner.forward([span]).logits[-1, 0].item(), 2)
