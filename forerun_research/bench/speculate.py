"""Speculate: every way of guessing ahead beside plain decoding, in one engine, on the same tasks, category by category.

For every task the settings take turns in rotating order, each from a cold prefix cache, so that a drift of the machine
hits all of them. Answers are written to a file as they come. What is asked is in `plan` and `tasks`, the arithmetic in
`speedups`, the table in `speculate_table`.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.core.progress import track
from forerun.errors import BadRequest
from forerun_research.bench import common
from forerun_research.bench.sides import SideProcess
from forerun_research.bench.speculate_tasks import BenchPrompts, SpeculateBench, parse_rule, prepare
from forerun_research.bench.speedups import AUTO, LEAST, PLAIN, Record, copied, goals, speedups, worst
from forerun_research.bench.tasks import BenchTask

MAX_PEER_TASKS = 4  # the peer takes seconds a task
MAX_CONVERSATIONS = 3  # for the prefix cache's hit rate

Write = Callable[[dict[str, Any]], None]


def run(setup: common.Setup, plan: SpeculateBench) -> dict[str, Any]:
    if setup.against == "llama.cpp":
        raise BadRequest("llama-cpp-python is not measured with a draft model here", "use --against transformers")
    if setup.against == "transformers" and plan.temperature:
        raise BadRequest(f"transformers answers greedily here, --temperature is {plan.temperature}", "leave one out")
    work = prepare(setup, plan)
    with _lines(plan.out) as write:
        with SideProcess(replace(setup.spec("forerun", work.context, plan.most), draft=plan.draft)) as side:
            records = answers(side, setup.runs, plan, work, write)
            result = _summary(side, setup, plan, work, records, write)
        if setup.against == "transformers":
            with SideProcess(replace(setup.spec("transformers", work.context), draft=plan.draft)) as peer:
                result["transformers"] = _peer(peer, plan, work, records, write)
        result["hardware"] = common.hardware(setup.thread_count())
        write({"result": result})
    return result


def _summary(
    side: SideProcess,
    setup: common.Setup,
    plan: SpeculateBench,
    work: BenchPrompts,
    records: list[Record],
    write: Write,
) -> dict[str, Any]:
    measured = side.call("speculation")
    paid = measured["control"]["round_s"]  # those that run a model have a cost curve; the others cost next to nothing
    figures = speedups(records, plan.settings, paid, lambda curve, drafter: side.call("bound", curve, drafter))
    result: dict[str, Any] = {
        "bench": "speculate",
        "model": setup.name,
        "draft": plan.draft,
        "tokens": plan.tokens,
        "temperature": plan.temperature,
        "runs": setup.runs,
        "settings": list(plan.settings),
        "categories": figures,
        "goals": goals(figures, plan.settings, same_bits=_same_bits(side.about)),
        "prefix_cache": _prefix_cache(side, plan, work),
    }
    if plan.batches:
        result["batch"] = {str(size): _batch(side, setup.runs, plan, work, size) for size in plan.batches}
        result["goals"]["batch"] = worst({n: b["ratio"]["median"] for n, b in result["batch"].items()}, LEAST)
    if plan.rules:
        result["rules"] = _rules(side, setup.runs, plan, work, write)
    return result | {"forerun": {**side.about, **side.call("memory"), "speculation": measured}}


def _same_bits(about: dict[str, Any]) -> bool:
    """int8 on a CPU gives a token the same bits in every batch; floats may part at ties."""
    return about["weights"] == "int8" and about["device"] == "cpu"


def answers(side: SideProcess, runs: int, plan: SpeculateBench, work: BenchPrompts, write: Write) -> list[Record]:
    """Every task in every setting, in an order that rotates, `runs` times over."""
    settings = [PLAIN, *plan.settings]
    for name in settings:  # for warmth: cost curves, the draft model's first forward; all else is the first run
        side.call("answer", work.asked[0].ids, replace(plan.params(name), max_tokens=min(plan.tokens, 16)))
    jobs = []
    for run in range(runs):
        for a in work.asked:
            turn = (a.number + run) % len(settings)
            jobs += [(run, a, name) for name in settings[turn:] + settings[:turn]]
    records = []
    for run, a, name in track(jobs, "answers"):
        sample = side.call("answer", a.ids, plan.params(name, seed=a.number))
        asked = {"run": run, "task": a.task.id, "category": a.task.category, "setting": name}
        records.append({**asked, **sample, "copied": copied(a.ids, sample["token_ids"])})
        write(records[-1])
    return records


def _batch(side: SideProcess, runs: int, plan: SpeculateBench, work: BenchPrompts, size: int) -> dict[str, Any]:
    """Tokens a second of `size` mixed requests at once, plain and `auto` in turn."""
    names = [PLAIN, AUTO]
    rates: dict[str, list[float]] = {name: [] for name in names}
    equal = 0
    for run in track(range(runs + 1), f"batch {size}"):  # the first is for warmth
        order = names if run % 2 else names[::-1]
        samples = {name: side.call("together", work.crowd[:size], plan.params(name)) for name in order}
        pairs = zip(samples[PLAIN]["token_ids"], samples[AUTO]["token_ids"], strict=True)
        if run:
            equal += sum(plain == auto for plain, auto in pairs)
            for name, sample in samples.items():
                rates[name].append(sample["tokens_per_s"])
    ratios = [round(auto / plain, 4) for auto, plain in zip(rates[AUTO], rates[PLAIN], strict=True)]
    figures = {name: {"tokens_per_s": common.spread(found)} for name, found in rates.items()}
    return {**figures, "ratio": common.spread(ratios), "equal": round(equal / (size * runs), 4)}


def _rules(side: SideProcess, runs: int, plan: SpeculateBench, work: BenchPrompts, write: Write) -> dict[str, Any]:
    """Mean accepted length of each acceptance rule, drafts by the draft model, the same tasks and seeds."""
    sums = {rule: Counter[str]() for rule in plan.rules}
    jobs = [(run, a, rule) for run in range(runs) for a in work.asked for rule in plan.rules]
    for run, a, rule in track(jobs, "rules"):
        params = plan.params(parse_rule(rule), seed=a.number + len(work.asked) * run)
        sample = side.call("answer", a.ids, params)
        write({"run": run, "task": a.task.id, "category": a.task.category, "rule": rule, **sample})
        sums[rule].update({key: sample[key] for key in ("completion_tokens", "steps", "drafted", "accepted")})
    lengths = {rule: found["completion_tokens"] / max(found["steps"], 1) for rule, found in sums.items()}
    first = plan.rules[0]
    result: dict[str, Any] = {}
    for rule, found in sums.items():
        drafted = found["drafted"] and sums[first]["drafted"]  # without drafts all rules are alike, which shows nothing
        against = round(lengths[rule] / lengths[first], 4) if drafted else None
        counts = {key: found[key] for key in ("steps", "drafted", "accepted")}
        result[rule] = {"accepted_length": round(lengths[rule], 4), "against_first": against, **counts}
    return result


def _prefix_cache(side: SideProcess, plan: SpeculateBench, work: BenchPrompts) -> dict[str, Any]:
    """How much of second turns was read from the prefix tree, with speculation off and on."""
    room = work.context - 2 * plan.tokens
    fitting = [a.task for a in work.mixed if a.two_turns <= room][:MAX_CONVERSATIONS]
    if not fitting:
        return {"hit_rate": None, "same": None}
    rates = {}
    for name in (PLAIN, AUTO):
        turns = [side.call("conversation", t.messages, t.follow_up, plan.params(name)) for t in fitting]
        rates[name] = round(sum(t["cached_tokens"] for t in turns) / sum(t["prompt_tokens"] for t in turns), 4)
    return {"hit_rate": rates, "same": rates[PLAIN] == rates[AUTO]}


def _peer(
    peer: SideProcess, plan: SpeculateBench, work: BenchPrompts, records: list[Record], write: Write
) -> dict[str, Any]:
    """transformers' own generation on the first tasks of different categories, with the draft model and without."""
    chosen = work.mixed[:MAX_PEER_TASKS]
    kinds = ("plain",) if plan.draft is None else ("plain", "assisted")
    seconds, tokens = dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 0)
    for kind in kinds:  # for warmth
        peer.call("answer", chosen[0].ids, min(plan.tokens, 8), kind == "assisted")
    for a in track(chosen, "transformers"):
        for kind in kinds:
            sample = peer.call("answer", a.ids, plan.tokens, kind == "assisted")
            write({"task": a.task.id, "category": a.task.category, "setting": f"transformers {kind}", **sample})
            seconds[kind] += sample["total_s"]
            tokens[kind] += len(sample["token_ids"])
    rates = {kind: round(tokens[kind] / seconds[kind], 3) for kind in kinds}
    tasks = [a.task for a in chosen]
    ours = {name: _rate(records, tasks, name) for name in (PLAIN, AUTO) if name in (PLAIN, *plan.settings)}
    ratio = round(ours.get(AUTO, ours[PLAIN]) / rates[kinds[-1]], 3)
    return {**peer.about, "tasks": len(tasks), "tokens_per_s": rates, "forerun_tokens_per_s": ours, "ratio": ratio}


def _rate(records: list[Record], tasks: list[BenchTask], setting: str) -> float:
    """Tokens a second over whole requests, as the peer's are counted."""
    wanted = {(task.category, task.id) for task in tasks}
    found = [r for r in records if r["setting"] == setting and (r["category"], r["task"]) in wanted]
    return round(sum(r["completion_tokens"] for r in found) / sum(r["total_s"] for r in found), 3)


@contextlib.contextmanager
def _lines(path: Path | None) -> Iterator[Write]:
    """Writes one JSON line at a time to the file, at once; nowhere without one."""
    if path is None:
        yield lambda record: None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"cannot write {path}: {error}", "name a file in a folder that exists") from None
    with file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        yield write
