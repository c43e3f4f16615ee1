"""Log-probabilities of a prompt's own tokens, for `echo` with `logprobs`.

Runs between the engine's steps, under a lease: in small pieces, with steps of requests between them. Leaves nothing in
the cache. Knows no HTTP.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from forerun.core import SamplingParams, TokenLogprob
from forerun.decode.sampling import logprob
from forerun.errors import OutOfPages
from forerun.llm import LLM
from forerun.models.execution.runner import Span

PIECE_TOKENS = 64  # in one forward: the logits of each are needed, [64, V]


def prompt_logprobs(
    llm: LLM, ids: list[int], params: SamplingParams, check_cancelled: Callable[[], None] = lambda: None
) -> list[TokenLogprob]:
    """One for each token but the first, which follows nothing."""
    found: list[TokenLogprob] = []
    pages = array("i")
    with llm.driver.lease() as lease:
        try:
            with lease.exclusive():
                if not lease.pages.extend(pages, len(ids)):
                    hint = "ask again when fewer requests run"
                    raise OutOfPages(f"there is no room for the log-probabilities of {len(ids)} tokens", hint)
            for start in range(0, len(ids) - 1, PIECE_TOKENS):
                check_cancelled()
                piece = ids[start : start + PIECE_TOKENS]
                span = Span(piece, start, pages, range(len(piece)), prompt=True)
                with lease.exclusive() as engine:
                    logits = engine.runner.forward([span]).logits.float()
                following = ids[start + 1 : start + 1 + len(piece)]
                entries = [logprob(row, token, params) for row, token in zip(logits, following, strict=False)]
                found += [entry for entry in entries if entry is not None]
        finally:
            with lease.exclusive():
                lease.pages.drop(pages)
    return found
