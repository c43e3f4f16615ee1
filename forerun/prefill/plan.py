"""The plan of one drafted prompt: which entries the target recomputes, where it checks, and what all of it costs.

Work is counted in tokens of the target's own prefill: the source with its maps, every recomputed row, the checks, the
tail that the engine runs. Runs nothing. The first entries are always recomputed; layer 0 of all is the source's duty.
Whether that work also saves seconds on this machine is not known here (`forecast`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from forerun.errors import BadRequest
from forerun.models.config import ModelConfig
from forerun.options import check_number
from forerun.prefill.checks import CheckSpan
from forerun.prefill.choosers import select
from forerun.prefill.gate import DamageGate
from forerun.prefill.profile import Profile
from forerun.prefill.sources import KVSource
from forerun.prefill.state import PrefillState


def length_problem(source: KVSource, tokens: int) -> BadRequest | None:
    """Why a source cannot draft a prompt of so many tokens."""
    if source.max_tokens is None or tokens <= source.max_tokens:
        return None
    hint = "shorten it, or allow exact prefill for such prompts: allow_exact=True (--allow-exact)"
    return BadRequest(f"the prompt has {tokens} tokens, the draft model reads at most {source.max_tokens}", hint)


@dataclass(frozen=True)
class Policy:
    """What holds for all prompts."""

    first: int = 16  # entries at the start of a prompt that are always exact
    tail: int = 64  # tokens at its end that are never drafted
    shortest: int = 1536  # fewer tokens to draft are computed exactly: little is saved, and summaries lost content
    spans: int = 4  # check spans
    gated_spans: int = 3  # beside a gate, which decides by other signs: spans find drafts that are broken everywhere
    span: int = 16  # entries of each
    deepenings: int = 2  # further rounds of recomputing where checks fail
    failing: float = 0.25  # share of a span's layers that may fail
    first_check_tokens: int = 384  # drafted, after which a first span is checked: whether to go on
    chunk: int = 256  # tokens that a source reads at once on a CPU, where more would leave its caches
    runs_tail: bool = True  # with the last recomputed tokens, where that can be; not where another engine computes it

    def __post_init__(self) -> None:
        for name in ("first", "shortest", "spans", "gated_spans", "deepenings"):
            check_number(f"policy: {name}", getattr(self, name), 0, whole=True)
        for name in ("tail", "span", "first_check_tokens", "chunk"):
            check_number(f"policy: {name}", getattr(self, name), 1, whole=True)
        check_number("policy: failing", self.failing, 0.0, 1.0)

    def beside(self, gate: DamageGate | None) -> Policy:
        """What holds for drafts of a profile with or without a gate."""
        return self if gate is None else replace(self, spans=min(self.spans, self.gated_spans))


@dataclass
class PrefillPlan:
    todo: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # entries to recompute, in order
    spans: list[CheckSpan] = field(default_factory=list)
    cost: float = 1.0  # expected, as a share of exact prefill's
    exact: str = ""  # why exact prefill is taken instead; empty: it is not


class Costs:
    """Work in tokens of the target's prefill, for one prompt."""

    def __init__(self, state: PrefillState, source: KVSource, config: ModelConfig) -> None:
        self._state, self._base = state, source.base
        self.exact = float(max(1, len(state.tokens) - state.first))
        self.tail = float(len(state.tokens) - state.end)
        # a check applies the attention's output matrix twice to every row
        mlp, attention = 3 * config.intermediate_size, 2 * config.q_size + 2 * config.kv_size
        self._check_row = 2 * config.q_size / (mlp + attention)

    @property
    def row(self) -> float:
        """Of one chosen token, as a rule."""
        return 1.0 if self._state.x is None else 1.0 - self._base / self._state.layers

    def start(self, entries: np.ndarray) -> np.ndarray:
        """The layer from which each entry's row runs: those whose hidden states the source kept start above."""
        start = np.zeros(len(entries), dtype=np.int64)
        if self._state.x is not None:
            kept = self._state.first + self._state.x.shape[0]
            start[(entries >= self._state.first) & (entries < kept)] = self._base
        return start

    def token_layers(self, entries: np.ndarray) -> int:
        return int((self._state.layers - self.start(entries)).sum())

    def rows(self, entries: np.ndarray) -> float:
        return self.token_layers(entries) / self._state.layers

    def checks(self, rows: int) -> float:
        return self._check_row * rows


