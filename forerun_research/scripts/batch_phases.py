"""Where the time of a batch goes: its prompts and its decoding apart, on the host and on the device.

    python -m forerun_research.scripts.batch_phases [--batches 16,64,256] [--shape 1.5b] [--profile] [--steps]

Random weights, 512 + 128 tokens. For each batch: tokens a second of three runs without speculation and with `auto`, the
seconds until the last first token, and the time of a step that only decodes. `--profile`: of further runs, how long the
device was busy in each phase, and the functions in which the host spent most of its time. `--steps`: each step with
prompts, in parts. `--check`: whether prompts that are launched ahead of the host have the answers of steps one by one.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import pstats
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from forerun.core import SamplingParams
from forerun.engine import engine as engine_module
from forerun.engine.engine import Engine
from forerun.llm import LLM
from forerun.models.execution.runner import Runner
from forerun_research.bench.shapes import SHAPES, RandomCheckpoint, random_ids

PROMPT_TOKENS, ANSWER_TOKENS, RUNS, SHOWN = 512, 128, 3, 25


@dataclass
class TimedStep:
    began: float  # seconds
    took: float
    prompt_tokens: int
    rows: int  # that decode
    parts: dict[str, float]
    gc_s: float  # in which Python searched for garbage


@dataclass
class Watch:
    """Times the steps of an engine. `clock`: of the time that counts."""

    engine: Engine
    clock: Callable[[], float]
    asked: int = 0
    began: float = 0.0  # by `clock`
    steps: list[TimedStep] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    on_decoding: Callable[[], None] = lambda: None  # called once, after the step with the last first token
    decoding_from: float = 0.0  # by `clock`
    decoding_from_ns: int = 0  # since 1970
    left: int = 0  # tokens of each answer after that step
    gc_s: float = 0.0

    def __post_init__(self) -> None:
        scheduler, runner = self.engine.scheduler, self.engine.runner
        scheduler.schedule = self._part("schedule", scheduler.schedule)  # type: ignore[method-assign]
        runner.forward = self._part("forward", runner.forward)  # type: ignore[method-assign]
        engine_module.verify = self._part("verify", engine_module.verify)
        self._step, self.engine.step = self.engine.step, self.step  # type: ignore[method-assign]
        gc.callbacks.append(self._collects)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        self.gc_s += -self.clock() if phase == "start" else self.clock()

    def begin(self, asked: int) -> None:
        self.asked, self.decoding_from, self.gc_s = asked, 0.0, 0.0
        self.steps.clear()

    def step(self) -> bool:
        self.parts, began, gc_s = {}, self.clock(), self.gc_s
        went = self._step()
        ended, work = self.clock(), self.engine.scheduler.work
        self.steps.append(TimedStep(began, ended - began, work.tokens, work.streams, self.parts, self.gc_s - gc_s))
        if not self.decoding_from and self._all_decode():
            self.decoding_from, self.decoding_from_ns = ended, time.time_ns()
            self.left = max(seq.params.max_tokens - seq.num_generated for seq in self.engine.scheduler.running)
            self.on_decoding()
        return went

    def _all_decode(self) -> bool:
        running = self.engine.scheduler.running
        return len(running) == self.asked and all(seq.num_generated > 0 for seq in running)

    def _part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        inside = False

        def timed(*args: Any, **options: Any) -> Any:
            nonlocal inside
            if inside:  # a forward in parts
                return function(*args, **options)
            inside, began = True, self.clock()
            try:
                return function(*args, **options)
            finally:
                inside = False
                self.parts[name] = self.parts.get(name, 0.0) + self.clock() - began

        return timed


@contextmanager
def without_profile(watch: Watch) -> Iterator[None]:
    try:
        yield
    finally:
        watch.on_decoding = lambda: None


def run(llm: LLM, watch: Watch, prompts: list[Any], params: SamplingParams) -> tuple[float, float, float]:
    """(all seconds, until the last first token, of one step of decoding), by the watch's clock."""
    llm.clear_cache()
    watch.begin(len(prompts))
    watch.began = began = watch.clock()
    llm.generate(prompts, params)
    ended = watch.clock()
    return ended - began, watch.decoding_from - began, (ended - watch.decoding_from) / watch.left


def show_steps(watch: Watch) -> None:
    for step in watch.steps:
        if step.prompt_tokens or step.began < watch.decoding_from:
            parts = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in step.parts.items())
            rest = 1e3 * (step.took - sum(step.parts.values()))
            at, took = 1e3 * (step.began - watch.began), 1e3 * step.took
            print(f"    at {at:7.1f} ms: {step.prompt_tokens:6} prompt tokens, {step.rows:3} rows: {took:6.1f} ms "
                  f"({parts}, rest {rest:.1f}; garbage {1e3 * step.gc_s:.1f})", flush=True)  # fmt: skip


def show_functions(name: str, profile: cProfile.Profile) -> None:
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime")
    stats.print_stats(SHOWN)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    print(f"  host functions, {name}:")
    print("\n".join(f"    {line}" for line in lines[1:]), flush=True)


