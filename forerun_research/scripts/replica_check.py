"""What replicas promise, on a real Ray with a real model: routing, a replica that is killed, a rolling update, speed.

    python -m forerun_research.scripts.replica_check --replicas 2 --parts routing kill update throughput

Starts `forerun serve --replicas` for each part and prints one line of JSON. routing: first questions about documents,
then second ones in another order, some at a time; how many found their document in the replica's cache. kill: a replica
is killed under so many streams; how each ended, when the service was whole again, and whether a session on disk goes
on. update: all replicas are replaced while users ask; how many answers were lost. throughput: tokens a second of all
streams, of the replicas and of one process with as many threads, in turn. Needs `forerun[ray]` and psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import psutil

from forerun_research.bench.load_replay import replay
from forerun_research.bench.load_served import ServedProcess, served
from forerun_research.bench.load_targets import EndpointTarget, LoadTarget, ReplayedAnswer
from forerun_research.bench.load_trace import TraceRequest, TraceTexts
from forerun_research.studies.intervals import wilson

REPLICA_TITLE = "ray::ServeReplica:forerun:EngineReplica"  # of its process, as Ray names it
HELD_SHARE = 0.7  # of a prompt's tokens that were cached: its document was there
SESSION = "kept"
WHOLE_S = 120.0  # how long is waited for a service that is whole again
WARM_S = 2.0  # of a round, before tokens count


class Served:
    """`forerun serve --replicas` with sessions on disk."""

    def __init__(self, args: argparse.Namespace, server: ServedProcess) -> None:
        self.args, self.process, self.address = args, server.process, server.address
        self.target = EndpointTarget(f"{server.address}/v1", args.model, {}, speculation="off")

    def replicas(self) -> list[str]:
        """Names of those that answer."""
        with urlopen(f"{self.address}/metrics", timeout=30) as response:
            text = response.read().decode()
        return re.findall(r'^forerun_sequences_running\{replica="([^"]+)"', text, re.MULTILINE)

    def workers(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in below if _title(child).startswith(REPLICA_TITLE)]

    def turn(self) -> int:
        """Of a session that is asked something."""
        own = {"model": self.args.model, "max_tokens": 4, "forerun": {"session": SESSION}}
        body = json.dumps(own | {"messages": [{"role": "user", "content": "What is a lighthouse?"}]}).encode()
        asked = Request(f"{self.address}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urlopen(asked, timeout=60) as response:
            return int(json.loads(response.read())["forerun"]["session"]["turn"])

    def ask(self, requests: Sequence[TraceRequest], first: int = 0) -> Any:
        return replay(self.target, requests, TraceTexts(), first)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_for(condition: Callable[[], bool]) -> float:
    """Seconds until it holds."""
    begun = time.perf_counter()
    while not condition():
        if time.perf_counter() - begun > WHOLE_S:
            raise TimeoutError(f"not so after {WHOLE_S:g} s")
        time.sleep(0.1)
    return time.perf_counter() - begun


def routing(service: Served) -> dict[str, Any]:
    """Questions arrive `--every` seconds apart, so that several are open at a time."""
    args = service.args
    documents = [f"document {i}" for i in range(args.documents)]

    def asked(names: Sequence[str]) -> list[TraceRequest]:
        return [TraceRequest(args.every * i, args.tokens, 8, name) for i, name in enumerate(names)]

    first = asyncio.run(service.ask(asked(documents)))
    again = random.Random(1).sample(documents, len(documents))
    second = asyncio.run(service.ask(asked(again), len(documents)))
    held = [a.cached_tokens > HELD_SHARE * a.prompt_tokens for a in second if not a.error]
    low, high = wilson(sum(held), len(held))
    lost = [a.error for a in (*first, *second) if a.error]
    return {"held": sum(held), "of": len(held), "interval": [round(low, 3), round(high, 3)], "lost": lost}


def kill(service: Served) -> dict[str, Any]:
    args = service.args
    before, turn = set(service.replicas()), service.turn()
    requests = [TraceRequest(0.01 * i, 64, args.answer_tokens) for i in range(args.streams)]

    async def run() -> tuple[list[ReplayedAnswer], dict[str, float]]:
        task = asyncio.create_task(service.ask(requests))
        await asyncio.sleep(args.kill_after)
        victim = (await asyncio.to_thread(service.workers))[0]
        victim.kill()
        killed = time.perf_counter()
        times: dict[str, float] = {}

        def noticed() -> bool:
            return len(set(service.replicas()) & before) < len(before)

        def whole() -> bool:
            return noticed() and len(service.replicas()) == args.replicas

        for name, condition in (("noticed_s", noticed), ("whole_s", whole)):
            await asyncio.to_thread(wait_for, condition)
            times[name] = round(time.perf_counter() - killed, 2)
        return await task, times

    answers, times = asyncio.run(run())
    ended = [_ending(answer, args.answer_tokens) for answer in answers]
    later = asyncio.run(service.ask([TraceRequest(0.0, 64, 8) for _ in range(8)], 10**6))
    found = {"streams": len(answers), "ended": dict(Counter(ended)), **times}
    return found | {"answered_after": sum(not a.error for a in later), "turns": [turn, service.turn()]}


def _ending(answer: ReplayedAnswer, tokens: int) -> str:
    if not answer.error:
        return "whole" if answer.completion_tokens == tokens else f"{answer.completion_tokens} tokens"
    return "replica_lost" if "replica_lost" in answer.error else answer.error


def update(service: Served) -> dict[str, Any]:
    args, before, turn = service.args, set(service.replicas()), service.turn()
    ended: list[str] = []
    done = asyncio.Event()

    async def user(number: int) -> None:
        while not done.is_set():
            numbered = 10**6 * (number + 1) + len(ended)
            (answer,) = await service.ask([TraceRequest(0.0, 64, args.answer_tokens)], numbered)
            ended.append(_ending(answer, args.answer_tokens))

    async def run() -> float:
        users = [asyncio.create_task(user(number)) for number in range(args.users)]
        await asyncio.sleep(2.0)
        service.process.send_signal(signal.SIGUSR1)

        def replaced() -> bool:
            now = set(service.replicas())
            return len(now) == args.replicas and not now & before

        seconds = await asyncio.to_thread(wait_for, replaced)
        done.set()
        await asyncio.gather(*users)
        return seconds

    seconds = asyncio.run(run())
    return {"answers": dict(Counter(ended)), "replaced_s": round(seconds, 1), "turns": [turn, service.turn()]}


def throughput(service: Served) -> dict[str, Any]:
    args = service.args
    with served(args.model, None, threads=args.replicas) as one:
        targets = {"replicas": service.target}
        targets["one_process"] = EndpointTarget(f"{one.address}/v1", args.model, {}, speculation="off")
        found: dict[str, list[float]] = {name: [] for name in targets}
        for _ in range(args.rounds):
            for name, target in targets.items():
                found[name].append(round(asyncio.run(_tokens_per_s(target, args)), 1))
                print(f"{name}: {found[name][-1]} tokens/s", flush=True)
    return {"tokens_per_s": found, "ratio": round(median(found["replicas"]) / median(found["one_process"]), 3)}


async def _tokens_per_s(target: LoadTarget, args: argparse.Namespace) -> float:
    """Of `--streams` users who ask one question after the other."""
    end, times = time.perf_counter() + WARM_S + args.seconds, list[float]()

    async def user(number: int) -> None:
        asked = 1000 * number
        while time.perf_counter() < end:
            (answer,) = await replay(target, [TraceRequest(0.0, 64, args.answer_tokens)], TraceTexts(), asked)
            if answer.error:
                raise RuntimeError(f"a question was not answered: {answer.error}")
            times.extend(answer.token_times)
            asked += 1

    await asyncio.gather(*(user(number) for number in range(args.streams)))
    return sum(end - args.seconds < moment <= end for moment in times) / args.seconds


PARTS = {"routing": routing, "kill": kill, "update": update, "throughput": throughput}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=500, help="of a document")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two questions about documents")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--kill-after", type=float, default=3.0, help="seconds after the first stream was asked for")
    parser.add_argument("--users", type=int, default=6, help="who ask during the update")
    parser.add_argument("--rounds", type=int, default=2, help="of throughput, each of so many --seconds")
    parser.add_argument("--seconds", type=float, default=12.0)
    args = parser.parse_args()
    for part in args.parts:
        with (
            tempfile.TemporaryDirectory() as disk,
            served(args.model, args.replicas, options=["--disk", disk]) as server,
        ):
            found = PARTS[part](Served(args, server))
        print(json.dumps({"part": part, "replicas": args.replicas} | found), flush=True)


if __name__ == "__main__":
    main()
