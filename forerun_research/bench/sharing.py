"""What sharing saves: branches of one prompt, a restart, rollout trees, an agent's turns, planning before tools; and
whether the cache itself is quick and right at size.

Everything runs in this process, one model at a time; what is compared takes turns.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.params import SamplingParams
from forerun_research.bench import (
    agent_trace,
    cache_model,
    common,
    sharing_branches,
    sharing_plan,
    sharing_restart,
    sharing_tree,
)

PARTS = ("branches", "restart", "rollouts", "trace", "plan", "tree", "operations")
NEED_TEXT = ("rollouts", "trace", "plan")
GOALS = {"rollouts": 1.5, "trace": 0.9}

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


def run(setup: common.Setup, sizes: Sizes, on_progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Every part asked for; each says whether its goal is reached."""
    wants_text = [part for part in sizes.parts if part in NEED_TEXT]
    if setup.shape is not None and wants_text:
        raise BadRequest(
            f"{', '.join(wants_text)} need a real model, {setup.name} answers token ids only",
            "use --parts branches,restart,tree,operations",
        )
    found: dict[str, Any] = {}
    if "tree" in sizes.parts:
        on_progress("prefix tree")
        found["tree"] = sharing_tree.run(sizes.nodes, sizes.tree_tokens)
    if "operations" in sizes.parts:
        on_progress("random operations")
        found["operations"] = cache_model.run(sizes.steps)
    if "branches" in sizes.parts:
        found["branches"] = sharing_branches.run(functools.partial(_opened, setup), setup, sizes, on_progress)
    if "restart" in sizes.parts:
        on_progress("restart")
        ids = common.Prompts(replace(setup, data=None)).cut(sizes.prompt)
        found["restart"] = sharing_restart.run(functools.partial(_opened, setup), ids)
    if wants_text:
        with _opened(setup) as llm:
            if "rollouts" in sizes.parts:
                found["rollouts"] = rollouts(llm, setup, sizes, on_progress)
            if "trace" in sizes.parts:
                found["trace"] = trace(llm, sizes, on_progress)
            if "plan" in sizes.parts:
                on_progress("plan before tools")
                found["plan"] = sharing_plan.run(llm, sizes.tasks)
    about = {"bench": "sharing", "model": setup.name, "weights": setup.weights, "device": setup.device}
    reached = {
        part + name.removeprefix("reached"): mark
        for part, figures in found.items()
        for name, mark in figures.get("goal", {}).items()
        if name.startswith("reached")  # a part that is measured in several ways has a mark for each
    }
    return (
        about
        | {"runs": setup.runs, "quick": sizes.quick}
        | found
        | {"goals": reached, "hardware": common.hardware(setup.thread_count())}
    )


# -- rollouts and the trace --------------------------------------------------------------------------------------------


def rollouts(llm: LLM, setup: common.Setup, sizes: Sizes, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Distinct answers per 1,000 computed tokens: a tree beside independent sampling with the same budget."""
    from forerun.recipes.compare import Sampled, compare
    from forerun.sharing.rollout_config import RolloutConfig

    params = SamplingParams(temperature=0.8, max_tokens=max(8, min(160, sizes.budget // 8)))
    ways: dict[str, list[Sampled]] = {"tree": [], "independent": []}
    for number, text in enumerate(_questions(setup.data)[: sizes.questions], 1):
        on_progress(f"rollouts: question {number} of {sizes.questions}")
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


def trace(llm: LLM, sizes: Sizes, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """The same conversation without guesses and with: the share of prompt tokens that was read from cache."""
    asked = agent_trace.read_trace(sizes.trace, sizes.turns)
    passes = {name: agent_trace.replay(llm, asked, name, on_progress) for name in ("off", "auto")}
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
        from forerun.models.build import choose_device
        from forerun_research.bench.shapes import RandomCheckpoint

        model = RandomCheckpoint(setup.shape, choose_device(setup.device))
    with LLM(model, dtype=setup.weights, device=setup.device, threads=setup.thread_count(), quiet=True, **more) as llm:
        yield llm
