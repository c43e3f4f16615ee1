"""A request inside the engine: its tokens, its pages, and how far they are computed.

`Request` is what was asked; a `Sequence` is one of its n answers in the making. Neither knows the scheduler, the model
or the text: tokens in, tokens out.
"""

from __future__ import annotations

import enum
import itertools
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import Tensor

from forerun.core import SamplingParams, TokenLogprob, Usage
from forerun.decode.sampling import Context
from forerun.decode.state import SpeculationState
from forerun.decode.verifiers.base import Verifier
from forerun.decode.verifiers.match import MatchVerifier
from forerun.engine.stats import settle

if TYPE_CHECKING:
    from forerun.decode.grammar import AnswerGrammar
    from forerun.prefill.provisional import Provisional
    from forerun.prefill.state import PrefillState

FinishReason = Literal["stop", "length", "cancelled", "error"]

MOST_STEPS = 4096  # of a timeline

_ids = itertools.count()


@dataclass
class Event:
    """What one step did to one sequence; the last one of a sequence carries its finish reason and usage."""

    request_id: int
    index: int  # which of the request's n answers
    text: str = ""  # new text, whole characters only
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: Exception | None = None
    provisional: bool = False  # may be taken back: not part of the answer
    confirmed: int = 0  # provisional tokens that stand: this event's first ones
    retracted: int = 0  # provisional tokens that are taken back


@dataclass
class Request:
    """A prompt, how to sample from it, and where events go."""

    prompt_ids: list[int]
    params: SamplingParams
    sink: Callable[[Event], None]
    session: str | None = None  # on whose account it goes, and whose pages stay in the pool afterwards
    packed: array[int] | None = None  # the prompt as int32, once it was checked
    id: int = field(default_factory=lambda: next(_ids))
    arrived: float = field(default_factory=time.perf_counter)


@dataclass(eq=False)
class Approximate:
    """Of a sequence that does not compute its prompt: whose drafted K/V it may share, and how far its own has come."""

    key: str
    drafting: bool = False  # nothing of the sequence runs as usual yet
    first: int = 0  # entries before it are exact all the same
    depths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int16))  # layers the target itself computed
    state: PrefillState | None = None


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """One answer in the making. `computed` of its `tokens` have K/V in `pages`; the rest are still to run."""

    def __init__(self, request: Request, index: int, seed: int) -> None:
        self.id = next(_ids)
        self.request, self.index, self.seed = request, index, seed
        self.params = request.params
        self.tokens: list[int] = list(request.prompt_ids)  # only ever grows
        self._packed = array("i", request.prompt_ids if request.packed is None else request.packed)
        self.context = Context(self.params, self.tokens, len(request.prompt_ids), seed)
        self.grammar: AnswerGrammar | None = None
        self.spec_state: SpeculationState | None = None  # None: plain decoding
        self.verifier: Verifier = MatchVerifier()
        self.pages = array("i")
        self.computed = 0
        self.ready: Tensor | None = None  # [1, V] logits behind the last token, where it has run before its turn
        self.approximate: Approximate | None = None  # None: all of its K/V is exact
        self.guide: Sequence | None = None  # says provisionally, from drafted K/V, what this one may come to say
        self.real: Sequence | None = None  # of a guide: whom it guides
        self.provisional: Provisional | None = None  # what the guide has said
        self.status = Status.WAITING
        self.usage = Usage(prompt_tokens=len(request.prompt_ids))
        self.admitted = False
        self._noted = (0.0, 0.0)  # seconds of drafting and verifying up to the last step that was written down

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    def packed(self, end: int) -> array[int]:
        """The first tokens as int32, negative `end` as in slices. Caches are asked and told of the same ones several
        times, and packing a long prompt anew takes them longer than all else that they do."""
        self._packed.extend(self.tokens[len(self._packed) :])
        return self._packed[:end]

    @property
    def remaining(self) -> int:
        """Tokens that have no K/V yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.request.prompt_ids)

    @property
    def drafting(self) -> bool:
        return self.approximate is not None and self.approximate.drafting

    @property
    def held(self) -> bool:
        """Whether it waits until its guide has begun to speak: the guide's first word must not wait for this one."""
        return self.guide is not None and not self.guide.num_generated

    @property
    def exact(self) -> int:
        """Leading entries whose K/V is exact: no others may ever answer an exact request."""
        return self.computed if self.approximate is None else min(self.computed, self.approximate.first)

    def can_read(self, leader: Sequence) -> bool:
        """Whether this sequence can use what `leader` computes."""
        if leader.real is not None or not leader.params.cache:  # a guide's K/V is nobody else's
            return False
        if leader.approximate is None:
            return True
        return self.approximate is not None and self.approximate.key == leader.approximate.key

    def note(self, tokens: int, drafted: int) -> None:
        """Write a step down that added tokens, where that was asked for."""
        usage = self.usage
        if not self.params.timeline or len(usage.timeline) >= MOST_STEPS:
            return
        draft_s, verify_s = usage.draft_s - self._noted[0], usage.verify_s - self._noted[1]
        self._noted = (usage.draft_s, usage.verify_s)
        usage.timeline.append((time.perf_counter() - self.request.arrived, tokens, drafted, draft_s, verify_s))

    def settle(self, finished: bool) -> None:
        """Book, at its end and before its pages go, how its prompt tokens were served."""
        report, end = self.usage.prefill, len(self.request.prompt_ids)
        kept = report.accepted if report is not None and self.approximate is not None else 0
        settle(self.usage, kept, end if finished else min(end, self.computed))

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]


def common_prefix(a: array[int], b: array[int]) -> int:
    """Length of the common prefix, by halving: comparing slices is far faster than comparing tokens."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
