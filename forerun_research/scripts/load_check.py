"""Checks the simulation of `forerun bench load` against real replicas: the same trace, measured and simulated.

    python -m forerun_research.scripts.load_check --trace users --replicas 1,2,4 --cores 2 --save runs.jsonl
    python -m forerun_research.scripts.load_check --from runs.jsonl --costs-of 4

Each number of replicas is served by `forerun serve --replicas` with one thread each; a few requests of known lengths
measure what steps cost while 1, 2 or all of them compute, before and after each replay of the trace with plain
decoding, since machines change in minutes. How much text each replica has got by then is told to the simulation: the
front chooses among idle ones by it. `--runs 2` replays it once more with other questions: the mean of each figure
counts, and what two runs differ by, no simulation can be blamed for. `--save` keeps what was measured, `--from`
compares it with the simulation as it is now, `--costs-of 4` at the costs that were measured beside four replicas, for
all numbers of them. Nothing of the model is fitted to the trace. Needs `forerun[ray]` and a machine without other work.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from forerun.errors import BadRequest
from forerun.loading import opened
from forerun_research.bench.load import figures, mean_figures, simulated_figures, together
from forerun_research.bench.load_costs import Probes, probed, solved_together
from forerun_research.bench.load_replay import replay
from forerun_research.bench.load_served import served
from forerun_research.bench.load_simulation import SimulatedSetup
from forerun_research.bench.load_targets import EndpointTarget, ReplayedAnswer
from forerun_research.bench.load_trace import TraceRequest, TraceTexts, named_trace, turn_tokens

WITHIN = 0.15
METRICS_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class MeasuredRun:
    """What so many replicas were asked, and how they answered."""

    name: str  # of the trace
    replicas: int
    cores: float
    trace: list[TraceRequest]
    turns: list[list[int]]  # tokens of its texts
    probes: dict[int, Probes]  # by the number of replicas that were asked at once
    answers: list[list[ReplayedAnswer]]  # of each replay
    sent: list[list[int]]  # tokens of prompts that each replica had got before each replay: they decide ties

    def figures(self) -> list[dict[str, Any]]:
        return [figures(self.trace, answers, 0.0) for answers in self.answers]

    def simulated(self) -> dict[str, Any]:
        costs = solved_together(self.probes)
        setups = [SimulatedSetup(self.replicas, self.cores, 1, sent=tuple(sent)) for sent in self.sent]
        return mean_figures([simulated_figures(self.trace, own, costs, turns=self.turns) for own in setups])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, line: str) -> MeasuredRun:
        values = json.loads(line)

        def answers(of: list[Any]) -> list[Any]:
            return [answers(own) if isinstance(own, list) else ReplayedAnswer(**own) for own in of]

        values["trace"] = [TraceRequest(**own) for own in values["trace"]]
        values["answers"] = answers(values["answers"])
        for count, own in dict(values["probes"]).items():
            lists = {name: answers(value) for name, value in own.items() if isinstance(value, list)}
            values["probes"][int(count)] = Probes(**(values["probes"].pop(count) | lists))
        return cls(**values)


def numbered(trace: list[TraceRequest], run: int) -> list[TraceRequest]:
    """With documents of its own: those of another run are cached."""
    return [replace(own, document=own.document and f"{own.document} of run {run}") for own in trace]


def measured(model: str, replicas: int, names: list[str], cores: float, runs: int) -> list[MeasuredRun]:
    """What steps cost by the number of busy replicas, and the answers to each trace, all of the same servers. Costs are
    measured before, between and after the replays: a run has those of its own minutes."""
    encode = opened(model).tokenizer().apply_chat_template
    with served(model, replicas) as server:
        target = EndpointTarget(f"{server.address}/v1", model, {}, speculation="off")
        counts, times = together([replicas], cores, 1), itertools.count()

        def probe() -> dict[int, Probes]:
            time = next(times)
            return {count: asyncio.run(probed(target, TraceTexts(), count, time)) for count in counts}

        found, before = [], probe()
        for at, name in enumerate(names):
            own = [numbered(named_trace(name), runs * at + run) for run in range(runs)]
            turns, answers, probes = turn_tokens(own[0], TraceTexts(), encode), list[list[ReplayedAnswer]](), before
            sent = []
            for run, trace in enumerate(own):
                sent.append(prompt_tokens(server.address))
                answers.append(asyncio.run(replay(target, trace, TraceTexts(), (runs * at + run) * len(trace))))
                before = probe()
                probes = {count: probes[count].with_later(before[count]) for count in counts}
            found.append(MeasuredRun(name, replicas, cores, own[0], turns, probes, answers, sent))
    return found


def prompt_tokens(address: str) -> list[int]:
    """That each replica behind a front has got, in the order of their names."""
    counts = Counter[str]()
    with urllib.request.urlopen(f"{address}/metrics", timeout=METRICS_TIMEOUT_S) as response:
        for family in text_string_to_metric_families(response.read().decode()):
            for sample in family.samples if family.name == "forerun_prompt_tokens" else ():
                counts[sample.labels["replica"]] += int(sample.value)
    return [counts[name] for name in sorted(counts)]


def at_costs_of(runs: list[MeasuredRun], replicas: int | None) -> list[MeasuredRun]:
    """The same runs, with costs as they were measured beside so many replicas; None: each with its own."""
    if replicas is None:
        return runs
    probes = next((run.probes for run in runs if run.replicas == replicas), None)
    if probes is None:
        raise BadRequest(f"--costs-of {replicas}: there is no such run", "measure it: --replicas N --save FILE")
    return [replace(run, probes={n: own for n, own in probes.items() if n <= run.replicas}) for run in runs]


def compared(found: dict[str, Any], simulated: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Figures by name, measured and simulated."""
    pairs = {"tokens/s": (found["tokens_per_s"], simulated["tokens_per_s"])}
    pairs["hit rate"] = (found["hit_rate"], simulated["hit_rate"])
    for kind, own in found["kinds"].items():
        for figure, name in (("mean_first_s", "mean first token"), ("mean_gap_s", "mean gap")):
            pairs[f"{kind}: {name}"] = (own[figure], simulated["kinds"][kind][figure])
        other = simulated["kinds"][kind]
        pairs[f"{kind}: first token p50"] = (own["first_s"]["p50"], other["first_s"]["p50"])
        pairs[f"{kind}: first token p95"] = (own["first_s"]["p95"], other["first_s"]["p95"])
        pairs[f"{kind}: gap p50"] = (own["gap_s"]["p50"], other["gap_s"]["p50"])
        pairs[f"{kind}: gap p95"] = (own["gap_s"]["p95"], other["gap_s"]["p95"])
    return pairs


