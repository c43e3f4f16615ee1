"""A reader of KV events, written from their format alone: what a router knows about one engine's prefixes."""

from __future__ import annotations

from typing import Any


class KvEventReader:
    """Blocks by hash: the hash of the block before, and the tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.blocks.clear()
        elif kind == "BlockRemoved":
            for block in event["block_hashes"]:
                del self.blocks[block]  # one that was never stored is an error
        else:
            assert kind == "BlockStored", kind
            parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
            assert len(tokens) == size * len(event["block_hashes"]) and (parent is None or parent in self.blocks)
            for number, block in enumerate(event["block_hashes"]):
                assert block not in self.blocks and 0 <= block < 2**64
                self.blocks[block] = parent, tuple(tokens[number * size : (number + 1) * size])
                parent = block

    def held_tokens(self, tokens: list[int], size: int) -> int:
        """How many of a prompt's first tokens the engine holds."""
        parent: int | None = None
        for at in range(0, len(tokens) - size + 1, size):
            wanted = (parent, tuple(tokens[at : at + size]))
            parent = next((block for block, known in self.blocks.items() if known == wanted), None)
            if parent is None:
                return at
        return len(tokens) // size * size
