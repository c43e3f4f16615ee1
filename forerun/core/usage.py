"""What is reported about an answer: `Usage`, and in it `PrefillReport` and a `Tally` for each drafter."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from forerun.renamed import renamed_attribute


@dataclass
class TokenLogprob:
    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens, best first


@dataclass
class Tally:
    """What became of one drafter's tokens."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class LoadReport:
    """What opening a model took."""

    started: float = 0.0  # seconds since 1970
    total_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)  # seconds of tokenizer, weights, costs
    packed_bytes: int = 0  # of packed weights, read from the cache folder or written there
    packed_read: bool = False
    costs_read: bool = False
    bits: str = ""  # of each layer, where they were chosen by importance


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
    rounds: int = 0  # of recomputing: more than one where checks failed
    predicted_kl: float | None = None  # of the answer to exact prefill's; of copied chunks with its margin
    kl_bound: float | None = None  # that 95% of prompts like the calibration's keep; None: the profile has no gate
    covered: bool | None = None  # whether the text is like the calibration's, so that the bound is one for it
    uncovered: float | None = None  # share of the tail's attention that falls on K/V which stays drafted
    drift: float | None = None  # of the text from the profile's; up to 1 it is like it; None: not known
    scores: dict[str, list[float]] = field(default_factory=dict)  # signal -> mean per layer, at the check spans
    spans: list[dict[str, Any]] = field(default_factory=list)  # per check span: first entry, signals, passed
    depth_runs: list[tuple[int, int]] = field(default_factory=list)  # (depth, tokens) from the first entry on
    read_s: float = 0.0
    recompute_s: float = 0.0
    check_s: float = 0.0

    repair_s = renamed_attribute("repair_s", "recompute_s")

    @property
    def drafting_s(self) -> float:
        """Seconds of all that exact prefill does not do."""
        return self.read_s + self.recompute_s + self.check_s


@dataclass
class ConditionalReport:
    """What looking ahead for a grammar with sampling 'conditional' took; part of `Usage`."""

    exact: bool  # whether the answer is drawn from the model conditioned on its grammar, to rounding
    error: float  # where it is not: most total variation from that distribution; 1 for a greedy answer
    scored_tokens: int  # that the model ran, beside the prompt
    answers: int = 0  # of a finite language; 0: it is infinite or too large, and the answer was drawn by rejection
    tries: int = 0  # of rejection
    seconds: float = 0.0  # of all answers of the request

    def joined(self, other: ConditionalReport) -> ConditionalReport:
        """Of several answers of one request, which look ahead together."""
        drawn = self.answers == 0
        return replace(
            self,
            exact=self.exact and other.exact,
            error=max(self.error, other.error),
            scored_tokens=self.scored_tokens + (other.scored_tokens if drawn else 0),
            tries=self.tries + other.tries,
        )


_SPECULATION_COUNTS = ("drafted", "accepted", "provisional", "confirmed", "with_first", "distance")
_SUMS = ("written", "completion_tokens", "copied", "preemptions", "steps", *_SPECULATION_COUNTS)


@dataclass
class Usage:
    """What one answer cost and what it did not have to compute."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose K/V was read from a cache: the pool, host memory or disk
    served: dict[str, int] = field(default_factory=dict)  # prompt tokens by where they came from
    written: int = 0  # tokens whose exact K/V others can read now and could not before
    completion_tokens: int = 0
    copied: int = 0  # tokens of lines that an edit program copied: they run in one forward, and are not sampled
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
    distance: float = 0.0  # of a lossy verifier: how far its tokens may be from the model's, summed over all positions
    lengths: list[int] = field(default_factory=list)  # drafted tokens that each step accepted
    # steps where asked for: seconds from submission, tokens added, tokens checked, seconds of drafting, of verifying
    timeline: list[tuple[float, int, int, float, float]] = field(default_factory=list)
    draft_s: float = 0.0  # a batch's time counts in full for each of its requests, as each of them waits for it
    verify_s: float = 0.0
    plain_s: float = 0.0  # that its tokens would have taken without drafts, by measured costs; 0: not known
    decisions: dict[str, int] = field(default_factory=dict)  # why its steps drafted as they did, or not -> steps
    prefill: PrefillReport | None = None  # None: the prompt was computed as usual
    conditional: ConditionalReport | None = None  # None: no grammar, or one that is masked
    provisional: int = 0  # tokens shown before the prompt was computed
    confirmed: int = 0  # of those, tokens that stayed
    with_first: int = 0  # tokens that came together with the first one, as confirmed ones may
    provisional_s: float = 0.0  # from submission to the first of them

    def add(self, part: Usage) -> None:
        """Count another answer's tokens, steps and drafts with this one's; times are the caller's business."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(part, name))
        for drafter, tally in part.drafters.items():
            mine = self.drafters.setdefault(drafter, Tally())
            mine.drafted += tally.drafted
            mine.accepted += tally.accepted
        if part.conditional is not None:
            own = self.conditional
            self.conditional = part.conditional if own is None else own.joined(part.conditional)
        for why, steps in part.decisions.items():
            self.decisions[why] = self.decisions.get(why, 0) + steps
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

    def record(self) -> dict[str, Any]:
        """Every figure, the derived ones too."""
        derived = ("tokens_per_second", "accepted_length", "other_s", "confirmed_share")
        return asdict(self) | {name: getattr(self, name) for name in derived}
