"""What is expected of drafted prompts on this machine, from what earlier ones took: whether drafting saves seconds, and
how many words of a provisional answer are shown.

Where few words stand that were shown, fewer are shown, and then none. Knows numbers only: neither prompts nor models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_EXPECTED_RATIO = 0.95  # of exact prefill's seconds: below it time is saved although no forecast is sure
# seconds against planned work before any was observed. Two cores: 1.24 (SmolLM2 alone) and 1.14 (pair) at 2,048 tokens;
# one H200: 0.38 of the work took 29 of 47 ms and 60 of 111, 0.03 of it 9 of 47 (a first line changed), which is 1.1
# times the work and 10 ms
PRIOR_FACTOR = {"cpu": 1.25, "cuda": 1.1}
FIXED_S = {"cpu": 0.0, "cuda": 0.010}
MAX_OCTAVES_APART = 1  # of a timed length, for seconds to be compared with
MAX_UNTIMED = 2  # drafted prompts of a length before exact prefill is timed to compare with
MIN_OBSERVATIONS = 3  # of drafted prompts of a length, before they count: one may have run beside another program
MIN_WEIGHT = 0.3  # of the latest observation
SLOW = ((1.05, 0.05), (1.2, 0.01))  # a ratio, and the share of prompts that may exceed it
DECAY_PER_SKIP = 0.005  # of what was learnt to be bad: such prompts are tried again after a hundred and more
# of exact prefill's seconds, or of those that were expected: a first prompt of a length that takes so much longer on a
# GPU has met kernels that were not compiled (H200, 8,192 tokens: 6.5 times), and says nothing about the next ones
COMPILING_RATIO = 3.0
MIN_STANDING_SHARE = 0.35  # of shown tokens: where fewer are expected to stand, a provisional answer is not begun
PRIOR_STANDING = {"chunk": 0.65}  # before any was shown: edited prompts, 54 of 80 and 78 of 102; others by the curve
PRIOR_ANSWERS, PRIOR_SHOWN = 2, 24  # what the prior counts as: answers, and tokens of each
SHOWN_PER_STANDING = 1.5  # tokens that are shown for each that stood on average
MIN_SHOWN, MAX_SHOWN = 4, 64  # tokens of a provisional answer


@dataclass
class _Standing:
    """Provisional answers of one source: how many there were, and tokens that were shown and that stood."""

    answers: float = 0.0
    shown: float = 0.0
    stood: float = 0.0

    def scale(self, factor: float) -> None:
        self.answers, self.shown, self.stood = (factor * value for value in (self.answers, self.shown, self.stood))

    def add(self, weight: float, share: float) -> None:
        """Count the prior, of which this share stands, with this weight."""
        self.answers += weight * PRIOR_ANSWERS
        self.shown += weight * PRIOR_ANSWERS * PRIOR_SHOWN
        self.stood += weight * PRIOR_ANSWERS * PRIOR_SHOWN * share


class ProvisionalForecast:
    """What is expected of provisional answers, by source."""

    def __init__(self) -> None:
        self._standing: dict[str, _Standing] = {}

    def why_not_provisional(self, source: str, top1: float) -> str:
        """Why words should not be shown from K/V that this source drafts, with this agreement by the profile's curve;
        empty: enough of them will stand."""
        record = self._standing_of(source, top1)
        if record.stood >= MIN_STANDING_SHARE * record.shown:
            return ""
        share, prior = record.stood / record.shown, self._prior_standing(source, top1)
        record.scale(1.0 - DECAY_PER_SKIP)
        record.add(DECAY_PER_SKIP, prior)
        least = MIN_STANDING_SHARE
        return f"of the words shown from {source!r} drafts {share:.2f} are expected to stand, the least is {least}"

    def max_shown(self, source: str, top1: float) -> int:
        """Tokens of a provisional answer that are shown at most."""
        record = self._standing_of(source, top1)
        return max(MIN_SHOWN, min(MAX_SHOWN, round(SHOWN_PER_STANDING * record.stood / record.answers) + 2))

    def record_provisional(self, source: str, top1: float, shown: int, stood: int) -> None:
        record = self._standing_of(source, top1)
        record.scale(0.9)  # the last ten answers count most
        record.answers, record.shown, record.stood = record.answers + 1, record.shown + shown, record.stood + stood

    def _standing_of(self, source: str, top1: float) -> _Standing:
        if source not in self._standing:
            self._standing[source] = _Standing()
            self._standing[source].add(1.0, self._prior_standing(source, top1))
        return self._standing[source]

    @staticmethod
    def _prior_standing(source: str, top1: float) -> float:
        """By the curve: the mean share of PRIOR_SHOWN tokens before the first that differs."""
        return PRIOR_STANDING.get(source) or sum(top1**n for n in range(1, PRIOR_SHOWN + 1)) / PRIOR_SHOWN


@dataclass
class _Learnt:
    """A mean of logs, the latest observations counting most."""

    log: float
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        weight = max(MIN_WEIGHT, 1.0 / (self.count + 1))
        self.log += weight * (math.log(value) - self.log)


@dataclass
class _Outcomes:
    """Prompts of one length that asked for drafting, and how many exceeded each ratio of `SLOW`."""

    asked: int = 0
    slow: list[int] = field(default_factory=lambda: [0] * len(SLOW))

    def record(self, ratio: float, prompts: int = 1) -> None:
        self.slow = [count + prompts * (ratio > limit) for count, (limit, _) in zip(self.slow, SLOW, strict=True)]

    @property
    def exhausted(self) -> bool:
        """Whether one more slow prompt would be too many; the first is free. Half of one on top, as the next is to
        come."""
        counts = zip(self.slow, SLOW, strict=True)
        return any(count and (count + 0.5) / share > self.asked for count, (_, share) in counts)


class PrefillForecast(ProvisionalForecast):
    """Whether drafting a prompt of this length pays on this machine, decided before anything is read.

    Exact prefill's seconds are learnt by length from prompts that ran alone, and so is the factor between the seconds
    of drafted prompts and the work that was planned for them. A prompt is drafted where that promises less time than
    exact prefill. What failed checks cost is kept within bounds by counting: of all prompts of a length that asked for
    drafting at most 5% may have taken more than 1.05 of exact prefill's work, and at most 1% more than 1.2; until
    enough others were computed exactly, no further one is risked. `device`: cpu or cuda. Lengths are tokens that exact
    prefill would compute."""

    def __init__(self, device: str = "cpu") -> None:
        self._prior, self._fixed_s = PRIOR_FACTOR[device], FIXED_S[device]
        self._token_s: dict[int, _Learnt] = {}  # exact prefill, seconds a token, by octave of length
        self._factors: dict[tuple[str, int], _Learnt] = {}  # by source and octave: seconds over planned work's
        self._outcomes: dict[tuple[str, int], _Outcomes] = {}
        self._met: set[tuple[str, int]] = set()  # of which a drafted prompt was observed
        self._compiles = device == "cuda"
        super().__init__()
        self._untimed: dict[tuple[str, int], list[tuple[int, float, float]]] = {}  # drafted, with nothing beside them

    # -- before a prompt is read ---------------------------------------------------------------------------------------

    def why_exact(self, source: str, tokens: int, cost: float) -> str:
        """Why a prompt whose drafting is planned at a share `cost` of exact prefill's work is computed exactly; empty:
        it is worth drafting. Counts it as one that asked."""
        key = source, _octave(tokens)
        outcomes = self._outcomes.setdefault(key, _Outcomes())
        outcomes.asked += 1
        ratio, seconds = self.ratio(source, tokens, cost), self.exact_s(tokens)
        if ratio is None or len(self._untimed.get(key, ())) >= MAX_UNTIMED:
            return f"exact prefill of {tokens} tokens was not timed on this machine yet"
        if ratio > MAX_EXPECTED_RATIO:
            self._decay(key)
            of = "" if seconds is None else f" of {seconds:.3g} s"
            return f"drafting {tokens} tokens is expected to take {ratio:.2f}{of} that exact prefill takes here"
        if outcomes.exhausted:
            slow = outcomes.slow[0]
            return f"{slow} of {outcomes.asked} prompts of this length took longer than exact prefill"
        return ""

    def ratio(self, source: str, tokens: int, cost: float) -> float | None:
        """Expected seconds as a share of exact prefill's; None: nothing is known that it could follow from."""
        known = self._factors.get((source, _octave(tokens)))
        if known is not None and known.count >= MIN_OBSERVATIONS:
            return cost * math.exp(known.log)
        seconds = self.exact_s(tokens)
        if self._fixed_s and seconds is None:
            return None
        return cost * self._prior + (self._fixed_s / seconds if seconds else 0.0)

    def exact_s(self, tokens: int, octaves: int = 99) -> float | None:
        """Seconds of exact prefill, by the nearest length that was timed, if it is no more octaves away."""
        own = _octave(tokens)
        nearest = min(self._token_s, key=lambda octave: abs(octave - own), default=own + octaves + 1)
        return tokens * math.exp(self._token_s[nearest].log) if abs(nearest - own) <= octaves else None

    def _decay(self, key: tuple[str, int]) -> None:
        if (known := self._factors.get(key)) is not None:
            known.log += DECAY_PER_SKIP * (math.log(self._prior) - known.log)

    # -- after it ------------------------------------------------------------------------------------------------------

    def observe_exact(self, tokens: int, seconds: float) -> None:
        """A prompt that ran alone and was computed exactly, until its first token."""
        rate = max(seconds, 1e-9) / tokens
        self._token_s.setdefault(_octave(tokens), _Learnt(math.log(rate))).observe(rate)
        for source, octave in list(self._untimed):
            if abs(octave - _octave(tokens)) <= MAX_OCTAVES_APART:
                for drafted in self._untimed.pop((source, octave)):
                    self.observe_drafted(source, *drafted)

    def observe_drafted(self, source: str, tokens: int, cost: float, seconds: float) -> None:
        """A prompt that ran alone on drafted K/V, until its first token, at this share of exact prefill's work."""
        if cost <= 0.0:
            return  # nothing was computed for it
        key, exact_s = (source, _octave(tokens)), self.exact_s(tokens, MAX_OCTAVES_APART)
        if exact_s is None:
            self._untimed.setdefault(key, []).append((tokens, cost, seconds))
            return
        prior = self.ratio(source, tokens, cost) or self._prior * cost
        if self._compiles and key not in self._met:
            self._met.add(key)
            if seconds / exact_s > COMPILING_RATIO * max(1.0, prior):
                return  # kernels of this length were compiled meanwhile, once and for all
        learnt = self._factors.setdefault(key, _Learnt(math.log(prior / cost)))
        learnt.observe(seconds / exact_s / cost)
        # one clock reading does not count where others contradict it: another program may have run meanwhile
        if learnt.count >= MIN_OBSERVATIONS and cost * math.exp(learnt.log) > MAX_EXPECTED_RATIO:
            prompts = MIN_OBSERVATIONS if learnt.count == MIN_OBSERVATIONS else 1
            self._outcomes.setdefault(key, _Outcomes()).record(seconds / exact_s, prompts)

    def record_fallback(self, source: str, tokens: int, cost: float, lost_s: float) -> None:
        """A prompt that was begun and computed exactly after all, at this share of exact prefill's work in all; what
        was begun took so many seconds. Where there is nothing to compare them with they were too many."""
        exact_s = self.exact_s(tokens)
        ratio = math.inf if exact_s is None else max(cost, 1.0 + lost_s / exact_s)
        self._outcomes.setdefault((source, _octave(tokens)), _Outcomes()).record(ratio)


def _octave(tokens: int) -> int:
    return max(1, tokens).bit_length()
