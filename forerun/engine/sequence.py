"""A request inside the engine: its tokens, its pages, its phase, and what it does in one forward.

`Request` is what was asked; a `Sequence` is one of its n answers in the making; a `ScheduledSequence` is its part of a
step. None of them knows the scheduler or the model: tokens in, tokens out.
"""

from __future__ import annotations

import enum
import itertools
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from forerun.core import ConditionalReport, Draft, SamplingParams, TokenLogprob, Usage
from forerun.decode.drafter_pool import SpeculationState
from forerun.decode.sampling import Context
from forerun.decode.verifiers.base import MatchVerifier, Verifier
from forerun.decode.verify import VerifyInput
from forerun.engine.stats import CACHES
from forerun.models.execution.runner import Span

if TYPE_CHECKING:
    from forerun.decode.grammar import AnswerGrammar
    from forerun.decode.trie_answer import ConditionalAnswer, TrieAnswer
    from forerun.engine.provisional import ProvisionalAnswer
    from forerun.prefill.state import PrefillState

ConditionalStart = tuple["ConditionalAnswer", ConditionalReport]
FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_TIMELINE_STEPS = 4096

_ids = itertools.count()


@dataclass(slots=True)
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
    stop: str | None = None  # the stop string that ended the answer
    provisional: bool = False  # may be taken back: not part of the answer
    confirmed: int = 0  # provisional tokens that stand: this event's first ones
    retracted: int = 0  # provisional tokens that are taken back


@dataclass(frozen=True)
class Client:
    """On whose account requests run: clients have shares of the engine by their weights."""

    name: str = ""
    weight: float = 1.0


UNNAMED = Client()


@dataclass
class Request:
    """A prompt, how to sample from it, and where events go."""

    prompt_ids: list[int]
    params: SamplingParams
    sink: Callable[[Event], None]
    session: str | None = None  # on whose account it goes, and whose pages stay in the pool afterwards
    packed: array[int] | None = None  # the prompt as int32, once it was checked
    conditional: list[ConditionalStart] | None = None  # of each answer, where its grammar's sampling is conditional
    client: Client = UNNAMED
    streamed: bool = False  # tokens are read as they come: the gaps between them are bounded
    id: int = field(default_factory=lambda: next(_ids))
    arrived: float = field(default_factory=time.perf_counter)


class Phase(enum.Enum):
    """Where a sequence is. `Sequence.enter` is the only way from one phase to another."""

    WAITING = enum.auto()  # in the queue, new or preempted: it has no pages
    DRAFTING = enum.auto()  # its prompt's K/V is being drafted: nothing of it runs as usual yet
    HELD = enum.auto()  # it has pages, and runs once its provisional sequence has emitted a token
    PREFILLING = enum.auto()  # its prompt's K/V is being computed
    DECODING = enum.auto()  # its prompt has K/V: what runs are tokens of the answer
    FINISHED = enum.auto()


_NEXT_PHASES = {
    Phase.WAITING: (Phase.DRAFTING, Phase.HELD, Phase.PREFILLING, Phase.DECODING, Phase.FINISHED),
    Phase.DRAFTING: (Phase.PREFILLING, Phase.DECODING, Phase.WAITING, Phase.FINISHED),
    Phase.HELD: (Phase.PREFILLING, Phase.DECODING, Phase.WAITING, Phase.FINISHED),
    Phase.PREFILLING: (Phase.DECODING, Phase.WAITING, Phase.FINISHED),
    Phase.DECODING: (Phase.WAITING, Phase.FINISHED),
    Phase.FINISHED: (),
}


