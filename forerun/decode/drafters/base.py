"""The drafting contract: what a drafter reads (`DraftRequest`), what it returns (`Draft`), and the registry.

A drafter of your own is one class: derive from `Drafter`, give it a name, and `@register` it (`forerun.drafters` has an
example). It need not be right: a draft is verified, and a drafter that raises or returns a malformed draft is only
dropped for that request. Knows no verifier, no controller and no scheduler.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from forerun.core import Draft
from forerun.decode.control.cost import ServerRounds
from forerun.decode.sampling import Context, Rng
from forerun.errors import BadRequest
from forerun.renamed import renamed_attribute

if TYPE_CHECKING:
    from forerun.decode.draft_context import DraftContext


MAX_CATCH_UP_TOKENS = 512  # of a prompt that a draft model reads in one step, so that other sequences are not held up


@dataclass
class DraftRequest:
    """One sequence that needs a draft of what follows its last token. Drafters must not change anything in here."""

    seq_id: int  # the same for all requests of a sequence
    context: Context  # its tokens, sampling parameters and grammar
    max_depth: int  # longest path that can be of use
    max_nodes: int  # most tokens of the draft
    pages: array[int]  # its pages; they hold `len(tokens) + max_nodes` entries
    candidates: Draft | None = None  # what free drafters proposed, for drafters that can score it
    sampled: bool = False  # draw from the drafter's own distribution and return that as `Draft.proposals`
    rng: Rng | None = None  # what to draw with; None: random numbers of the request's own seed
    min_prob: float = 0.02  # of a node's path: less probable ones are not worth verifying
    max_wait_s: float = math.inf  # for a draft that comes from another machine: more is not worth it
    first_prob: float = 1.0  # that such a draft's first token is accepted: waiting is worth less if it comes late
    in_turn: bool = False  # such a draft is waited for whole, and nothing is computed there beside the target's steps
    min_path_probs: Sequence[float] = ()  # `keep_drafting` as numbers, by depth, for drafters that decide on a device
    keep_drafting: Callable[[float, int], bool] | None = None  # (path probability, depth) -> is a round worth it?

    id = renamed_attribute("id", "seq_id")
    depth = renamed_attribute("depth", "max_depth")
    nodes = renamed_attribute("nodes", "max_nodes")

    @property
    def tokens(self) -> list[int]:
        return self.context.tokens


class DraftRound(NamedTuple):
    """One forward of a paid drafter that ran new nodes and nothing else."""

    tokens: int
    sequences: int
    seconds: float


class Drafter(ABC):
    """`propose` is called with the sequences of one step, at most once a step."""

    name: ClassVar[str]
    free: ClassVar[bool] = True  # runs no model; a drafter that does is *paid*
    cross_request: ClassVar[bool] = False  # drafts from the text of other requests
    can_sample: ClassVar[bool] = False  # can draw at random and return its distribution (`DraftRequest.sampled`)
    elsewhere: ClassVar[bool] = False  # a model computes in another process while the target's steps go on,
    shares_memory: bool = False  # on the target's memory bus
    elsewhere_model: str = ""  # of one elsewhere: what its server calls its model, whatever the address
    max_context: int = 1 << 30  # of paid drafters: tokens that their model's context holds
    stops_on_device: bool = False  # stops by `DraftRequest.min_path_probs`, not by `DraftRequest.keep_drafting`
    max_unread_tokens: int = 8  # of paid drafters: as many run along in the first round and cost nothing extra
    tokens_per_round: int = 1  # of paid drafters: depth that one round adds to a draft at most
    # Of paid drafters, and of one elsewhere as its server states it: kind of text -> accepted and tried by depth
    outcomes: Mapping[str, list[list[float]]] = {}
    rounds: Sequence[DraftRound] = ()  # of paid drafters: the rounds of the last `propose`

    def __init__(self, ctx: DraftContext) -> None:  # noqa: B027
        """Made once per engine, when a request first names it."""

    @classmethod
    def problem(cls, ctx: DraftContext) -> BadRequest | None:
        """Why this drafter cannot work here, if it cannot; called before it is made."""
        return None

    @abstractmethod
    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        """One draft for each request, in order; an empty one where there is nothing to propose."""

    def catch_up_tokens(self, request: DraftRequest) -> int:
        """Tokens that a paid drafter must run before it can draft for this sequence."""
        return 0

    def time_round(self, tokens: int, context: int) -> float:
        """Of paid drafters: seconds of one round with so many tokens, after a context of this length."""
        hint = "implement time_round: seconds of a round"
        raise BadRequest(f"the drafter {self.name!r} runs a model and has no time_round", hint)

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:  # noqa: B027
        """A sequence ended; `tokens` are its prompt and answer. For drafters that learn or hold state."""

    def forget(self) -> None:  # noqa: B027
        """Drop what was learnt from requests that ended."""

    def counted_s(self, seq_id: int, seconds: float) -> float | None:
        """Of a free drafter's run that took so long, what counts as its cost; None: it does not count as a run."""
        return seconds

    def turn_costs(self) -> tuple[float, float, ServerRounds]:
        """Of one elsewhere: seconds of a round for one token, of the way there and back, 0 where not known; and what a
        round gives."""
        return 0.0, 0.0, ServerRounds()

    def time_beside(self, step: Callable[[], float]) -> float | None:
        """Of one elsewhere: seconds of the target's steps while the other process drafts something made up; None where
        it does not answer. What `step` returns is the time of one."""
        return None

    def computed_elsewhere(self) -> bool:
        """Whether another process computed for this one since the last call."""
        return False

    def figures(self) -> dict[str, float]:
        """What the drafter has to report beside drafted and accepted tokens."""
        return {}

    def close(self) -> None:  # noqa: B027
        """The engine ends; for drafters that hold connections."""


_REGISTRY: dict[str, type[Drafter]] = {}
_FAMILIES: dict[str, Callable[[str], type[Drafter]]] = {}


def register(kind: type[Drafter]) -> type[Drafter]:
    """Make a drafter available by its name: `@register` above a class whose constructor takes a `DraftContext`."""
    _REGISTRY[kind.name] = kind
    return kind


def unregister(name: str) -> None:
    """Take a name out of the registry; engines that have made the drafter keep it."""
    _REGISTRY.pop(name, None)


def registered() -> dict[str, type[Drafter]]:
    """All drafters by name."""
    return dict(sorted(_REGISTRY.items()))


def register_family(prefix: str, make: Callable[[str], type[Drafter]]) -> None:
    """Make drafters available whose names have an argument, `prefix:ARGUMENT`, by a function of the argument."""
    _FAMILIES[prefix] = make


def find(name: str) -> type[Drafter] | None:
    """A drafter by name; of a family, the class for the argument in its name."""
    prefix, colon, argument = name.partition(":")
    if colon and prefix in _FAMILIES:
        return _FAMILIES[prefix](argument)
    return _REGISTRY.get(name)
