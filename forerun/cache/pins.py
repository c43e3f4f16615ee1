"""Pins: pages that stay in the pool while no request reads them, for sessions that will go on.

A pin is a set of references with a deadline, under a name. When pages run out, the tree first evicts all that is not
pinned; pins go before their time only where they hold too much of the pool or nothing could run otherwise, those in
the middle of a turn last.
Knows no request and no tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.cache.pool import PagePool


@dataclass(eq=False)
class Pin:
    ttl: float  # seconds
    deadline: float
    pages: list[int] = field(default_factory=list)
    in_turn: bool = False  # an answer is in the making: its time does not run
    owner: tuple[str, float] = ("", 1.0)  # on whose account, and the weight of that


class Pins:
    def __init__(self, pool: PagePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._pins: dict[str, Pin] = {}  # least recently used first

    def __contains__(self, name: object) -> bool:
        return name in self._pins

    @property
    def num_pages(self) -> int:
        """References held; a page that two names pin counts twice."""
        return sum(len(pin.pages) for pin in self._pins.values())

    @property
    def distinct_pages(self) -> int:
        """Pages held, each once; may be asked while another thread changes them."""
        return len({page for pin in tuple(self._pins.values()) for page in pin.pages})

    def pages(self, name: str) -> Sequence[int]:
        return self._pins[name].pages if name in self._pins else ()

    @property
    def owners(self) -> dict[str, float]:
        """Whose pages are held, with their weights."""
        return dict(pin.owner for pin in self._pins.values() if pin.pages)

    def open(self, name: str, ttl: float, owner: tuple[str, float] | None = None) -> None:
        """From now on `name` can hold pages, until `ttl` seconds after it was last used."""
        before = self._pins.get(name)
        made = self._pins[name] = Pin(ttl, self._clock() + ttl)
        if before is not None:
            made.pages, made.owner = before.pages, before.owner
        made.owner = owner or made.owner

    def hold(self, name: str, pages: Sequence[int]) -> None:
        """Pin these pages, and no longer those before; does nothing for a name that was not opened."""
        pin = self._use(name)
        if pin is not None:
            self._pool.retain(pages)
            self._pool.release(pin.pages)
            pin.pages = list(pages)

    def begin(self, name: str, owner: tuple[str, float] = ("", 1.0)) -> None:
        if (pin := self._use(name)) is not None:
            pin.in_turn, pin.owner = True, owner

    def end(self, name: str) -> None:
        if (pin := self._use(name)) is not None:
            pin.in_turn = False

    def close(self, name: str) -> None:
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._pool.release(pin.pages)

    def expire(self) -> None:
        """Release pins whose deadline has passed."""
        now = self._clock()
        for pin in self._pins.values():
            if pin.deadline <= now and not pin.in_turn:
                self._drop(pin)

    def give_up(self, sparing: str | None, in_turn: bool = False, owner: str | None = None) -> bool:
        """Let go of the pages that were used longest ago, though their time has not come; False where there are none.
        `sparing`: the name whose pages stay. `in_turn`: also pins in the middle of a turn. `owner`: only this one's."""
        for name, pin in self._pins.items():
            theirs = owner is not None and pin.owner[0] != owner
            if pin.pages and name != sparing and not theirs and (in_turn or not pin.in_turn):
                self._drop(pin)
                return True
        return False

    def give_up_any(self, mine: str | None) -> bool:
        """The last resort: others' pages, and at last one's own, which may be of another text by now."""
        return self.give_up(mine) or self.give_up(mine, in_turn=True) or self.give_up(None, in_turn=True)

    def clear(self) -> None:
        """Let go of all pages; names stay."""
        for pin in self._pins.values():
            self._drop(pin)

    def _drop(self, pin: Pin) -> None:
        self._pool.release(pin.pages)
        pin.pages = []

    def _use(self, name: str) -> Pin | None:
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._pins[name] = pin
            pin.deadline = self._clock() + pin.ttl
        return pin
