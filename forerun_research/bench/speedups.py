"""From answers to speedups: what each way of speculating gained over plain decoding, and whether that is enough.

Pure arithmetic over records (one for each answer); knows no engine and prints nothing. A speedup is the time a token
took plain over the time it took speculating, summed over the same tasks of one run: `decode` from the first token to
the end, with the draft model's own prefill, which happens there; `total` for whole requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from forerun_research.bench.common import same_prefix, spread

Record = dict[str, Any]  # run, task, category, setting, and a sample of `ForerunSide.answer`
Bound = Callable[[list[float], str | None], float]  # (survival, paid drafter) -> speedup

PLAIN, AUTO = "off", "auto"
ALL = "all"
OF_BOUND, OF_BEST, LEAST = 0.9, 0.97, 0.95


def speedups(records: Sequence[Record], settings: Sequence[str], paid: Iterable[str], bound: Bound) -> dict[str, Any]:
    """Figures of every category and of all together, by setting; plain decoding is the setting `off`."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["category"], []).append(record)
    groups[ALL] = list(records)
    return {name: _category(found, settings, frozenset(paid), bound) for name, found in groups.items()}


def _category(records: list[Record], settings: Sequence[str], paid: frozenset[str], bound: Bound) -> dict[str, Any]:
    by_setting = {name: [r for r in records if r["setting"] == name] for name in [PLAIN, *settings]}
    plain = by_setting[PLAIN]
    bounds = {name: _bound(by_setting[name], paid, bound) for name in settings}
    if AUTO in bounds:  # it could have done what any of the others did; its own drafts alone would flatter it
        bounds[AUTO] = max(bounds.values())
    figures: dict[str, Any] = {
        "tasks": len({(r["category"], r["task"]) for r in plain}),
        "copied": round(sum(r["copied"] for r in plain) / max(sum(r["completion_tokens"] for r in plain), 1), 3),
        PLAIN: _speed(plain),
    }
    for name in settings:
        found = by_setting[name]
        speed = {form: spread(_ratios(plain, found, form)) for form in ("decode", "total")}
        figures[name] = {
            **_speed(found),
            **speed,
            **_drafting(found),
            "bound": round(bounds[name], 3),
            "of_bound": round(speed["decode"]["median"] / bounds[name], 3),
            **_sameness(plain, found),
        }
    return figures


def copied(prompt: list[int], answer: list[int], span: int = 8) -> int:
    """Tokens of an answer that stand in spans of its prompt: what speedups owe to repeating the question."""
    known = {tuple(prompt[i : i + span]) for i in range(len(prompt) - span + 1)}
    found = [i for i in range(len(answer) - span + 1) if tuple(answer[i : i + span]) in known]
    return len({i + j for i in found for j in range(span)})


def _speed(records: list[Record]) -> dict[str, float]:
    return {
        "answer_s": round(sum(r["total_s"] for r in records) / len(records), 4),
        "tokens_per_s": round(1 / _per_token(records, "decode"), 2),
    }


def _per_token(records: Iterable[Record], form: str) -> float:
    """Seconds a token took; while decoding, the first token is prefill's."""
    less = 1 if form == "decode" else 0
    seconds = tokens = 0.0
    for record in records:
        seconds += record[f"{form}_s"]
        tokens += record["completion_tokens"] - less
    return max(seconds, 1e-9) / max(tokens, 1)


def _ratios(plain: list[Record], found: list[Record], form: str) -> list[float]:
    """One speedup for each run."""
    runs = sorted({r["run"] for r in found})
    of = lambda records, run: _per_token((r for r in records if r["run"] == run), form)  # noqa: E731
    return [round(of(plain, run) / of(found, run), 4) for run in runs]


