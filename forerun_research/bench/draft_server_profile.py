"""What a running draft server (`remote:HOST:PORT`) takes and gets right: a round, the way to it, likeliest tokens.

Asks for one token after every token of known answers, one order at a time, as a target would that waits for each.
Knows the protocol and one connection; nothing of what the figures are for.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from forerun.decode.remote.link import CONNECT_S, Link, check_installed
from forerun.decode.remote.protocol import Close, DraftOrder, Forgot, Frame, Hello, Tree
from forerun.errors import BadRequest

REMOTE = "remote:"
MAX_ANSWER_S = 60.0  # for one order: a server may read a whole prompt first
MAX_ORDERS = 3  # for one token, where the server forgot the sequence


@dataclass(frozen=True)
class ServerFigures:
    model: str
    round_s: float  # from the arrival of an order for one token after one new token to its tree
    network_s: float  # the rest of what the target waits
    matches: tuple[tuple[bool, ...], ...]  # by answer and token: whether it was the most probable one


def profile_server(name: str, hello: Hello, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> ServerFigures:
    """`answers`: prompts and what the target answered."""
    problem = check_installed()
    if problem is not None:
        raise problem
    frames, address = queue.SimpleQueue[Frame](), name.removeprefix(REMOTE)
    link = Link(address, hello, frames.put, lambda: None)
    try:
        link.wait_attempted(CONNECT_S)
        if link.welcome is None:
            why = link.refusal or "there is no server, or it does not answer"
            raise BadRequest(f"no drafts from {address}: {why}", "start one for this model: forerun draft serve")
        server, matches, taken = _Asked(link, frames), [], list[tuple[float, float]]()
        for sequence, (prompt, answer) in enumerate(answers, 1):
            found = [server.next_token(sequence, list(prompt), list(answer[:at])) for at in range(len(answer))]
            matches.append(tuple(tree.tokens[:1] == [token] for (tree, _), token in zip(found, answer, strict=True)))
            taken += [(tree.server_us * 1e-6, waited_s) for tree, waited_s in found[1:]]  # the first reads the prompt
            link.send(Close(sequence))
        round_s = median(on_server_s for on_server_s, _ in taken)
        network_s = median(max(0.0, waited_s - on_server_s) for on_server_s, waited_s in taken)
        return ServerFigures(link.welcome.model, round_s, network_s, tuple(matches))
    finally:
        link.close()


class _Asked:
    """Orders of one token, one at a time."""

    def __init__(self, link: Link, frames: queue.SimpleQueue[Frame]) -> None:
        self._link, self._frames, self._version = link, frames, 0

    def next_token(self, sequence: int, prompt: list[int], answer: list[int]) -> tuple[Tree, float]:
        """The tree, and how long it was waited for."""
        kept = len(prompt) + len(answer) - 1 if answer else 0
        for _ in range(MAX_ORDERS):
            self._version += 1
            tokens = [*prompt, *answer][kept:]
            start = time.perf_counter()
            self._link.send(DraftOrder(sequence, self._version, kept, 0, tokens, depth=1, nodes=1, min_prob=0.0))
            frame = self._receive()
            if isinstance(frame, Tree):
                return frame, time.perf_counter() - start
            if not isinstance(frame, Forgot):
                reason = getattr(frame, "reason", type(frame).__name__)
                raise BadRequest(f"{self._link.address} does not draft: {reason}", "raise its limits, or ask for less")
            kept = 0
        raise BadRequest(f"{self._link.address} forgets sequences at once", "give it more --kv-cache-tokens")

    def _receive(self) -> Frame:
        try:
            return self._frames.get(timeout=MAX_ANSWER_S)
        except queue.Empty:
            hint = "see that it runs, and that nothing else uses it"
            raise BadRequest(f"{self._link.address} sent nothing for {MAX_ANSWER_S:g} s", hint) from None
