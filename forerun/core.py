"""The nouns: what is asked (`SamplingParams`), what is run (`TokenBatch`), what is reported (`Usage`).

Invariants are checked where an object is made, lengths are derived, and nothing here knows a model, a cache or a
device policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from forerun.errors import BadRequest

MAX_LOGPROBS = 20


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

    def __post_init__(self) -> None:
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
        raise BadRequest(f"{name} is {value}, allowed is {above} {low} to {high}", f"choose a {name} in that range")


@dataclass
class TokenBatch:
    """Any tokens of any sequences, flattened: one forward runs them all.

    A token has a rotary position, a slot its K/V is written to, and a rule for what it sees. Slots are numbers in the
    page pool (page * page_size + offset); entry e of a sequence lies in slot tables[row, e // page_size] * page_size +
    e % page_size. Token t sees entry e of its own sequence when `e < seen[t]`, or, in a draft tree, when
    `tree[t, e - tree_start[row]]` says so. Tokens of one sequence are contiguous, sequences in row order.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, rotary positions
    slots: torch.Tensor  # [T] int64, where each token's K/V goes
    seen: torch.Tensor  # [T] int32, entries of its sequence that a token sees, itself included
    tables: torch.Tensor  # [S, P] int32, page ids of each sequence, padded with 0
    starts: list[int]  # [S + 1] first token of each sequence, then T
    contexts: list[int]  # [S] entries of each sequence that any token here may see
    page_size: int
    want: torch.Tensor  # [N] int64, tokens whose logits are wanted
    tree: torch.Tensor | None = None  # [T, W] bool
    tree_start: list[int] | None = None  # [S] entry that column 0 of `tree` stands for
    run_start: int | None = None  # first slot, where the slots of all tokens are known to follow each other

    def __post_init__(self) -> None:
        assert self.starts[-1] == self.tokens.numel() == self.positions.numel() == self.slots.numel()
        assert len(self.contexts) == len(self.starts) - 1 == self.tables.shape[0]
        assert (self.tree is None) == (self.tree_start is None)

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def num_seqs(self) -> int:
        return len(self.contexts)


@dataclass
class HostBatch:
    """A causal batch still on the host: token t of a sequence sees that sequence's entries before it, and itself."""

    tokens: np.ndarray  # [T] int64
    entries: np.ndarray  # [T] int64, place of each token in its sequence; also its rotary position
    slots: np.ndarray  # [T] int64
    starts: list[int]  # [S + 1]
    contexts: list[int]  # [S]
    pages: list[np.ndarray]  # [S] page ids of each sequence
    page_size: int
    want: list[int]  # [N]

    def to(self, device: torch.device) -> TokenBatch:
        tables = np.zeros((len(self.pages), max(len(pages) for pages in self.pages)), dtype=np.int32)
        for row, pages in enumerate(self.pages):
            tables[row, : len(pages)] = pages
        together = bool((np.diff(self.slots) == 1).all())
        return TokenBatch(
            tokens=torch.from_numpy(self.tokens).to(device),
            positions=torch.from_numpy(self.entries).to(device),
            slots=torch.from_numpy(self.slots).to(device),
            seen=torch.from_numpy((self.entries + 1).astype(np.int32)).to(device),
            tables=torch.from_numpy(tables).to(device),
            starts=self.starts,
            contexts=self.contexts,
            page_size=self.page_size,
            want=torch.tensor(self.want, dtype=torch.int64, device=device),
            run_start=int(self.slots[0]) if together else None,
        )


@dataclass
class Usage:
    """What one answer cost and what it did not have to compute."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose K/V was read from the prefix tree
    completion_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0
    ttft_s: float = 0.0  # from submission to the first token
    total_s: float = 0.0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over the time after the first."""
        decode_s = self.total_s - self.ttft_s
        return (self.completion_tokens - 1) / decode_s if decode_s > 0 and self.completion_tokens > 1 else 0.0
