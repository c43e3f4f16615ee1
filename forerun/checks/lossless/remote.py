"""A draft server that sends anything, for the exact part of `forerun check lossless`: trees and distributions that have
nothing to do with a model, through the protocol's own bytes. Knows no socket.
"""

from __future__ import annotations

import random
from typing import Any

from forerun.decode.drafters.remote import RemoteDrafter
from forerun.decode.remote.link import Link
from forerun.decode.remote.protocol import Distribution, DraftOrder, Frame, Hello, Tree, Welcome, decode, encode

TREE_NODES = 4
LAW_TOKENS = 3


class LyingLink(Link):
    """A connection whose server answers every order at once, with what the tokens of the order make it up."""

    def __init__(self, hello: Hello, on_frame: Any) -> None:
        self.address, self.refusal, self.connections = "a lying server", "", 1
        self.welcome = Welcome(1 << 20, 1 << 20, 1e-3, "lies")
        self.bytes_sent = self.bytes_received = 0
        self._vocab_size, self._on_frame = hello.vocab_size, on_frame
        self._known: dict[int, list[int]] = {}

    def wait_attempted(self, seconds: float) -> None:
        """It is there."""

    def close(self) -> None:
        """It stays."""

    def send(self, frame: Frame) -> bool:
        order = decode(encode(frame, self._vocab_size), self._vocab_size)
        if isinstance(order, DraftOrder):
            known = self._known[order.seq] = self._known.get(order.seq, [])[: order.kept] + order.tokens
            tree = made_up_tree(order, known, self._vocab_size)
            self._on_frame(decode(encode(tree, self._vocab_size), self._vocab_size))
        return True


def made_up_tree(order: DraftOrder, tokens: list[int], vocab_size: int) -> Tree:
    """A function of the order alone: a tree of made-up tokens, with distributions that do not fit it."""
    draw = random.Random(f"{tokens} {order.temperature}")
    tree, used = Tree(order.seq, order.version, 0, 1000, prob_bits=order.prob_bits), set()
    for node in range(min(TREE_NODES, order.nodes)):
        parent, token = draw.randrange(-1, node), draw.randrange(vocab_size)
        if (parent, token) not in used and parent < len(tree.tokens):
            used.add((parent, token))
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.probs.append(draw.random())
    for node in range(-1, len(tree.tokens)) if order.top_tokens else ():
        among = draw.sample(range(vocab_size), min(LAW_TOKENS, vocab_size))
        tree.distributions[node] = Distribution(among, [draw.choice((1, 3, 200, 255)) for _ in among])
    return tree


class LyingRemoteDrafter(RemoteDrafter):
    """`remote:` with such a server."""

    name = "remote, lying"

    def _open_links(self, hello: Hello) -> list[Link]:
        return [LyingLink(hello, self._receive)]