class Sequence:
    """One answer in the making. `computed` of its `tokens` have K/V in `pages`; the rest are still to run.

    A provisional request has two: the final sequence computes the prompt and gives the answer, the provisional one
    drafts the prompt and emits tokens that may be retracted.
    """

    def __init__(self, request: Request, index: int, seed: int) -> None:
        self.id = next(_ids)
        self.request, self.index, self.seed = request, index, seed
        self.params = request.params
        self.tokens: list[int] = list(request.prompt_ids)  # only ever grows
        self._packed = array("i", request.prompt_ids if request.packed is None else request.packed)
        self.sampling_context = Context(self.params, self.tokens, len(request.prompt_ids), seed)
        self.grammar: AnswerGrammar | TrieAnswer | None = None
        self.spec_state: SpeculationState | None = None  # None: plain decoding
        self.verifier: Verifier = MatchVerifier()
        self.phase = Phase.WAITING
        self.pages = array("i")
        self.computed = 0
        self.draft_key: str | None = None  # drafted K/V is shared under it; None: all of its K/V is exact
        self.prefill_settings = self.params.prefill  # with the source that was chosen for it
        self.prefill: PrefillState | None = None  # of a drafted prompt, as long as the sequence has pages
        self.provisional: ProvisionalAnswer | None = None  # of a final sequence: tokens that came before its own
        self.final: Sequence | None = None  # of a provisional sequence
        self.expected_cached = 0  # while it waits: leading tokens that the prefix tree had when it was queued
        self.leader: tuple[Sequence, int] | None = None  # a running prefill that is computing so many of its tokens
        self.overtaken = 0  # prompt tokens of later ones that were admitted while it waited
        self.admitted_with = 0  # tokens that it had when it was admitted last
        self.lacks_room = False  # there were no pages for it when its turn came
        self.without_room_since = 0.0  # when that was first so since it waits, by `time.perf_counter`; 0: not yet
        self.usage = Usage(prompt_tokens=len(request.prompt_ids))
        self._recorded_s = (0.0, 0.0)  # seconds of drafting and verifying up to the last step of the timeline

    # -- phases --------------------------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        assert phase in _NEXT_PHASES[self.phase], f"from {self.phase} to {phase}"
        self.phase = phase

    def enter_next(self) -> None:
        """The phase of a sequence that has pages, by how far it is; nothing changes where it is in that phase."""
        if self.prefill is not None and not self.prefill.finished:
            phase = Phase.DRAFTING
        elif self.provisional is not None and self.provisional.awaited:
            phase = Phase.HELD
        else:
            phase = Phase.PREFILLING if self.computed < len(self.request.prompt_ids) else Phase.DECODING
        if phase is not self.phase:
            self.enter(phase)

    @property
    def running(self) -> bool:
        return self.phase not in (Phase.WAITING, Phase.FINISHED)

    # -- tokens and their K/V ------------------------------------------------------------------------------------------

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens of the answer, without the lines that an edit program copied."""
        return self.num_generated - self.usage.copied

    @property
    def remaining(self) -> int:
        """Tokens that have no K/V yet; 1 while decoding, and more after a copy of lines."""
        return len(self.tokens) - self.computed

    @property
    def prompt_left(self) -> int:
        """Tokens to compute before the next one is sampled, as far as that is known."""
        return max(1, self.remaining - (self.expected_cached if self.phase is Phase.WAITING else 0))

    @property
    def streams(self) -> bool:
        """Whether its tokens go to a reader as they come."""
        return self.request.streamed and self.final is None and self.phase is Phase.DECODING

    def packed(self, end: int) -> array[int]:
        """The first tokens as int32, negative `end` as in slices. Caches read the same ones several times,
        and packing a long prompt anew takes longer than all else that they do."""
        if len(self._packed) < len(self.tokens):
            self._packed.extend(self.tokens[len(self._packed) :])
        return self._packed[:end]

    @property
    def exact(self) -> int:
        """Leading entries whose K/V is exact: no others may ever answer an exact request."""
        return self.computed if self.prefill is None else min(self.computed, self.prefill.first)

    @property
    def ready_logits(self) -> Tensor | None:
        """[1, V] behind the last token, where drafting its prompt has run that already."""
        return None if self.prefill is None else self.prefill.logits

    def can_read(self, leader: Sequence) -> bool:
        """Whether this sequence can use what `leader` computes."""
        if leader.final is not None or not leader.params.cache:  # K/V of provisional sequences is never shared
            return False
        return leader.draft_key in (None, self.draft_key)

    # -- usage ---------------------------------------------------------------------------------------------------------

    def record_step(self, tokens: int, drafted: int) -> None:
        """Add a step that emitted tokens to the timeline, where one was asked for."""
        usage = self.usage
        if not self.params.timeline or len(usage.timeline) >= MAX_TIMELINE_STEPS:
            return
        draft_s, verify_s = usage.draft_s - self._recorded_s[0], usage.verify_s - self._recorded_s[1]
        self._recorded_s = (usage.draft_s, usage.verify_s)
        usage.timeline.append((time.perf_counter() - self.request.arrived, tokens, drafted, draft_s, verify_s))

    def finish_usage(self, finished: bool) -> None:
        """At its end, before its pages go: how its prompt tokens were served."""
        report, end = self.usage.prefill, len(self.request.prompt_ids)
        kept = report.accepted if report is not None and self.draft_key is not None else 0
        complete_served(self.usage, kept, end if finished else min(end, self.computed))


@dataclass
class ScheduledSequence:
    """What one sequence does in one forward: run its next `count` tokens without K/V, and a draft of what follows."""

    seq: Sequence
    count: int
    draft: Draft = field(default_factory=Draft)

    @property
    def samples(self) -> bool:
        """Whether this brings the sequence to its end, so that its next token is sampled."""
        return self.seq.computed + self.count == len(self.seq.tokens)

    @property
    def decodes(self) -> bool:
        """Whether it continues an answer that has begun, one token at a time but for what is drafted."""
        return self.count == 1 and self.samples and self.seq.num_generated > 0

    @property
    def in_prompt(self) -> bool:
        """Whether it runs tokens of the prompt."""
        return self.seq.computed < len(self.seq.request.prompt_ids)

    @property
    def isolated(self) -> bool:
        """Whether it runs as if there were no provisional sequence beside it: the answer must not depend on that."""
        return self.seq.provisional is not None and self.seq.phase is Phase.PREFILLING

    @property
    def verifies_provisional(self) -> bool:
        """Whether the answer goes on now with provisional tokens, or without them: they can be verified."""
        provisional = self.seq.provisional
        return provisional is not None and not provisional.verified and self.samples

    @property
    def verifier(self) -> Verifier:
        """Provisional tokens stand as far as they are the answer's own, whatever rule was asked for."""
        return MatchVerifier() if self.verifies_provisional else self.seq.verifier

    @property
    def verify_input(self) -> VerifyInput:
        provisional = self.seq.final is not None
        return VerifyInput(self.seq.sampling_context, self.draft, self.verifier, margins=provisional)

    @property
    def span(self) -> Span:
        """What it runs: its tokens, then its draft."""
        seq, draft = self.seq, self.draft
        ids = seq.tokens[seq.computed : seq.computed + self.count]
        want: range | tuple[()] = range(self.count - 1, self.count + len(draft)) if self.samples else ()
        known = seq.ready_logits if self.count == 1 and self.samples and not len(draft) else None
        ids = [*ids, *draft.tokens]
        tree = len(seq.tokens), draft.parents
        return Span(ids, seq.computed, seq.pages, want, *tree, known, self.isolated, self.in_prompt)


def complete_served(usage: Usage, approximate: int, reached: int) -> None:
    """Complete `usage.served` at an answer's end: `reached` tokens of the prompt have K/V; of those that no cache had,
    `approximate` kept drafted K/V and the rest was computed. For a finished answer the parts add up to the prompt."""
    read = {name: usage.served.get(name, 0) for name in CACHES}
    left = max(0, reached - sum(read.values()))
    drafted = min(approximate, left)
    usage.served = read | {"approximate": drafted, "computed": left - drafted}


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
