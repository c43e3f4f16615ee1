"""What sharing saves: branches of one prompt, a restart, rollout trees, an agent's turns, planning before tools; and
whether the cache itself is quick and right at size.

Everything runs in this process, one model at a time; what is compared takes turns.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.api import LLM, Prompt
from forerun.bench import agent_trace, cache_model, common, sharing_plan, sharing_restart, sharing_tree
from forerun.errors import BadRequest
from forerun.params import SamplingParams

PARTS = ("branches", "restart", "rollouts", "trace", "plan", "tree", "operations")
NEED_TEXT = ("rollouts", "trace", "plan")
GOALS = {"unshared": 6.0, "attention": 1.3, "rollouts": 1.5, "trace": 0.9}

QUICK: dict[str, Any] = {
    "prompt": 300, "branches": 4, "tokens": 8, "questions": 1, "budget": 600, "turns": 4, "tasks": 1, "nodes": 100,
    "tree_tokens": 50_000, "steps": 2000,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much of everything; the defaults are those the goals are set for."""

    parts: tuple[str, ...] = PARTS
    prompt: int = 2000
    branches: int = 16
    tokens: int = 128
    questions: int = 4
    budget: int = 2000  # tokens computed for a question
    turns: int | None = None  # None: the whole trace
    trace: Path | None = None
    tasks: int = len(sharing_plan.TASKS)
    nodes: int = 1000
    tree_tokens: int = 1_000_000
    steps: int = 100_000
    quick: bool = False  # small sizes, to see that everything runs: goals are not set for them

    @classmethod
    def small(cls, **given: Any) -> Sizes:
        """Sizes of a run that is quick; `given`: those of the caller's choice."""
        return cls(**{**QUICK, "quick": True, **given})

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise BadRequest(f"no part is called {part!r}", f"use some of {', '.join(PARTS)}")
        for name in ("prompt", "branches", "tokens", "questions", "budget", "tasks", "nodes", "tree_tokens", "steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadRequest(f"{name} is {value!r}, it must be a whole number of at least 1", f"raise {name}")


def run(setup: common.Setup, sizes: Sizes, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Every part asked for; each says whether its goal is reached."""
    wants_text = [part for part in sizes.parts if part in NEED_TEXT]
    if setup.shape is not None and wants_text:
        raise BadRequest(
            f"{', '.join(wants_text)} need a real model, {setup.name} answers token ids only",
            "use --parts branches,restart,tree,operations",
        )
    found: dict[str, Any] = {}
    if "tree" in sizes.parts:
        say("prefix tree")
        found["tree"] = sharing_tree.run(sizes.nodes, sizes.tree_tokens)
    if "operations" in sizes.parts:
        say("random operations")
        found["operations"] = cache_model.run(sizes.steps)
    if "branches" in sizes.parts:
        found["branches"] = branches(setup, sizes, say)
    if "restart" in sizes.parts:
        say("restart")
        ids = common.Prompts(replace(setup, data=None)).cut(sizes.prompt)
        found["restart"] = sharing_restart.run(functools.partial(_opened, setup), ids)
    if wants_text:
        with _opened(setup) as llm:
            if "rollouts" in sizes.parts:
                found["rollouts"] = rollouts(llm, setup, sizes, say)
            if "trace" in sizes.parts:
                found["trace"] = trace(llm, sizes, say)
            if "plan" in sizes.parts:
                say("plan before tools")
                found["plan"] = sharing_plan.run(llm, sizes.tasks)
    about = {"bench": "sharing", "model": setup.name, "weights": setup.weights, "device": setup.device}
    reached = {part: figures["goal"]["reached"] for part, figures in found.items() if "goal" in figures}
    return (
        about
        | {"runs": setup.runs, "quick": sizes.quick}
        | found
        | {"goals": reached, "hardware": common.hardware(setup.thread_count())}
    )


# -- branches ----------------------------------------------------------------------------------------------------------


def branches(setup: common.Setup, sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """Answers to one prompt: sharing everything, without shared-prefix attention, and as requests on their own."""
    prompts = common.Prompts(replace(setup, data=None))  # data are questions for rollouts
    context = sizes.prompt + sizes.tokens + 1
    prompts.check(context)
    pool = sizes.branches * (context + 32)
    clock = _Clock(setup.runs, say)
    warm = replace(sizes, branches=2, tokens=min(4, sizes.tokens))
    with _opened(setup, max_context=context, pool_tokens=pool, max_batch=sizes.branches, prefix_cache=False) as llm:
        for run in range(setup.runs + 1):
            ids = prompts.cut(sizes.prompt, skip=run * sizes.prompt)
            clock.take("independent", run, functools.partial(_at_once, llm, ids, sizes if run else warm, run))
            clock.take("one_by_one", run, functools.partial(_one_by_one, llm, ids, sizes if run else warm, run))
    computed = 0
    with _opened(setup, max_context=context, pool_tokens=pool, max_batch=sizes.branches) as llm:
        for run in range(setup.runs + 1):
            ids = prompts.cut(sizes.prompt, skip=run * sizes.prompt)
            for name, share in (("prefix_cache_only", False), ("shared", True)):
                llm.clear_cache()
                before = llm.stats().computed
                with _sharing(llm, share):
                    clock.take(name, run, functools.partial(_branched, llm, ids, sizes if run else warm, run))
                computed = llm.stats().computed - before
    return _branch_figures(sizes, clock.seconds, computed)


@dataclass
class _Clock:
    """Times what takes turns; run 0 is for warmth and does not count."""

    runs: int
    say: Callable[[str], None]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def take(self, name: str, run: int, go: Callable[[], None]) -> None:
        self.say(f"branches: {name}, " + (f"run {run} of {self.runs}" if run else "for warmth"))
        start = time.perf_counter()
        go()
        if run:
            self.seconds.setdefault(name, []).append(time.perf_counter() - start)


def _branch_figures(sizes: Sizes, seconds: dict[str, list[float]], computed: int) -> dict[str, Any]:
    """`computed`: prompt tokens that were run for all branches together."""
    figures = {name: common.spread(values) for name, values in seconds.items()}
    ratios = {name: figures[name]["median"] / figures["shared"]["median"] for name in figures if name != "shared"}
    once = computed < sizes.prompt + 32 * sizes.branches  # each branch may redo what lies on its last, partial page
    reached = ratios["independent"] >= GOALS["unshared"] and ratios["prefix_cache_only"] >= GOALS["attention"]
    return {
        "prompt_tokens": sizes.prompt,
        "branches": sizes.branches,
        "tokens": sizes.tokens,
        "seconds": figures,
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "computed_prompt_tokens": computed,
        "goal": {"unshared": GOALS["unshared"], "attention": GOALS["attention"], "reached": reached and once},
    }


def _params(sizes: Sizes, seed: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=sizes.tokens, ignore_eos=True, speculate="off", n=n)


def _branched(llm: LLM, ids: list[int], sizes: Sizes, run: int) -> None:
    llm.generate(ids, _params(sizes, 1000 * run, n=sizes.branches))


def _at_once(llm: LLM, ids: list[int], sizes: Sizes, run: int) -> None:
    prompts: list[Prompt] = [ids] * sizes.branches
    llm.generate(prompts, _params(sizes, 1000 * run))


def _one_by_one(llm: LLM, ids: list[int], sizes: Sizes, run: int) -> None:
    for branch in range(sizes.branches):
        llm.generate(ids, _params(sizes, 1000 * run + branch))


@contextmanager
def _sharing(llm: LLM, share: bool) -> Iterator[None]:
    """Shared-prefix attention on or off."""
    attention: Any = llm.decoder.attention
    before = attention.share_prefix
    attention.share_prefix = share
    try:
        yield
    finally:
        attention.share_prefix = before


# -- rollouts and the trace --------------------------------------------------------------------------------------------


def rollouts(llm: LLM, setup: common.Setup, sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """Distinct answers per 1,000 computed tokens: a tree beside independent sampling with the same budget."""
    from forerun.sharing.compare import Sampled, compare
    from forerun.sharing.rollout_config import RolloutConfig

    params = SamplingParams(temperature=0.8, max_tokens=max(8, min(160, sizes.budget // 8)))
    ways: dict[str, list[Sampled]] = {"tree": [], "independent": []}
    for number, text in enumerate(_questions(setup.data)[: sizes.questions], 1):
        say(f"rollouts: question {number} of {sizes.questions}")
        config = RolloutConfig(width=4, depth=4, token_budget=sizes.budget, params=params, seed=number)
        done = compare(llm, [{"role": "user", "content": text}], config)
        ways["tree"].append(done.tree)
        ways["independent"].append(done.independent)
    found: dict[str, Any] = {"questions": len(ways["tree"]), "budget": sizes.budget}
    for name, parts in ways.items():
        sums = {key: sum(getattr(part, key) for part in parts) for key in ("trajectories", "distinct", "tokens")}
        distance = sum(part.distance for part in parts) / len(parts)
        found[name] = sums | {
            "per_thousand": 1000 * sums["distinct"] / max(1, sums["tokens"]),
            "distance": round(distance, 4),
        }
    plain = found["independent"]["per_thousand"]
    gain = found["tree"]["per_thousand"] / plain if plain else math.inf
    found["gain"] = round(gain, 3) if plain else None
    return found | {"goal": {"gain": GOALS["rollouts"], "reached": gain >= GOALS["rollouts"]}}


def trace(llm: LLM, sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """The same conversation without guesses and with: the share of prompt tokens that was read from cache."""
    asked = agent_trace.read_trace(sizes.trace, sizes.turns)
    passes = {name: agent_trace.replay(llm, asked, name, say) for name in ("off", "auto")}
    shares = {name: done.cached_share for name, done in passes.items()}
    reached = min(shares.values()) >= GOALS["trace"] and round(shares["off"], 3) == round(shares["auto"], 3)
    return {
        "trace": asked.name,
        "speculation_off": passes["off"].record(),
        "speculation_auto": passes["auto"].record(),
        "goal": {"cached_share": GOALS["trace"], "reached": reached},
    }


def _questions(path: Path | None) -> list[str]:
    """GSM8K and the like: JSON lines with `question` or `prompt`; without a file the shipped questions."""
    from forerun import data

    if path is None:
        return [prompt.text for prompt in data.read_prompts() if prompt.kind in ("question", "reasoning", "math")]
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise BadRequest(f"cannot read {path}: {error}", "give a .jsonl file with a `question` on each line") from None
    found = [record.get("question") or record.get("prompt") for record in records if isinstance(record, dict)]
    texts = [text for text in found if isinstance(text, str) and text]
    if not texts or len(texts) < len(records):
        raise BadRequest(f"{path} has lines without a `question`", 'one a line: {"question": "..."}')
    return texts


@contextmanager
def _opened(setup: common.Setup, **more: Any) -> Iterator[LLM]:
    model: Any = setup.model
    if setup.shape is not None:
        from forerun.bench.shapes import RandomCheckpoint
        from forerun.models.build import choose_device

        model = RandomCheckpoint(setup.shape, choose_device(setup.device))
    with LLM(
        model, weights=setup.weights, device=setup.device, threads=setup.thread_count(), quiet=True, **more
    ) as llm:
        yield llm