def too_short(state: PrefillState, policy: Policy, start: float = 1.0) -> str:
    """Why a prompt is not worth drafting, from its length alone."""
    drafted, least = state.end - state.first, max(1, round(start * policy.shortest))
    if drafted < least:
        known = f"{state.first} tokens are known exactly, " if state.first else ""
        return f"{known}{drafted} tokens to draft are too few, the least is {least}"
    return ""


def least_work(state: PrefillState, must: np.ndarray, costs: Costs, policy: Policy) -> float:
    """What is left to do after reading when no token is chosen: required rows, check spans, the tail."""
    checks = policy.spans * policy.span
    return costs.rows(_open(state, must)) + checks * costs.row + costs.checks(checks) + costs.tail


def plan(
    state: PrefillState,
    scores: np.ndarray | None,
    profile: Profile,
    source: KVSource,
    costs: Costs,
    policy: Policy,
    spent: float = 0.0,
) -> PrefillPlan:
    """`spent`: work done so far, reading included. Without scores, what it is going to cost: any tokens will do."""
    policy = policy.beside(profile.gate)
    must = required(state, source, policy)
    free = np.zeros(state.end, dtype=bool)
    free[max(state.first, policy.first) :] = True
    free[must] = False
    candidates = np.flatnonzero(free)
    count, why = _count(state, len(candidates), must, profile, costs, policy, spent)
    chosen = candidates[:count] if scores is None else select(scores, candidates, count)
    if scores is not None and not why:
        chosen, why = _gated(state, scores, candidates, chosen, profile)
    if why:
        return PrefillPlan(exact=why)
    spans = place(state, chosen, must, policy)
    checked = [span.entries for span in spans]
    todo = _open(state, _union(state.end, must, chosen, *checked))
    rows = costs.row * len(todo) if scores is None else costs.rows(todo)  # what a source will keep is not read yet
    work = spent + rows + costs.checks(sum(map(len, checked))) + costs.tail
    cost = work / costs.exact
    if why := _too_dear(cost):
        return PrefillPlan(cost=cost, exact=why)
    return PrefillPlan(todo, spans, cost)


def expected_plan(
    state: PrefillState, profile: Profile, source: KVSource, costs: Costs, policy: Policy, spent: float = 0.0
) -> PrefillPlan:
    """What drafting is going to cost, or why exact prefill is taken instead, before anything is read. The same as
    `plan` without scores; for a prompt whose entries are all alike it needs no arrays of them."""
    policy = policy.beside(profile.gate)
    begun = state.x is not None and state.x.shape[0] > 0
    if begun or source.leaves_gaps or state.depths[state.first :].any():
        return plan(state, None, profile, source, costs, policy, spent)
    lo, size, must = max(state.first, policy.first), policy.span, required(state, source, policy)
    count, why = _count(state, max(0, state.end - lo), must, profile, costs, policy, spent)
    if why:
        return PrefillPlan(exact=why)
    edges = np.linspace(lo, state.end, policy.spans + 1).astype(np.int64).tolist()
    lefts = [left for left, right in zip(edges, edges[1:], strict=False) if right - left >= size]
    # the first `count` are as good as any: a check span lies among them, or as far as there are any
    more = sum(size - min(max(lo + count - left, 0), size) for left in lefts)
    work = spent + costs.row * (len(must) + count + more) + costs.checks(size * len(lefts)) + costs.tail
    return PrefillPlan(cost=work / costs.exact, exact=_too_dear(work / costs.exact))


