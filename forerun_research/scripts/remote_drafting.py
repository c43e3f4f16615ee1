"""A drafter in another process behind a delaying network: speed against plain and local drafting, bytes, and faults.

Target and draft server run in two processes with the given threads each; a proxy between them adds the round trip. For
every prompt the settings take turns, `--repeats` times; the median counts. `plain again` is plain decoding once more:
how far its prompts are from 1 is what the machine adds by itself. `local` is the same draft model in the process of the
target, with the same threads. `--faults` kills and restarts the server and damages its bytes under load instead, and
compares every answer with the plain one. `--draft-cores` pins the server to cores (`taskset` the target).
With the target on a GPU, `gpu` has the memory that opening it took, and each setting the GPU's busy time for a token.
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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from forerun import LLM, Completion, SamplingParams, data
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.serve.listening import listen
from forerun_research.bench.delay_proxy import DelayProxy
from forerun_research.studies.intervals import bootstrap

ROUND_TRIPS_MS = (0, 20, 50, 100)
KV_TOKENS = 16384  # the same for all runs: memory of a GPU is compared
FAULT_PERIOD_S = 4.0  # between kills of the server


class DraftServerProcess:
    """`forerun draft serve` on a port that stays the same when it is started again."""

    def __init__(self, model: str, dtype: str, threads: int, cores: str | None = None) -> None:
        with listen("127.0.0.1", 0) as sock:
            self.port = sock.getsockname()[1]
        self._command = ["taskset", "-c", cores] if cores else []
        self._command += [sys.executable, "-m", "forerun", "draft", "serve", "--model", model, "--dtype", dtype]
        self._command += ["--threads", str(threads), "--port", str(self.port), "--device", "cpu"]
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
def draft_server(model: str, dtype: str, threads: int, cores: str | None) -> Iterator[DraftServerProcess]:
    server = DraftServerProcess(model, dtype, threads, cores)
    try:
        yield server
    finally:
        server.kill()


def prompts(kind: str, count: int, skip: int = 0, every: int = 1) -> list[list[dict[str, str]]]:
    found = [p for p in data.read_prompts() if kind in ("all", p.kind)]
    return [[{"role": "user", "content": p.text}] for p in found[skip::every][:count]]


@dataclass(frozen=True)
class DraftSetting:
    """A drafter; a remote one is that of `auto`, as `draft_model="remote:..."` makes it, unless it is `named` by the
    request. `auto` has the opened draft model only where the setting is `local`."""

    llm: LLM
    drafter: str
    named: bool = False
    local: bool = False

    def chat(self, messages: Any, params: SamplingParams) -> Completion:
        ctx, pool = self.llm.engine.speculator.ctx, self.llm.engine.speculator.drafter_pool
        remote = self.drafter.startswith("remote:") and not self.named
        if self.drafter.startswith("remote:"):
            pool.prepare(SamplingParams(speculation=self.drafter))
        self.llm.engine.clear_cache()
        ctx.remote_drafters[:], draft = [self.drafter] * remote, ctx.draft
        ctx.draft = draft if self.local else None
        try:
            return self.llm.chat([messages], replace(params, speculation="auto" if remote else self.drafter))[0]
        finally:
            ctx.draft = draft

    def measure(self, messages: Any, params: SamplingParams) -> tuple[dict[str, Any], list[int]]:
        """Seconds a token, counts, and bytes on the wire of one answer; its tokens."""
        before = self._bytes()
        done = self.chat(messages, params)
        usage = done.usage
        own = usage.drafters.get(self.drafter)
        found = {
            "token_s": (usage.total_s - usage.ttft_s) / max(1, usage.completion_tokens - 1),
            "steps": usage.steps,
            "accepted": usage.accepted,
            "own_accepted": 0 if own is None else own.accepted,
            "bytes": self._bytes() - before,
        }
        return found, list(done.token_ids)

    def _bytes(self) -> int:
        moved = self.llm.engine.speculator.drafter_pool.figures().get(self.drafter, {})
        return int(moved.get("bytes_sent", 0) + moved.get("bytes_received", 0))


def speed(llm: LLM, server: DraftServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    """Lines of `--out` are kept: a later run adds its prompts to them."""
    params = SamplingParams(temperature=options.temperature, seed=1, max_tokens=options.tokens, ignore_eos=True)
    kept = options.out.read_text().splitlines() if options.out is not None and options.out.exists() else []
    rows = [json.loads(line) for line in kept]
    with contextlib.ExitStack() as stack:
        settings = {"plain": DraftSetting(llm, "off"), "plain again": DraftSetting(llm, "off")}
        if not options.named:
            settings["free drafters"] = DraftSetting(llm, "auto")
        if options.local:
            settings["local"] = DraftSetting(llm, "model" if options.named else "auto", options.named, local=True)
        for ms in options.rtt:  # a proxy without delay would take time itself
            port = stack.enter_context(DelayProxy(server.port, ms / 1000.0)).port if ms else server.port
            settings[f"remote {ms} ms"] = DraftSetting(llm, f"remote:127.0.0.1:{port}", options.named)
        asked = prompts(options.kind, options.prompts, options.skip, options.every)
        for setting in settings.values():  # for warmth: connections, the draft model's first forwards
            setting.chat(asked[0], replace(params, max_tokens=8))
        for number, messages in enumerate(asked, options.skip):
            rows.append(_measure_prompt(settings, messages, params, options, number))
            if options.out is not None:
                with options.out.open("a") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
        found = summarise(rows)
        if llm.engine.runner.decoder.device.type == "cuda":
            busy = {name: gpu_ms(setting, asked[0], params) for name, setting in settings.items()}
            held, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            found["gpu"] = {"memory_mb": round(most / 1e6), "held_mb": round(held / 1e6), "busy_ms_a_token": busy}
    return found


def gpu_ms(setting: DraftSetting, messages: Any, params: SamplingParams) -> float:
    """Time of the GPU's kernels for a token of one answer, after everything was timed: tracing takes time itself."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        done = setting.chat(messages, params)
    total_us = sum(event.self_device_time_total for event in traced.key_averages())
    return round(total_us / 1000.0 / max(1, done.usage.completion_tokens), 3)


