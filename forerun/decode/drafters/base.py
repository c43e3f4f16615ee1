"""The drafting contract: what a drafter may know of a sequence (`DraftRequest`), what it gives (`Draft`), and the list
of names.

A drafter of your own is one class: derive from `Drafter`, give it a name, and `@register` it. It need not be right: a
draft is verified, and one that raises or is malformed only ends drafting for that request. Knows no verifier, no
controller and no scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from forerun.core import Draft
from forerun.decode.sampling import Context, Rng
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from forerun.decode.draft_context import DraftContext


CATCH_UP = 512  # tokens of a prompt that a draft model reads in one step at most, so that others do not wait for all


@dataclass
class DraftRequest:
    """One sequence that wants guesses about what follows its last token. Nothing here may be changed."""

    id: int  # the same for all asks of a sequence
    context: Context  # its tokens, sampling parameters and grammar
    depth: int  # longest path that can be of use
    nodes: int  # most tokens
    pages: array[int]  # its pages; they hold `len(tokens) + nodes` entries
    offered: Draft | None = None  # what free drafters guessed, for drafters that can tell how good it is
    at_random: bool = False  # draw from the drafter's own distribution and give it as `proposals`
    rng: Rng | None = None  # what to draw with; None: numbers of the request's own seed
    least: Sequence[
        float
    ] = ()  # the same for drafters that decide on a device: path probabilities to go on from, by depth
    worth: Callable[[float, int], bool] | None = None  # (probability of the path, depth): is one more forward worth it?

    @property
    def tokens(self) -> list[int]:
        return self.context.tokens


class DraftRound(NamedTuple):
    """One forward of a paid drafter that held nothing but new nodes."""

    tokens: int
    sequences: int
    seconds: float


class Drafter(ABC):
    """`propose` is called with the sequences of one step, at most once a step."""

    name: ClassVar[str]
    free: ClassVar[bool] = True  # costs no forward of a model
    remembers: ClassVar[bool] = False  # guesses from what other requests said
    draws: ClassVar[bool] = False  # can draw at random and tell its distribution (`DraftRequest.at_random`)
    longest: int = 1 << 30  # of paid drafters: tokens their model's context holds
    on_device: bool = False  # decides by `DraftRequest.least`, not `DraftRequest.worth`, when to stop
    rounds: Sequence[DraftRound] = ()  # of paid drafters: the rounds of the last `propose`

    def __init__(self, ctx: DraftContext) -> None:  # noqa: B027
        """Made once per engine, when a request first asks for it."""

    @classmethod
    def problem(cls, ctx: DraftContext) -> BadRequest | None:
        """Why this drafter cannot work here, if it cannot: asked before it is made."""
        return None

    @abstractmethod
    def propose(self, asks: list[DraftRequest]) -> list[Draft]:
        """One draft for each ask, in order; an empty one where there is nothing to guess."""

    def behind(self, ask: DraftRequest) -> int:
        """Tokens a paid drafter must run before it can guess for this sequence."""
        return 0

    def time_round(self, tokens: int, context: int) -> float:
        """Of paid drafters: seconds of one round with so many tokens, after a context of this length."""
        raise BadRequest(
            f"the drafter {self.name!r} runs a model and does not tell what a round costs", "give it time_round"
        )

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:  # noqa: B027
        """A sequence ended; `tokens` are its prompt and answer. For drafters that learn or keep state."""

    def forget(self) -> None:  # noqa: B027
        """Drop whatever was learnt from requests that are over."""


_KINDS: dict[str, type[Drafter]] = {}


def register(kind: type[Drafter]) -> type[Drafter]:
    """Make a drafter available by its name: `@register` above a class whose constructor takes a `DraftContext`."""
    _KINDS[kind.name] = kind
    return kind


def registered() -> dict[str, type[Drafter]]:
    """All drafters by name."""
    return dict(sorted(_KINDS.items()))