def required(state: PrefillState, source: KVSource, policy: Policy) -> np.ndarray:
    """Entries that are recomputed whatever the scores: the first ones, and those that the source could not draft."""
    first = np.arange(state.first, min(policy.first, state.end), dtype=np.int64)
    return np.union1d(first, source.missing(state)).astype(np.int64) if source.leaves_gaps else first


def first_look(state: PrefillState, source: KVSource, policy: Policy) -> tuple[np.ndarray, list[CheckSpan]]:
    """What must be computed whatever the scores, and check spans among the rest."""
    must = required(state, source, policy)
    spans = place(state, must[:0], must, policy)
    return _open(state, _union(state.end, must, *(span.entries for span in spans))), spans


def place(state: PrefillState, chosen: np.ndarray, must: np.ndarray, policy: Policy) -> list[CheckSpan]:
    """Check spans spread evenly over what is drafted, each where most of its entries are chosen anyway.

    Only entries that still hold drafted K/V can be compared; what `must` be recomputed is no sample of the rest.
    """
    lo, size = max(state.first, policy.first), policy.span
    drafted = np.zeros(state.end, dtype=bool)
    drafted[lo:] = state.depths[lo:] < state.layers
    drafted[must] = False
    wanted = np.zeros(state.end, dtype=bool)
    wanted[chosen] = True
    gain = window_sums(wanted, size)
    if not drafted[lo:].all():
        gain[window_sums(drafted, size) < size] = -1  # not all of it can be compared
    starts = span_starts(gain, lo, state.end, policy)
    middles = [(a + b + size) // 2 for a, b in zip(starts, starts[1:], strict=False)]
    bounds = [state.first, *middles, state.end]
    return [CheckSpan(s, size, a, b) for s, a, b in zip(starts, bounds, bounds[1:], strict=False)]


def span_starts(gain: np.ndarray, lo: int, end: int, policy: Policy) -> list[int]:
    """One check span in each part of lo .. end: where `gain`, by its first entry, is largest, of equals the middle one;
    none where all is negative."""
    starts, edges = [], np.linspace(lo, end, policy.spans + 1).astype(np.int64)
    for left, right in zip(edges, edges[1:], strict=False):
        mine = gain[left : max(left, right - policy.span + 1)]
        if mine.max(initial=-1) >= 0:
            best = left + np.flatnonzero(mine == mine.max())
            starts.append(int(best[np.abs(best - (left + right - policy.span) / 2).argmin()]))
    return starts


def deepen(state: PrefillState, failed: list[CheckSpan], scores: np.ndarray, share: float) -> np.ndarray:
    """Entries to recompute next: of each region behind a failed check span this share of what is left, best scores
    first, and the span once more, to see what difference it makes."""
    parts = []
    for span in failed:
        left = _open(state, np.arange(span.lo, span.hi))
        parts += [select(scores, left, int(np.ceil(share * len(left)))), span.entries]
    return _union(state.end, *parts)


def next_slice(state: PrefillState, share: float, policy: Policy) -> tuple[np.ndarray, list[CheckSpan]]:
    """The best of what is left by the same scores, this share of what is drafted, and new check spans among the
    rest."""
    drafted = np.arange(max(state.first, policy.first), state.end)
    left = _open(state, drafted)
    chosen = select(state.scores, left, round(share * len(drafted)))
    spans = place(state, chosen, drafted[:0], policy)
    return _open(state, _union(state.end, chosen, *(span.entries for span in spans))), spans


def _count(
    state: PrefillState, candidates: int, must: np.ndarray, profile: Profile, costs: Costs, policy: Policy, spent: float
) -> tuple[int, str]:
    """How many of the candidates are chosen by their scores; or why exact prefill is taken instead."""
    budget = state.settings.budget
    share, why = _share(state, profile)
    if share is None:
        return 0, why
    count = round(share * candidates)
    if budget is not None:
        room = budget * costs.exact - spent - least_work(state, must, costs, policy)
        if room < 0.0:
            return 0, f"a budget of {budget} is less than drafting this prompt costs at the least"
        count = min(count, int(room / costs.row))
    return count, ""


def _gated(
    state: PrefillState, scores: np.ndarray, candidates: np.ndarray, chosen: np.ndarray, profile: Profile
) -> tuple[np.ndarray, str]:
    """`chosen`, or as many of the candidates more as it takes to leave no more of the tail's attention on drafted K/V
    than this share leaves in nine of ten prompts; within a budget no more than these. Where a quality was asked for
    and even the largest share leaves more, exact prefill."""
    gate, settings, share = profile.gate, state.settings, len(chosen) / max(1, len(candidates))
    if gate is None or state.attention is None or settings.budget is not None:
        return chosen, ""
    level = gate.level(share)
    if uncovered(state, chosen) <= level:
        return chosen, ""  # as nine of ten do: a device waits for this, and to sort all of them takes longest
    order = candidates[np.argsort(-scores[candidates], kind="stable")]
    covered = np.cumsum(np.where(state.depths[order] < state.layers, state.attention[order], 0.0))
    needed = int(np.searchsorted(covered, uncovered(state, candidates[:0]) - level)) + 1
    most = max(len(chosen), round(gate.max_share * len(candidates)))
    if needed > most and settings.quality is not None:
        bound = gate.bound(level)
        return chosen, f"a KL of at most {bound:.3f} would take more than {gate.max_share:.0%} of the tokens recomputed"
    return select(scores, candidates, min(max(len(chosen), needed), most)), ""


def uncovered(state: PrefillState, todo: np.ndarray) -> float:
    """How much of the tail's attention falls on entries that stay drafted when these are recomputed, too."""
    assert state.attention is not None
    stays = state.depths < state.layers
    stays[: Policy.first] = False
    stays[todo] = False
    return float(state.attention[: state.end][stays].sum())


def _too_dear(cost: float) -> str:
    return f"drafting would cost {cost:.2f} of exact prefill" if cost > 1.0 + 1e-9 else ""


def _share(state: PrefillState, profile: Profile) -> tuple[float | None, str]:
    settings = state.settings
    share = share_for(profile, settings.budget, settings.quality)
    if share is None and settings.budget is not None and not profile.curve:
        return 1.0, ""  # nothing was measured: as much as the budget allows
    if share is None and settings.budget is not None:
        least = min(p.cost for p in profile.curve)
        return None, f"a budget of {settings.budget} is below the least cost on the profile's curve, {least:.2f}"
    if share is None:
        best = max((p.top1 for p in profile.curve), default=0.0)
        return None, f"a quality of {settings.quality} is above the best on the profile's curve, {best:.3f}"
    return share, ""


def _open(state: PrefillState, entries: np.ndarray) -> np.ndarray:
    """Those that the target has not computed through all layers."""
    return entries[state.depths[entries] < state.layers]


def _union(end: int, *parts: np.ndarray) -> np.ndarray:
    """All of these entries, which lie before `end`, in order."""
    among = np.zeros(end, dtype=bool)
    for entries in parts:
        among[entries] = True
    return np.flatnonzero(among)


def window_sums(values: np.ndarray, size: int) -> np.ndarray:
    """Sums of `size` values from each place on that has so many."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums[size:] - sums[: max(0, len(sums) - size)]


def share_for(profile: Profile, budget: float | None, quality: float | None) -> float | None:
    """The share of recomputed tokens for a request; None: nothing on the curve is good or cheap enough."""
    if budget is None and quality is None:
        return profile.share
    points = sorted(profile.curve, key=lambda p: p.share)
    if quality is not None:
        return next((p.share for p in points if p.top1 >= quality), None)
    assert budget is not None
    affordable = [p.share + (budget - p.cost) for p in points if p.cost <= budget]
    return min(1.0, max(affordable)) if affordable else None
