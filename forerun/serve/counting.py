"""Texts whose tokens are only counted or shown, which no answer waits for: apart from the prompts of answers.

One at a time in a thread of its own, within a limit for each key, and not for clients that are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import Request

from forerun.serve.context import ServerContext
from forerun.serve.response import unless_disconnected

T = TypeVar("T")


async def counted(
    ctx: ServerContext, request: Request, texts: Sequence[Sequence[object]], work: Callable[[Callable[[], None]], T]
) -> T:
    """What `work` returns. `texts`: what it reads, as text or token ids."""
    key = request.state.key
    waiting = ctx.pool.count(key.name if key else "", sum(map(len, texts)), work)
    return await unless_disconnected(request.receive, waiting)
