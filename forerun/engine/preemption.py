"""Which running sequence gives way: where one that runs needs pages, or one that waits needs a place or pages.

Between clients by what they hold for their weights; of one client the youngest, or an answer that has outgrown the
others. Chooses only: the scheduler preempts. Knows pages by their number.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq

from forerun.engine.sequence import Client, Phase, Sequence

# Of the even share of a client's pages: an answer with more is preempted before the others, which would wait for it
LARGE_SHARE = 1.5
# Tokens that such an answer has had since it was admitted before one that waits takes its pages: else it would do
# little but start again. A stream of the same client waits for so many steps at most
MIN_TURN_TOKENS = 64


def alone(seq: Sequence) -> bool:
    """Whether it neither is a provisional sequence nor has one, nor drafts its prompt."""
    apart = seq.provisional is None or seq.provisional.seq is None
    return seq.final is None and apart and seq.phase in (Phase.PREFILLING, Phase.DECODING)


def victim_for_growth(running: list[Sequence], pinned: Container[str | None]) -> Sequence:
    """A provisional sequence, else of the client that holds most pages for its weight the youngest, or the largest
    where one holds far more than the others; a session's turn only where no other sequence is left."""
    provisional = next((seq for seq in running if seq.final is not None), None)
    others = [seq for seq in running if seq.request.session not in pinned] or running
    held: dict[Client, float] = {}
    for seq in others:
        held[seq.request.client] = held.get(seq.request.client, 0.0) + len(seq.pages) / seq.request.client.weight
    heaviest = max(held, key=lambda client: held[client])
    own = [seq for seq in others if seq.request.client == heaviest]
    largest = max(own, key=lambda seq: len(seq.pages))
    even = sum(len(seq.pages) for seq in own) / len(own)
    return provisional or (largest if len(largest.pages) > LARGE_SHARE * even else own[-1])


def victim_for_admission(
    seq: Sequence, pages: int, running: list[Sequence], pinned: Container[str | None]
) -> Sequence | None:
    """For a sequence that waits for so many pages (0: for a place in the batch): the youngest of the client that holds
    most for its weight, where the one that waits then has no more than that one keeps; of its own client an answer that
    has outgrown the others, where a stream waits. None: it has to wait."""
    own = seq.request.client
    held = {own: 0} | {other.request.client: 0 for other in running}
    for other in running:
        held[other.request.client] += len(other.pages) if pages else 1
    heaviest = max(held, key=lambda client: held[client] / client.weight)
    mine = [other for other in running if other.request.client == heaviest and alone(other)]
    victims = [other for other in mine if other.request.session not in pinned]
    if heaviest == own:
        return _outgrown(victims, pages, held[own]) if pages and seq.request.streamed else None
    if not victims:
        return None
    left = held[heaviest] - (len(victims[-1].pages) if pages else 1)
    return victims[-1] if (held[own] + max(1, pages)) / own.weight <= left / heaviest.weight else None


def _outgrown(answers: Seq[Sequence], pages: int, held: int) -> Sequence | None:
    """The largest of a client's answers, where it holds far more than each would have with one more that needs so many
    pages, and has had its turn."""
    largest = max(answers, key=lambda seq: len(seq.pages), default=None)
    if largest is None or largest.phase is not Phase.DECODING:
        return None
    even = (held + pages) / (1 + len(answers))
    large = len(largest.pages) > LARGE_SHARE * max(even, pages)
    return largest if large and len(largest.tokens) >= largest.admitted_with + MIN_TURN_TOKENS else None