def _measure_prompt(
    settings: dict[str, DraftSetting], messages: Any, params: SamplingParams, options: argparse.Namespace, number: int
) -> dict[str, Any]:
    """All settings on one prompt, in turns that begin with another one each time."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    answers: dict[str, list[int]] = {}
    for turn in range(number, number + options.repeats):
        order = list(settings)
        at = turn % len(order)
        for name in order[at:] + order[:at]:
            row, answers[name] = settings[name].measure(messages, params)
            found[name].append(row)
    equal = all(tokens == answers["plain"] for tokens in answers.values())
    return {"kind": options.kind, "prompt": number, "equal": equal, "settings": found}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By setting: speed against plain decoding (sums of the prompts' medians) with its interval over prompts."""
    names = list(dict.fromkeys(name for row in rows for name in row["settings"]))
    shown = {}
    for name in names:
        both = [row["settings"] for row in rows if name in row["settings"]]
        plain, own = ([median(run["token_s"] for run in s[key]) for s in both] for key in ("plain", name))
        sums = {key: sum(run[key] for s in both for run in s[name]) for key in ("steps", "own_accepted", "bytes")}
        ratios = [p / s for p, s in zip(plain, own, strict=True)]
        shown[name] = {
            "prompts": len(both),
            "against_plain": round(sum(plain) / sum(own), 3),
            "interval": [round(x, 3) for x in bootstrap([plain, own], lambda a, b: float(a.sum() / b.sum()))],
            "single_prompts": [round(min(ratios), 3), round(max(ratios), 3)],
            "tokens_per_s": round(len(own) / sum(own), 2),
            "accepted_of_it_a_step": round(sums["own_accepted"] / max(1, sums["steps"]), 3),
        }
        if sums["own_accepted"] and sums["bytes"]:
            shown[name]["bytes_per_accepted_token"] = round(sums["bytes"] / sums["own_accepted"], 1)
    if "local" in names and "remote 0 ms" in names:
        both = [row["settings"] for row in rows if {"local", "remote 0 ms"} <= row["settings"].keys()]
        local, remote = ([median(r["token_s"] for r in s[key]) for s in both] for key in ("local", "remote 0 ms"))
        low, high = bootstrap([local, remote], lambda a, b: float(a.sum() / b.sum()))
        shown["remote 0 ms"]["against_local"] = [round(x, 3) for x in (sum(local) / sum(remote), low, high)]
    return {"equal_answers": f"{sum(row['equal'] for row in rows)} of {len(rows)}", "settings": shown}


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
    parser.add_argument("--draft-threads", type=int, help="of the draft server, where it has others")
    parser.add_argument("--draft-cores", help="of the draft server, as taskset writes them: 8-15")
    parser.add_argument("--device", default="cpu", help="of the target; the draft server has the CPU")
    parser.add_argument("--kind", default="all", help="of the shipped prompts")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--skip", type=int, default=0, help="so many prompts of the kind come first")
    parser.add_argument("--every", type=int, default=1, help="of those, one in so many")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1, help="of every setting on every prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rtt", type=int, nargs="*", default=ROUND_TRIPS_MS, help="milliseconds")
    parser.add_argument("--local", action="store_true", help="also the draft model in the target's process")
    parser.add_argument("--out", type=Path, help="results, a line for each prompt; those there are counted in")
    parser.add_argument("--named", action="store_true", help="requests name the drafter; else `auto` has it")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0, help="of faults")
    options = parser.parse_args()
    draft = options.draft if options.local else None
    opened = {"threads": options.threads, "device": options.device, "max_model_len": 2048, "quiet": True}
    opened["kv_cache_tokens"] = KV_TOKENS
    with (
        draft_server(
            options.draft, options.draft_dtype, options.draft_threads or options.threads, options.draft_cores
        ) as server,
        LLM(options.model, draft_model=draft, **opened) as llm,
    ):
        result = faults(llm, server, options) if options.faults else speed(llm, server, options)
    print(json.dumps({"model": options.model, "draft": options.draft, **result}, indent=1))


if __name__ == "__main__":
    main()
