"""Checks the simulation of `forerun bench load` against real replicas: the same trace, measured and simulated.

    python -m forerun_research.scripts.load_check --trace users --replicas 1,2,4 --cores 2

Costs are measured first, on one replica that answers nothing else; then each number of replicas is served by
`forerun serve --replicas` with one thread each, and the trace is replayed against it with plain decoding. Nothing of
the model is fitted to these runs. Needs `forerun[ray]` and a machine without other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from forerun_research.bench.load import figures
from forerun_research.bench.load_costs import measured_costs
from forerun_research.bench.load_replay import replay
from forerun_research.bench.load_simulation import ReplicaCosts, SimulatedSetup, simulate
from forerun_research.bench.load_targets import EndpointTarget
from forerun_research.bench.load_trace import TraceRequest, TraceTexts, named_trace

START_TIMEOUT_S = 120.0
WITHIN = 0.15


@contextmanager
def served(model: str, replicas: int) -> Iterator[str]:
    """`forerun serve --replicas`; its address."""
    command = [sys.executable, "-m", "forerun", "serve", "--model", model, "--port", "0", "--threads", "1"]
    command += ["--replicas", str(replicas)]
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        try:
            yield _address(process, printed)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_TIMEOUT_S)


def _address(process: subprocess.Popen[bytes], printed: IO[str]) -> str:
    """From the line that the server prints when it is ready."""
    end = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end:
        printed.seek(0)
        if found := re.search(r"ready at (http://[^/\s]+)", printed.read()):
            return found[1]
        time.sleep(0.1)
    printed.seek(0)
    raise RuntimeError(f"the server did not start: {printed.read()[-1000:]}")


def measured(model: str, replicas: int, trace: list[TraceRequest]) -> dict[str, Any]:
    with served(model, replicas) as address:
        return figures(trace, asyncio.run(replay(_target(model, address), trace, TraceTexts())), 0.0)


def _target(model: str, address: str) -> EndpointTarget:
    return EndpointTarget(f"{address}/v1", model, {}, speculation="off")


def kept_costs(model: str, path: Path | None) -> ReplicaCosts:
    if path is not None and path.exists():
        return ReplicaCosts(**json.loads(path.read_text()))
    with served(model, 1) as address:
        costs = asyncio.run(measured_costs(_target(model, address), TraceTexts()))
    if path is not None:
        path.write_text(json.dumps(asdict(costs)))
    return costs


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
    parser.add_argument("--costs", help="a file: costs are read from there, or written where it is not there")
    given = parser.parse_args()
    trace = named_trace(given.trace)
    costs = kept_costs(given.model, None if given.costs is None else Path(given.costs))
    print(json.dumps(asdict(costs)), flush=True)
    for replicas in (int(part) for part in given.replicas.split(",") if part):
        setup = SimulatedSetup(replicas, given.cores, 1)
        simulated = figures(trace, simulate(trace, setup, costs), 0.0)
        found = measured(given.model, replicas, trace)
        print(f"{replicas} replicas, {found['seconds']:.0f} s; errors {found['errors']}")
        for name, (real, expected) in compared(found, simulated).items():
            ratio = expected / real if real else 1.0
            mark = "" if abs(ratio - 1) <= WITHIN else "  more than 15% off"
            print(f"  {name:28} measured {real:9.3f}  simulated {expected:9.3f}  ratio {ratio:5.2f}{mark}", flush=True)


if __name__ == "__main__":
    main()
