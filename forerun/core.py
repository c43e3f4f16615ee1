"""The nouns: what is asked (`SamplingParams`), what is run (`TokenBatch`), what is guessed and what becomes of it
(`Draft`, `Verdict`), what is reported (`Usage`).

Invariants are checked where an object is made, lengths are derived, and nothing here knows a model, a cache or a
device policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from forerun.models.transfer import send, send_together
from forerun.params import Grammar, Prefill, SamplingParams, Speculation

__all__ = [
    "Draft",
    "Grammar",
    "HostBatch",
    "Prefill",
    "PrefillReport",
    "ROOT",
    "SamplingParams",
    "Speculation",
    "Tally",
    "TokenBatch",
    "TokenLogprob",
    "Usage",
    "Verdict",
]


@dataclass
class TokenBatch:
    """Any tokens of any sequences, flattened: one forward runs them all.

    A token has a rotary position, a slot its K/V is written to, and a rule for what it sees. Slots are numbers in the
    page pool (page * page_size + offset); entry e of a sequence lies in slot block_tables[row, e // page_size] *
    page_size + e % page_size. Token t sees entry e of its own sequence when `e < kv_lens[t]`, or, in a draft tree, when
    `tree[t, e - tree_start[row]]` is set. Tokens of one sequence are contiguous, sequences in row order.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, rotary positions
    slot_mapping: torch.Tensor  # [T] int64, where each token's K/V goes
    kv_lens: torch.Tensor  # [T] int32, entries of its sequence that a token sees, itself included
    block_tables: torch.Tensor  # [S, P] int32, page ids of each sequence, padded with 0
    cu_seqlens: list[int]  # [S + 1] first token of each sequence, then T
    seq_lens: list[int]  # [S] entries of each sequence that any token here may see
    page_size: int
    logits_indices: torch.Tensor  # [N] int64, tokens whose logits are wanted
    tree: torch.Tensor | None = None  # [T, W] bool
    tree_start: list[int] | None = None  # [S] entry that column 0 of `tree` stands for
    run_start: int | None = None  # first slot, where the slots of all tokens are known to follow each other
    host: HostBatch | None = None  # what it was made from, for planning without waiting for the device

    def __post_init__(self) -> None:
        assert self.cu_seqlens[-1] == self.tokens.numel() == self.positions.numel() == self.slot_mapping.numel()
        assert len(self.seq_lens) == len(self.cu_seqlens) - 1 == self.block_tables.shape[0]
        assert (self.tree is None) == (self.tree_start is None)

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)


@dataclass
class HostBatch:
    """A batch still on the host, as lists and numpy arrays; the rules are those of `TokenBatch`."""

    tokens: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    slot_mapping: np.ndarray  # [T] int64
    kv_lens: np.ndarray  # [T] int32
    cu_seqlens: list[int]  # [S + 1]
    seq_lens: list[int]  # [S]
    pages: list[np.ndarray]  # [S] page ids of each sequence
    page_size: int
    logits_indices: list[int]  # [N]
    bits: list[int] | None = None  # [T] bit j: the token sees entry tree_start + j, beside those before `kv_lens`
    tree_start: list[int] | None = None  # [S]

    def to(self, device: torch.device) -> TokenBatch:
        """Copies that do not wait for what the device still does; on a CPU its tensors are the arrays themselves."""
        block_tables = np.zeros((len(self.pages), max(len(pages) for pages in self.pages)), dtype=np.int32)
        for row, pages in enumerate(self.pages):
            block_tables[row, : len(pages)] = pages
        together = bool((np.diff(self.slot_mapping) == 1).all())
        wanted = np.array(self.logits_indices, dtype=np.int64)
        arrays = (self.tokens, self.positions, self.slot_mapping, self.kv_lens, block_tables, wanted)
        sent = send_together(arrays, device) if device.type == "cuda" else [send(array, device) for array in arrays]
        return TokenBatch(
            tokens=sent[0],
            positions=sent[1],
            slot_mapping=sent[2],
            kv_lens=sent[3],
            block_tables=sent[4],
            cu_seqlens=self.cu_seqlens,
            seq_lens=self.seq_lens,
            page_size=self.page_size,
            logits_indices=sent[5],
            tree=None if self.bits is None else _unpack(self.bits).to(device, non_blocking=True),
            tree_start=self.tree_start,
            run_start=int(self.slot_mapping[0]) if together else None,
            host=self,
        )


def _unpack(bits: list[int]) -> torch.Tensor:
    """Sets of entries as rows of booleans: [T, W]."""
    width = max(1, max(b.bit_length() for b in bits))
    return torch.tensor([[bool(b >> j & 1) for j in range(width)] for b in bits])


ROOT = -1  # the parent of a draft's first tokens: the last token of the sequence itself


