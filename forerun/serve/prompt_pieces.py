"""Forwards over a prompt beside the engine's own: log-probabilities and embeddings are made of what they leave.

Runs between the engine's steps, under a lease: in small pieces, with steps of requests between them, each as long as
streams can wait. Knows no HTTP, and not what becomes of the outputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from forerun.engine.engine import Engine
from forerun.errors import OutOfPages
from forerun.llm import LLM
from forerun.models.execution.runner import Span

PIECE_TOKENS = 64  # in one forward, at most
STEP_SHARE = 2  # a piece takes what a step may have for prompts, divided by this: its outputs cost more


def run_pieces(
    llm: LLM, ids: list[int], end: int, run: Callable[[Engine, Span], None], check_cancelled: Callable[[], None]
) -> None:
    """Call `run` with one piece of the prompt after the other, up to token `end`; each has pages and no logits yet. No
    more is left of them than `run` itself makes known."""
    pages, start = array("i"), 0
    with llm.driver.lease() as lease:
        try:
            with lease.exclusive():
                if not lease.pages.extend(pages, len(ids)):
                    hint = "ask again when fewer requests run"
                    raise OutOfPages(f"there is no room for a prompt of {len(ids)} tokens beside what runs", hint)
            while start < end:
                check_cancelled()
                with lease.exclusive() as engine:
                    piece = ids[start : min(end, start + _piece_tokens(engine, start))]
                    with engine.runner.host_threads():  # as in a step: else threads of torch spin beside it
                        run(engine, Span(piece, start, pages, (), prompt=True))
                    start += len(piece)
        finally:
            with lease.exclusive():
                lease.pages.drop(pages)


def _piece_tokens(engine: Engine, start: int) -> int:
    fits = engine.scheduler.tokens_beside_streams(start, STEP_SHARE * PIECE_TOKENS)
    return max(1, fits // STEP_SHARE)
