"""A drafter in another process behind a delaying network: speed against plain and local drafting, bytes, and faults.

Target and draft server run in two processes with the given threads each; a proxy between them adds the round trip. For
every prompt the settings take turns, `--repeats` times; the median counts. `plain again` is plain decoding once more:
how far its prompts are from 1 is what the machine adds by itself. `--faults` kills and restarts the server and damages
its bytes under load instead, and compares every answer with the plain one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from forerun import LLM, Completion, SamplingParams, data
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.serve.server import listen
from forerun_research.bench.delay_proxy import DelayProxy

ROUND_TRIPS_MS = (0, 20, 50, 100)
FAULT_PERIOD_S = 4.0  # between kills of the server


class DraftServerProcess:
    """`forerun draft serve` on a port that stays the same when it is started again."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        with listen("127.0.0.1", 0) as sock:
            self.port = sock.getsockname()[1]
        self._command = [sys.executable, "-m", "forerun", "draft", "serve", "--model", model, "--dtype", dtype]
        self._command += ["--threads", str(threads), "--port", str(self.port)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if re.search("drafts for targets at", line):
                return
        raise RuntimeError("the draft server did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def draft_server(model: str, dtype: str, threads: int) -> Iterator[DraftServerProcess]:
    server = DraftServerProcess(model, dtype, threads)
    try:
        yield server
    finally:
        server.kill()


def prompts(kind: str, count: int, skip: int = 0) -> list[list[dict[str, str]]]:
    found = [p for p in data.read_prompts() if kind in ("all", p.kind)]
    return [[{"role": "user", "content": p.text}] for p in found[skip : skip + count]]


def chat(llm: LLM, messages: Any, params: SamplingParams, drafter: str, named: bool) -> Completion:
    """`named`: the request names the drafter; else it is that of `auto`, as `draft_model="remote:..."` makes it."""
    speculator = llm.engine.speculator
    speculator.ctx.remote_drafters.clear()
    if named or not drafter.startswith("remote:"):
        return llm.chat([messages], replace(params, speculation=drafter))[0]
    speculator.ctx.remote_drafters.append(drafter)
    speculator.drafter_pool.prepare(SamplingParams(speculation=drafter))
    return llm.chat([messages], params)[0]


def speed(llm: LLM, server: DraftServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    params = SamplingParams(temperature=options.temperature, seed=1, max_tokens=options.tokens, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        settings = {
            "plain": "off",
            "plain again": "off",
            "auto alone": "auto",
            **({"local": "model"} if options.local else {}),
        }
        for ms in options.rtt:
            proxy = stack.enter_context(DelayProxy(server.port, ms / 1000.0))
            settings[f"remote {ms} ms"] = f"remote:127.0.0.1:{proxy.port}"
        asked = prompts(options.kind, options.prompts, options.skip)
        seconds: dict[str, list[float]] = defaultdict(list)
        counts: dict[str, list[int]] = {name: [0, 0, 0] for name in settings}
        equal = 0
        for drafter in settings.values():  # for warmth: connections, the draft model's first forwards
            chat(llm, asked[0], replace(params, max_tokens=8), drafter, options.named)
        for number, messages in enumerate(asked):
            answers = {}
            taken: dict[str, list[float]] = defaultdict(list)
            for turn in range(number, number + options.repeats):
                order = list(settings)
                at = turn % len(order)
                for name in order[at:] + order[:at]:
                    llm.engine.clear_cache()
                    answers[name] = chat(llm, messages, params, settings[name], options.named)
                    usage = answers[name].usage
                    taken[name].append((usage.total_s - usage.ttft_s) / max(1, usage.completion_tokens - 1))
                    for i, value in enumerate((usage.steps, usage.drafted, usage.accepted)):
                        counts[name][i] += value
            for name, found in taken.items():
                seconds[name].append(median(found))
            equal += all(answer.token_ids == answers["plain"].token_ids for answer in answers.values())
        figures = llm.engine.speculator.drafter_pool.figures()
        rows = {}
        for name, drafter in settings.items():
            steps, drafted, accepted = counts[name]
            ratios = [p / s for p, s in zip(seconds["plain"], seconds[name], strict=True)]
            rows[name] = {
                "tokens_per_s": round(1.0 / median(seconds[name]), 2),
                "against_plain": round(sum(seconds["plain"]) / sum(seconds[name]), 3),
                "worst_prompt": round(min(ratios), 3),
                "prompts": [round(ratio, 3) for ratio in ratios],
                "accepted_a_step": round(accepted / max(1, steps), 2),
                "drafted": drafted,
                **figures.get(drafter, {}),
            }
            if drafter in figures and accepted:
                moved = figures[drafter]["bytes_sent"] + figures[drafter]["bytes_received"]
                rows[name]["bytes_per_accepted_token"] = round(moved / accepted, 1)
    return {"equal_answers": f"{equal} of {len(asked)}", "settings": rows}


def faults(llm: LLM, server: DraftServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    params = SamplingParams(temperature=options.temperature, seed=1, max_tokens=options.tokens, ignore_eos=True)
    asked = prompts(options.kind, options.prompts)
    plain = llm.chat(asked, replace(params, speculation="off"))
    ended, kills, rounds, wrong, accepted = threading.Event(), 0, 0, 0, 0

    def kill_and_restart() -> None:
        nonlocal kills
        while not ended.wait(FAULT_PERIOD_S):
            server.kill()
            kills += 1
            server.start()

    with DelayProxy(server.port, 0.005, damaged_share=0.02) as proxy:
        thread = threading.Thread(target=kill_and_restart)
        thread.start()
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            with all_drafts_verified(llm.engine):
                answers = llm.chat(asked, replace(params, speculation=f"remote:127.0.0.1:{proxy.port}"))
            rounds += 1
            wrong += sum(a.token_ids != p.token_ids for a, p in zip(answers, plain, strict=True))
            accepted += sum(answer.usage.accepted for answer in answers)
        ended.set()
        thread.join()
        damaged = proxy.damaged
    total = rounds * len(asked)
    return {"answers": total, "different": wrong, "accepted": accepted, "kills": kills, "damaged_pieces": damaged}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--draft-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--kind", default="all", help="of the shipped prompts")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--skip", type=int, default=0, help="so many prompts of the kind come first")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1, help="of every setting on every prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rtt", type=int, nargs="*", default=ROUND_TRIPS_MS, help="milliseconds")
    parser.add_argument("--local", action="store_true", help="also the draft model in the target's process")
    parser.add_argument("--named", action="store_true", help="requests name the drafter; else `auto` has it")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0, help="of faults")
    options = parser.parse_args()
    draft = options.draft if options.local else None
    with (
        draft_server(options.draft, options.draft_dtype, options.threads) as server,
        LLM(options.model, draft_model=draft, threads=options.threads, max_model_len=2048, quiet=True) as llm,
    ):
        result = faults(llm, server, options) if options.faults else speed(llm, server, options)
    print(json.dumps({"model": options.model, "draft": options.draft, **result}, indent=1))


if __name__ == "__main__":
    main()
