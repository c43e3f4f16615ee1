"""A ledger with one mistake in it, for `forerun generate --file examples/buggy.py`."""

from __future__ import annotations


class Ledger:
    def __init__(self) -> None:
        self.entries: list[tuple[str, int]] = []

    def add(self, name: str, cents: int) -> None:
        self.entries.append((name, cents))

    def total(self, name: str) -> int:
        return sum(cents for entry, cents in self.entries if entry != name)

    def names(self) -> list[str]:
        return sorted({name for name, _ in self.entries})
