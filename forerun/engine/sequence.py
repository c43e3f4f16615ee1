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

from forerun.core import SamplingParams, TokenLogprob, Usage
from forerun.decode.guessing import Guessing
from forerun.decode.sampling import Context
from forerun.decode.verifiers.base import Verifier
from forerun.decode.verifiers.match import Match

if TYPE_CHECKING:
    from forerun.decode.grammar import AnswerGrammar

FinishReason = Literal["stop", "length", "cancelled", "error"]

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


@dataclass
class Request:
    """A prompt, how to sample from it, and where events go."""

    prompt_ids: list[int]
    params: SamplingParams
    sink: Callable[[Event], None]
    id: int = field(default_factory=lambda: next(_ids))
    arrived: float = field(default_factory=time.perf_counter)


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
        self.tokens: list[int] = list(request.prompt_ids)
        self.context = Context(self.params, self.tokens, len(request.prompt_ids), seed)
        self.grammar: AnswerGrammar | None = None
        self.guessing: Guessing | None = None  # None: plain decoding
        self.verifier: Verifier = Match()
        self.pages = array("i")
        self.computed = 0
        self.status = Status.WAITING
        self.usage = Usage(prompt_tokens=len(request.prompt_ids))
        self.admitted = False

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """Tokens that have no K/V yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.request.prompt_ids)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]