def _drafting(records: list[Record]) -> dict[str, Any]:
    drafted, accepted = (sum(r[key] for r in records) for key in ("drafted", "accepted"))
    steps, tokens = (sum(r[key] for r in records) for key in ("steps", "completion_tokens"))
    by_drafter = _accepted_by(records)
    total = sum(by_drafter.values())
    return {
        "drafted": drafted,
        "accepted": accepted,
        "accepted_length": round(tokens / max(steps, 1), 3),
        "share": {name: round(count / total, 3) for name, count in by_drafter.most_common()} if total else {},
        "time_s": {part: round(sum(r[f"{part}_s"] for r in records), 3) for part in ("draft", "verify", "other")},
        "survival": [round(share, 4) for share in survival(records)[:32]],
    }


def _accepted_by(records: list[Record]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for record in records:
        counts.update({name: tally["accepted"] for name, tally in record["drafters"].items() if tally["accepted"]})
    return counts


def survival(records: Iterable[Record]) -> list[float]:
    """Share of decoding passes in which at least 1, 2, 3, ... drafted tokens were accepted. An answer's first pass is
    its prompt's, which is never drafted."""
    lengths = [length for record in records for length in record["lengths"][1:]]
    deepest = max(lengths, default=0)
    return [sum(length >= depth for length in lengths) / len(lengths) for depth in range(1, deepest + 1)]


def _bound(records: list[Record], paid: frozenset[str], bound: Bound) -> float:
    """What acceptance and cost curves allow. Times add up, so where several drafters gave accepted tokens, the times a
    token would take with each one's cost are weighted by their shares."""
    curve = survival(records)
    shares: Counter[str | None] = Counter()
    for name, count in _accepted_by(records).items():
        shares[name if name in paid else None] += count
    total = sum(shares.values())
    if not total:
        return 1.0  # nothing accepted, so nothing is known to be better than plain decoding
    return 1 / sum(count / total / max(bound(curve, name), 1e-9) for name, count in shares.items())


def _sameness(plain: list[Record], found: list[Record]) -> dict[str, Any]:
    """The share of answers equal to plain ones, and where the first few others part."""
    who = lambda r: (r["run"], r["category"], r["task"])  # noqa: E731
    expected = {who(r): r["token_ids"] for r in plain}
    pairs = [(r["task"], r["token_ids"], expected[who(r)]) for r in found]
    parted = [{"task": task, "token": same_prefix(ours, theirs)} for task, ours, theirs in pairs if ours != theirs]
    return {"equal": round(1 - len(parted) / len(pairs), 4), "parted": parted[:8]}


def goals(figures: dict[str, Any], settings: Sequence[str], same_bits: bool) -> dict[str, Any]:
    """Whether `auto` is good enough in every category: pass or fail, and the worst place of each goal.

    `same_bits`: answers of this engine do not depend on batch shapes, so every one must equal its plain answer.
    Bounds come from drafts that were made: where no setting had any accepted (`unproven`), to pass means no more than
    being as fast as plain decoding.
    """
    found: dict[str, Any] = {}
    categories = {name: group for name, group in figures.items() if name != ALL}
    singles = [name for name in settings if name != AUTO]
    if AUTO in settings:
        fast = {name: group[AUTO]["decode"]["median"] for name, group in categories.items()}
        found["never_slower"] = worst(fast, LEAST)
        found["of_bound"] = worst({name: group[AUTO]["of_bound"] for name, group in categories.items()}, OF_BOUND)
        found["of_bound"]["unproven"] = [
            name for name, group in categories.items() if not any(group[setting]["accepted"] for setting in settings)
        ]
        if singles:
            best = {n: max(group[s]["decode"]["median"] for s in singles) for n, group in categories.items()}
            found["of_best"] = worst({name: round(fast[name] / best[name], 3) for name in fast}, OF_BEST)
    if same_bits:
        equal = {name: min(group[s]["equal"] for s in settings) for name, group in categories.items()}
        found["same_answers"] = worst(equal, 1.0)
    return found


def worst(values: dict[str, float], limit: float) -> dict[str, Any]:
    where = min(values, key=values.__getitem__)
    missed = [name for name, value in values.items() if value < limit]
    return {"limit": limit, "worst": values[where], "category": where, "missed": missed, "pass": not missed}