def profile_host(llm: LLM, watch: Watch, prompts: list[Any], params: SamplingParams) -> None:
    """Python's own profiler makes calls dearer than they are: shares, no times."""
    first, later = cProfile.Profile(), cProfile.Profile()

    def change() -> None:
        first.disable()
        later.enable()

    with without_profile(watch):
        watch.on_decoding = change
        first.enable()
        try:
            run(llm, watch, prompts, params)
        finally:
            first.disable()
            later.disable()
    show_functions("prompts", first)
    show_functions("decoding", later)


def busy_s(spans: list[tuple[int, int]], first: int, end: int) -> float:
    """Seconds in which the device works between two times in nanoseconds."""
    busy, at = 0, first
    for start, stop in sorted(spans):
        start, stop = max(start, at), min(stop, end)
        if stop > start:
            busy, at = busy + stop - start, stop
    return busy / 1e9


def profile_device(llm: LLM, watch: Watch, prompts: list[Any], params: SamplingParams) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        before = time.time_ns()
        run(llm, watch, prompts, params)
        torch.cuda.synchronize()
        after = time.time_ns()
    results, cuda = profile.profiler.kineto_results, torch.autograd.DeviceType.CUDA  # type: ignore[union-attr]
    kernels = [e for e in results.events() if e.device_type() == cuda]
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in kernels]
    begun, ended = min(s for s, _ in spans), max(e for _, e in spans)
    cut, steps = watch.decoding_from_ns, watch.left
    prompts_s, step_ms = (cut - before) / 1e9, (after - cut) / 1e6 / steps
    print(f"  profiled: prompts {prompts_s:.3f} s, device busy {busy_s(spans, before, cut):.3f}; a step {step_ms:.3f} "
          f"ms, device {1e3 * busy_s(spans, cut, after) / steps:.3f}; first kernel {(begun - before) / 1e6:.1f} ms "
          f"after the start, last {(after - ended) / 1e6:.1f} before the end", flush=True)  # fmt: skip
    by_name: dict[str, list[int]] = {}
    for kernel in kernels:
        where = "prompts" if kernel.start_ns() < cut else "decoding"
        by_name.setdefault(f"{where:8} {kernel.name()[:70]}", []).append(kernel.duration_ns())
    for name, durations in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:16]:
        print(f"    {sum(durations) / 1e6:8.1f} ms in {len(durations):6} of {name}", flush=True)


def check(llm: LLM, vocab: int) -> None:
    """Answers where prompts are launched ahead of the host against those of steps one by one."""
    draw, scheduler = random.Random(1), llm.engine.scheduler
    prompts: list[Any] = [random_ids(vocab, draw.randrange(20, 600), i) for i in range(24)]
    whole, ahead = scheduler.max_num_batched_tokens, Runner.launches_prompts
    for sampling in ({}, {"temperature": 0.8, "seed": 7}):
        params = SamplingParams(max_tokens=24, ignore_eos=True, speculation="off", **sampling)  # type: ignore[arg-type]
        for scheduler.max_num_batched_tokens in (300, 1000, 5000):
            found = []
            for launches in (property(lambda runner: False), ahead):
                setattr(Runner, "launches_prompts", launches)  # noqa: B010
                llm.clear_cache()
                found.append([answer.token_ids for answer in llm.generate(prompts, params)])
            equal = sum(a == b for a, b in zip(*found, strict=True))
            print(f"steps of {scheduler.max_num_batched_tokens}, {sampling}: {equal} of 24 equal", flush=True)
    scheduler.max_num_batched_tokens = whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="16,64,256")
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--profiled", default="64,256", help="batches that are profiled")
    args = parser.parse_args()
    batches = [int(size) for size in args.batches.split(",")]
    most, device = max(batches), torch.device(args.device)
    tokens = PROMPT_TOKENS + ANSWER_TOKENS
    room = {"kv_cache_tokens": tokens * most * 5 // 4 // 16 * 16 + 64, "max_num_seqs": most, "max_model_len": tokens}
    began = time.perf_counter()
    with LLM(RandomCheckpoint(args.shape, device), device=args.device, quiet=True, **room) as llm:  # type: ignore[arg-type]
        print(f"opened in {time.perf_counter() - began:.1f} s", flush=True)
        if args.check:
            check(llm, SHAPES[args.shape].vocab_size)
        watch = Watch(llm.engine, time.perf_counter)
        for size in batches:
            prompts: list[Any] = [random_ids(SHAPES[args.shape].vocab_size, PROMPT_TOKENS, 97 * i) for i in range(size)]
            for speculation in ("off", "auto"):
                params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, speculation=speculation)
                for _ in range(RUNS + 1):
                    whole, first, step = run(llm, watch, prompts, params)
                    rate = ANSWER_TOKENS * size / whole
                    phases = f"all begun after {first:.3f} s, then {1e3 * step:.3f} ms a step"
                    print(f"{args.shape}, {size} requests, {speculation}: {rate:,.0f} tokens/s; {phases}; "
                          f"garbage {watch.gc_s:.3f} s", flush=True)  # fmt: skip
                if args.steps and speculation == "off":
                    show_steps(watch)
            if args.profile and str(size) in args.profiled.split(","):
                params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, speculation="off")
                profile_host(llm, watch, prompts, params)
                if device.type == "cuda":
                    profile_device(llm, watch, prompts, params)


if __name__ == "__main__":
    main()
