"""Checks the simulation of `forerun bench load` against real replicas: the same trace, measured and simulated.

    python -m forerun_research.scripts.load_check --trace users --replicas 1,2,4 --cores 2

Each number of replicas is served by `forerun serve --replicas` with one thread each; first a few requests of known
lengths measure what steps cost while 1, 2 or all of them compute, then the trace is replayed with plain decoding.
Nothing of the model is fitted to the trace. Needs `forerun[ray]` and a machine without other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict
from typing import Any

from forerun.loading import opened
from forerun_research.bench.load import figures, together
from forerun_research.bench.load_costs import measured_costs
from forerun_research.bench.load_replay import replay
from forerun_research.bench.load_served import served
from forerun_research.bench.load_simulation import ReplicaCosts, SimulatedSetup, simulate
from forerun_research.bench.load_targets import EndpointTarget
from forerun_research.bench.load_trace import TraceRequest, TraceTexts, named_trace, with_lengths

WITHIN = 0.15


def measured(
    model: str, replicas: int, trace: list[TraceRequest], cores: float
) -> tuple[dict[int, ReplicaCosts], dict[str, Any]]:
    """What steps cost by the number of busy replicas, and the figures of the trace, both of the same servers."""
    with served(model, replicas) as server:
        target = EndpointTarget(f"{server.address}/v1", model, {}, speculation="off")
        counts = together([replicas], cores, 1)
        costs = {count: asyncio.run(measured_costs(target, TraceTexts(), count)) for count in counts}
        return costs, figures(trace, asyncio.run(replay(target, trace, TraceTexts())), 0.0)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--trace", default="users")
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--cores", type=float, default=2.0)
    given = parser.parse_args()
    trace = named_trace(given.trace)
    known = with_lengths(trace, TraceTexts(), opened(given.model).tokenizer().apply_chat_template)
    for replicas in (int(part) for part in given.replicas.split(",") if part):
        costs, real = measured(given.model, replicas, trace, given.cores)
        print(json.dumps({count: asdict(own) for count, own in costs.items()}))
        simulated = figures(trace, simulate(known, SimulatedSetup(replicas, given.cores, 1), costs), 0.0)
        print(f"{replicas} replicas, {real['seconds']:.0f} s; errors {real['errors']}")
        for name, (own, expected) in compared(real, simulated).items():
            ratio = expected / own if own else 1.0
            mark = "" if abs(ratio - 1) <= WITHIN else "  more than 15% off"
            print(f"  {name:28} measured {own:9.3f}  simulated {expected:9.3f}  ratio {ratio:5.2f}{mark}", flush=True)


if __name__ == "__main__":
    main()
