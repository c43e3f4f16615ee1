"""A lease on the engine, for code that runs forwards of its own: pages of the KV pool, and the engine between steps.

Workers and scoring work through this. Requests go on meanwhile: before each exclusive use the engine runs one of its
own steps, so that both make progress. Knows no sampling and no text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.engine.engine import Engine
from forerun.engine.leases import PageLease
from forerun.engine.sequence import UNNAMED, Client
from forerun.models.decoder import Output
from forerun.models.execution.runner import Span

if TYPE_CHECKING:
    from forerun.runtime.driver import Driver


@dataclass(frozen=True)
class EngineLease:
    """Made by `Driver.lease`; what it holds is released when that context ends."""

    driver: Driver
    pages: PageLease
    check_cancelled: Callable[[], None] = lambda: None  # raises once the work is for nothing

    @contextmanager
    def exclusive(self) -> Iterator[Engine]:
        """The engine between two steps, after one step of its own where requests run."""
        self.check_cancelled()
        with self.driver.exclusive() as engine:
            self.driver.check_open()
            self.pages.check()
            self.pages.renew()
            if not engine.idle:
                engine.step()
            yield engine

    def hold_prefix(self, engine: Engine, ids: list[int]) -> array[int]:
        """A new row of pages that begins with what the prefix tree knows of a text."""
        tree = engine.scheduler.tree
        return self.pages.hold(tree.match(ids) if tree is not None else ())

    def prefill(
        self,
        ids: list[int],
        row: array[int],
        start: int,
        on_logits: Callable[[Output], None] | None = None,
        client: Client | None = UNNAMED,
    ) -> int:
        """Compute a text from token `start` on, chunk by chunk, each in an exclusive use of its own. The row has pages
        for all of it; whole pages become known to the prefix tree on a client's account (None: they do not).
        `on_logits` gets the last token's logits [1, V]. Returns how many tokens others can read now and could not
        before."""
        written = 0
        while start < len(ids):
            with self.exclusive() as engine:
                size = engine.scheduler.tokens_beside_streams(start, engine.config.max_num_batched_tokens)
                span = Span(ids[start : start + size], start, row, (), prompt=True)
                start = span.entries.stop
                last, tree = start == len(ids), engine.scheduler.tree
                if last and on_logits is not None:
                    span.logits_indices = (len(span.ids) - 1,)
                output = engine.runner.forward([span])
                if last and tree is not None and client is not None:
                    written = tree.insert(ids, row, client.name, client.weight) * engine.pool.page_size
                if last and on_logits is not None:
                    on_logits(output)
        return written