def report(run: MeasuredRun) -> int:
    """Prints each figure, measured and simulated; how many are within 15%."""
    found, simulated = run.figures(), run.simulated()
    print(
        f"{run.name}, {run.replicas} replicas, {found[0]['seconds']:.0f} s; errors {[own['errors'] for own in found]}"
    )
    each, hits = [compared(own, simulated) for own in found], 0
    for name, (_, expected) in each[0].items():
        values = [own[name][0] for own in each]
        ratio = expected / mean(values) if any(values) else 1.0
        hits += abs(ratio - 1) <= WITHIN
        mark = "" if abs(ratio - 1) <= WITHIN else "  more than 15% off"
        runs = ", ".join(f"{value:.4g}" for value in values)
        print(f"  {name:28} measured {mean(values):8.4g} ({runs})  simulated {expected:8.4g}  ratio {ratio:5.2f}{mark}")
    print(f"  {hits} of {len(each[0])} within 15%", flush=True)
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--trace", nargs="+", default=["users"])
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--cores", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=1, help="replays of each trace")
    parser.add_argument("--save", type=Path, default=None, help="a file that what is measured is added to")
    parser.add_argument(
        "--from", dest="known", type=Path, default=None, help="nothing is measured: such a file is read"
    )
    parser.add_argument("--costs-of", type=int, default=None, help="replicas of the run whose costs are taken for all")
    for run in _runs(parser.parse_args()):
        report(run)


def _runs(given: argparse.Namespace) -> Iterator[MeasuredRun]:
    if given.known is not None:
        yield from at_costs_of(list(map(MeasuredRun.of_json, given.known.read_text().splitlines())), given.costs_of)
        return
    for replicas in (int(part) for part in given.replicas.split(",") if part):
        found = measured(given.model, replicas, given.trace, given.cores, given.runs)
        if given.save is not None:
            with given.save.open("a") as file:
                file.writelines(run.to_json() + "\n" for run in found)
        yield from found


if __name__ == "__main__":
    main()
