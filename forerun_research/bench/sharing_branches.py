"""Branches of one prompt: sharing everything, without shared-prefix attention, and as requests on their own.

Where bits that do not depend on the batch cost something (int8 weights on a CPU), sharing is also measured with
`batch_invariant=False`. Requests on their own always run as `LLM` does by default.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from forerun.llm import LLM, Prompt
from forerun.params import SamplingParams
from forerun_research.bench import common

if TYPE_CHECKING:
    from forerun_research.bench.sharing import Sizes

GOALS = {"unshared": 6.0, "attention": 1.3}
SHARED, UNSHARED = "shared", "prefix_cache_only"
LOOSE = "_not_batch_invariant"  # ends the names of what ran without that promise


def run(
    opened: Callable[..., AbstractContextManager[LLM]],
    setup: common.Setup,
    sizes: Sizes,
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """`opened`: opens the model with these options of `LLM`."""
    prompts = common.Prompts(replace(setup, data=None))  # data are questions for rollouts
    context = sizes.prompt + sizes.tokens + 1
    prompts.check(context)
    pool = sizes.branches * (context + 32)
    options = {"max_model_len": context, "kv_cache_tokens": pool, "max_num_seqs": sizes.branches}
    warm = replace(sizes, branches=min(2, sizes.branches), tokens=min(4, sizes.tokens))
    clock = _Clock(setup.runs, on_progress)
    turns = [
        (run, prompts.cut(sizes.prompt, skip=run * sizes.prompt), sizes if run else warm)
        for run in range(setup.runs + 1)
    ]
    with opened(**options, enable_prefix_caching=False) as llm:
        for run, ids, size in turns:
            clock.take("independent", run, functools.partial(_at_once, llm, ids, size, run))
            clock.take("one_by_one", run, functools.partial(_one_by_one, llm, ids, size, run))
    with opened(**options) as llm:
        invariant = getattr(llm.decoder.attention, "same_bits", False)
        computed = _sharing_turns(llm, turns, clock, "")
    if invariant:
        with opened(**options, batch_invariant=False) as llm:
            computed = max(computed, _sharing_turns(llm, turns, clock, LOOSE))
    return figures(sizes, clock.seconds, computed)


@dataclass
class _Clock:
    """Times what takes turns; run 0 is for warmth and does not count."""

    runs: int
    on_progress: Callable[[str], None]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def take(self, name: str, run: int, go: Callable[[], None]) -> None:
        self.on_progress(f"branches: {name}, " + (f"run {run} of {self.runs}" if run else "for warmth"))
        start = time.perf_counter()
        go()
        if run:
            self.seconds.setdefault(name, []).append(time.perf_counter() - start)


def _sharing_turns(llm: LLM, turns: list[tuple[int, list[int], Sizes]], clock: _Clock, ends: str) -> int:
    """Branches without and with shared-prefix attention; the prompt tokens computed for those of the last turn."""
    computed = 0
    for run, ids, size in turns:
        for name, share in ((UNSHARED, False), (SHARED, True)):
            llm.clear_cache()
            before = llm.stats().computed
            with sharing(llm, share):
                clock.take(name + ends, run, functools.partial(_branched, llm, ids, size, run))
            computed = llm.stats().computed - before
    return computed


def figures(sizes: Sizes, seconds: dict[str, list[float]], computed: int) -> dict[str, Any]:
    """`computed`: prompt tokens that were run for all branches together.

    Ratios say how many times longer than shared branches the others took: each way of sharing beside itself without
    shared-prefix attention, and beside the same requests on their own.
    """
    times = {name: common.spread(values) for name, values in seconds.items()}
    once = computed < sizes.prompt + 32 * sizes.branches  # each branch may redo what lies on its last, partial page
    ratios, reached = {}, {}
    for ends in [name.removeprefix(SHARED) for name in times if name.startswith(SHARED)]:
        shared = times[SHARED + ends]["median"]
        for name, base in ((UNSHARED, UNSHARED + ends), ("independent",) * 2, ("one_by_one",) * 2):
            ratios[name + ends] = round(times[base]["median"] / shared, 3)
        reached["reached" + ends] = (
            once and ratios["independent" + ends] >= GOALS["unshared"] and ratios[UNSHARED + ends] >= GOALS["attention"]
        )
    return {
        "prompt_tokens": sizes.prompt,
        "branches": sizes.branches,
        "tokens": sizes.tokens,
        "seconds": times,
        "ratios": ratios,
        "computed_prompt_tokens": computed,
        "goal": GOALS | reached,
    }


def _params(sizes: Sizes, seed: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=sizes.tokens, ignore_eos=True, speculation="off", n=n)


def _branched(llm: LLM, ids: list[int], sizes: Sizes, run: int) -> None:
    llm.generate(ids, _params(sizes, 1000 * run, n=sizes.branches))


def _at_once(llm: LLM, ids: list[int], sizes: Sizes, run: int) -> None:
    prompts: list[Prompt] = [ids] * sizes.branches
    llm.generate(prompts, _params(sizes, 1000 * run))


def _one_by_one(llm: LLM, ids: list[int], sizes: Sizes, run: int) -> None:
    for branch in range(sizes.branches):
        llm.generate(ids, _params(sizes, 1000 * run + branch))


@contextmanager
def sharing(llm: LLM, share: bool) -> Iterator[None]:
    """Shared-prefix attention on or off."""
    attention: Any = llm.decoder.attention
    before = attention.share_prefix
    attention.share_prefix = share
    try:
        yield
    finally:
        attention.share_prefix = before