@dataclass
class Draft:
    """Guesses about what follows a sequence, as a tree of tokens: parents come before their children.

    `probabilities[i]` is the drafter's own estimate that node i is accepted once its parent is. Deterministic drafters
    leave `proposals` empty. A drafter that drew the children of a node at random, one after the other without
    replacement, in the order they have here, gives the distribution it drew them from: `proposals[node]`; such a draft
    is lossless only whole, so nobody prunes or merges it.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # names of the drafters
    proposals: dict[int, torch.Tensor] = field(default_factory=dict)  # node or ROOT -> [V] float32

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, prob: float, source: str) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.sources.append(source)
        return len(self.tokens) - 1

    @classmethod
    def chain(cls, tokens: list[int], probs: list[float], source: str) -> Draft:
        return cls(list(tokens), list(range(ROOT, len(tokens) - 1)), list(probs), [source] * len(tokens))

    def path(self, node: int) -> list[int]:
        """Nodes from the first to `node`; empty for ROOT."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def children(self) -> dict[int, list[int]]:
        """The children of every node that has some, in their order."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return found

    def depths(self) -> list[int]:
        """1 for the first tokens."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def problem(self, vocab: int) -> str | None:
        """What is wrong with it, if anything: drafters may be anybody's."""
        if not len(self.tokens) == len(self.parents) == len(self.probs) == len(self.sources):
            return "tokens, parents, probabilities and sources differ in length"
        for i, (token, parent, prob) in enumerate(zip(self.tokens, self.parents, self.probs, strict=True)):
            if not isinstance(token, int) or not 0 <= token < vocab:
                return f"node {i} has token {token!r}, the vocabulary has {vocab}"
            if not isinstance(parent, int) or not ROOT <= parent < i:
                return f"node {i} has parent {parent!r}, which does not come before it"
            if not 0.0 <= prob <= 1.0:
                return f"node {i} has probability {prob!r}"
        siblings = list(zip(self.parents, self.tokens, strict=True))
        return "two children of one node have the same token" if len(set(siblings)) < len(siblings) else None


@dataclass(frozen=True)
class Verdict:
    """What a verifier made of a draft: the accepted path, and the token that follows it."""

    path: list[int]  # nodes, each the child of the one before
    next_token: int


@dataclass
class TokenLogprob:
    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens, best first


@dataclass
class Tally:
    """What became of one drafter's guesses."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class PrefillReport:
    """What drafting a prompt cost and how good it looked; part of `Usage`."""

    tokens: int = 0
    layers: int = 0
    source: str = ""
    chooser: str = ""
    fell_back: str = ""  # why exact prefill was taken after all; empty: it was not
    exact: int = 0  # tokens whose K/V is exact: read from the prefix tree, or with nothing approximate before them
    drafted: int = 0  # tokens that got drafted K/V in some layer
    accepted: int = 0  # of those, tokens that kept it
    recomputed: int = 0  # of those, tokens that the target ran through all layers after all
    token_layers: int = 0  # that the target ran, of tokens * layers; of further answers, which share a draft, their own
    cost: float = 0.0  # all work (source, maps, target, checks) as a share of exact prefill's; of further ones, too
    rounds: int = 0  # of repair: more than one where checks failed
    scores: dict[str, list[float]] = field(default_factory=dict)  # signal -> mean per layer, at the checkpoints
    spans: list[dict[str, Any]] = field(default_factory=list)  # per checkpoint: first entry, signals, passed
    depth_runs: list[tuple[int, int]] = field(default_factory=list)  # (depth, tokens) from the first entry on
    read_s: float = 0.0
    repair_s: float = 0.0
    check_s: float = 0.0


_GUESSES = ("drafted", "accepted", "provisional", "confirmed", "with_first")
_SUMS = ("written", "completion_tokens", "preemptions", "steps", *_GUESSES)


@dataclass
class Usage:
    """What one answer cost and what it did not have to compute."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose K/V was read from a cache: the pool, host memory or disk
    served: dict[str, int] = field(default_factory=dict)  # prompt tokens by where they came from
    written: int = 0  # tokens whose exact K/V others can read now and could not before
    completion_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0
    ttft_s: float = 0.0  # from submission to the first token
    total_s: float = 0.0
    steps: int = 0  # passes of the target that gave at least one token of the answer
    drafted: int = 0
    accepted: int = 0
    drafters: dict[str, Tally] = field(default_factory=dict)
    verifier: str = ""  # empty: nothing was drafted
    lossless: bool = True
    lengths: list[int] = field(default_factory=list)  # drafted tokens that each step accepted
    # steps where asked for: seconds from submission, tokens added, tokens checked, seconds of drafting, of verifying
    timeline: list[tuple[float, int, int, float, float]] = field(default_factory=list)
    draft_s: float = 0.0  # a batch's time counts in full for each of its requests, as each of them waits for it
    verify_s: float = 0.0
    prefill: PrefillReport | None = None  # None: the prompt was computed as usual
    provisional: int = 0  # tokens shown before the prompt was computed
    confirmed: int = 0  # of those, tokens that stayed
    with_first: int = 0  # tokens that came together with the first one, as confirmed ones may
    provisional_s: float = 0.0  # from submission to the first of them

    def add(self, part: Usage) -> None:
        """Count another answer's tokens, steps and guesses with this one's; times are the caller's business."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(part, name))
        for drafter, tally in part.drafters.items():
            mine = self.drafters.setdefault(drafter, Tally())
            mine.drafted += tally.drafted
            mine.accepted += tally.accepted
        self.lengths += part.lengths
        self.timeline = self.timeline or part.timeline  # of one answer: those of several do not make one
        self.draft_s, self.verify_s = max(self.draft_s, part.draft_s), max(self.verify_s, part.verify_s)
        self.verifier, self.lossless = self.verifier or part.verifier, self.lossless and part.lossless

    @property
    def confirmed_share(self) -> float:
        return self.confirmed / self.provisional if self.provisional else 0.0

    @property
    def accepted_length(self) -> float:
        """Mean tokens a pass of the target gave: 1 without speculation."""
        return self.completion_tokens / self.steps if self.steps else 0.0

    @property
    def other_s(self) -> float:
        """Decoding time that was neither drafting nor verifying: sampling, text, waiting for other requests."""
        return max(0.0, self.total_s - self.ttft_s - self.draft_s - self.verify_s)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first ones over the time after them."""
        decode_s, tokens = self.total_s - self.ttft_s, self.completion_tokens - 1 - self.with_first
        return tokens / decode_s if decode_s > 0 and tokens > 0 else 0.0
