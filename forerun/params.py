"""What is asked: how to choose tokens (`SamplingParams`), what shape the answer has (`Grammar`), how to guess ahead
(`Speculation`), how the prompt's K/V comes about (`Prefill`). Every value is checked on creation; nothing here knows a
model, a tokenizer or which drafters exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from forerun.errors import BadRequest

MAX_LOGPROBS = 20
MAX_NODES = 512  # of a draft


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like. Checked when a request comes in, because only then a tokenizer is at hand."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    source: str = ""  # the schema as JSON text, the pattern, or the grammar

    def __post_init__(self) -> None:
        kinds = ("json_schema", "json_object", "regex", "lark")
        if self.kind not in kinds:
            raise BadRequest(f"a grammar cannot be of kind {self.kind!r}", f"use one of {', '.join(kinds)}")
        if not isinstance(self.source, str):
            raise BadRequest(
                f"a grammar's source is text, got {type(self.source).__name__}", "pass a schema as JSON text"
            )


@dataclass(frozen=True)
class Speculation:
    """How guesses about the answer are made and checked. The defaults never change what is answered."""

    drafter: str = "auto"  # auto, off, a drafter's name, or several joined by +
    nodes: int = 64  # most tokens drafted in a step; 0 is off
    depth: int = 0  # longest path; 0: as long as it pays, else exactly so, whatever it costs (for studies)
    verify: str = "auto"  # auto, or a verifier's name; lossy ones must be named
    bound: float = 0.0  # of lossy verifiers: how far they may stray, in their own terms

    def __post_init__(self) -> None:
        for name in ("drafter", "verify"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise BadRequest(f"speculation: {name} must be a name, got {value!r}", "use auto")
        _number("speculation: nodes", self.nodes, 0, MAX_NODES, whole=True)
        _number("speculation: depth", self.depth, 0, MAX_NODES, whole=True)
        _number("speculation: bound", self.bound, 0.0, 100.0)

    @property
    def off(self) -> bool:
        return self.drafter == "off" or self.nodes == 0


PREFILLS = ("exact", "speculative", "provisional")


@dataclass(frozen=True)
class Prefill:
    """How a prompt's K/V comes about. `exact` computes it; the others draft it and must be asked for.

    `speculative` answers from drafted K/V that was checked and repaired where it was wrong; `provisional` shows such an
    answer at once and replaces it by the exact one as soon as that is known.
    """

    mode: str = "exact"
    budget: float | None = None  # most work, as a share of exact prefill's, as long as checks pass; None: the profile's
    quality: float | None = None  # least agreement with exact prefill, as the profile measured it; None: the profile's
    source: str = "auto"  # who drafts: auto, draft, self or chunk
    chooser: str = "auto"  # who says what is recomputed: auto, draft, tail, deviation, cross, lower, start, random
    allow_exact: bool = False  # where drafting is impossible, compute exactly and do not raise

    def __post_init__(self) -> None:
        if self.mode not in PREFILLS:
            raise BadRequest(f"prefill is {self.mode!r}", f"use one of {', '.join(PREFILLS)}")
        for name in ("source", "chooser"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise BadRequest(f"prefill: {name} must be a name, got {getattr(self, name)!r}", "use auto")
        for name in ("budget", "quality"):
            if getattr(self, name) is not None:
                _number(f"prefill: {name}", getattr(self, name), 0.0, 1.0, open_low=True)
        if self.budget is not None and self.quality is not None:
            raise BadRequest(
                f"prefill has a budget of {self.budget} and a quality of {self.quality}",
                "give one of them: the other follows from the profile's curve",
            )
        given = [entry.name for entry in fields(self)[1:] if getattr(self, entry.name) != entry.default]
        if self.exact and given:
            said = ", ".join(f"{name} {getattr(self, name)!r}" for name in given)
            raise BadRequest(
                f"prefill is 'exact', and {said} is about drafted prompts",
                f"ask for the mode speculative or provisional, or leave {' and '.join(given)} out",
            )

    @property
    def exact(self) -> bool:
        return self.mode == "exact"


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token. Temperature 0 (the default) is greedy; every value is checked on creation."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer, multiplicative
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None  # None: drawn once per request
    logprobs: int | None = None  # None: off; k: the chosen token and the k likeliest
    n: int = 1
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    speculate: Speculation | str = "auto"  # a drafter's name is enough
    prefill: Prefill | str = "exact"  # a mode's name is enough
    cache: bool = True  # False: reads nothing that other requests left, and leaves nothing for them
    prediction: tuple[int, ...] = ()  # tokens of what the answer may well be: guessed from, never more than that
    timeline: bool = False  # `Usage.timeline` tells of every step

    def __post_init__(self) -> None:
        if isinstance(self.speculate, str):
            object.__setattr__(self, "speculate", Speculation(self.speculate))
        if not isinstance(self.speculate, Speculation):
            raise BadRequest(f"speculate must be a name or a Speculation, got {self.speculate!r}", "use auto or off")
        if isinstance(self.prefill, str):
            object.__setattr__(self, "prefill", Prefill(self.prefill))
        if not isinstance(self.prefill, Prefill):
            raise BadRequest(f"prefill must be a name or a Prefill, got {self.prefill!r}", "use exact or speculative")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise BadRequest(f"grammar must be a Grammar, got {self.grammar!r:.80}", "pass Grammar('regex', '[0-9]+')")
        if isinstance(self.prediction, list):
            object.__setattr__(self, "prediction", tuple(self.prediction))
        if not isinstance(self.prediction, tuple) or any(type(token) is not int for token in self.prediction):
            raise BadRequest(f"prediction must be a list of token ids, got {self.prediction!r:.80}", "leave it out")
        for name in ("cache", "timeline"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} must be true or false, got {getattr(self, name)!r:.80}", "leave it out")
        if not self.cache and self.prefilling.source == "chunk":
            hint = "leave cache as it is, or take another source"
            raise BadRequest("prefill: the source 'chunk' reads what others left, and cache is false", hint)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif isinstance(self.stop, (list, set, frozenset)):
            object.__setattr__(self, "stop", tuple(self.stop))
        if not isinstance(self.stop, tuple):
            raise BadRequest(f"stop must be text or a list of texts, got {self.stop!r}", "leave it out for none")
        if not isinstance(self.logit_bias, dict):
            raise BadRequest(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}", "leave it out")
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 10.0)  # logits stay far from float32's end
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("top_k", self.top_k, 0, 1_000_000, whole=True)
        _number("max_tokens", self.max_tokens, 1, 10_000_000, whole=True)
        _number("n", self.n, 1, 256, whole=True)
        if self.seed is not None:
            _number("seed", self.seed, -(2**63), 2**64, whole=True)
        if self.logprobs is not None:
            _number("logprobs", self.logprobs, 0, MAX_LOGPROBS, whole=True)
        if len(self.stop) > 16:
            raise BadRequest(f"stop has {len(self.stop)} strings, the limit is 16", "keep the few that matter")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise BadRequest(f"stop strings must be non-empty text, got {text!r}", "remove it from `stop`")
        for token, bias in self.logit_bias.items():
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def speculation(self) -> Speculation:
        assert isinstance(self.speculate, Speculation)  # names were turned into one on creation
        return self.speculate

    @property
    def prefilling(self) -> Prefill:
        assert isinstance(self.prefill, Prefill)  # names were turned into one on creation
        return self.prefill

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
        )


def _number(name: str, value: float, low: float, high: float, *, whole: bool = False, open_low: bool = False) -> None:
    """Reject what is not a number within [low, high] (or (low, high]), naming the value and the limits."""
    kind = "a whole number" if whole else "a number"
    right_type = isinstance(value, int) if whole else isinstance(value, (int, float))
    if isinstance(value, bool) or not right_type:
        raise BadRequest(f"{name} must be {kind}, got {value!r}", f"give {kind} from {low} to {high}")
    too_low = value <= low if open_low else value < low
    if too_low or value > high or math.isnan(value):  # infinities are outside any limit, too
        above = "above" if open_low else "from"
        raise BadRequest(f"{name} is {value}, allowed is {above} {low} to {high}", "choose a value in that range")
