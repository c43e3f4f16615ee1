"""What `forerun bench speculate` measures (`SpeculateBench`) and its tasks as token ids of one model (`BenchPrompts`).

Runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.core import SamplingParams, Speculation
from forerun.errors import BadRequest
from forerun.text.tokenizer import Tokenizer
from forerun_research.bench.common import Setup
from forerun_research.bench.speedups import AUTO, PLAIN
from forerun_research.bench.tasks import BenchTask, mixed, read_tasks, select


@dataclass(frozen=True)
class SpeculateBench:
    """What is asked and measured, beside the model."""

    draft: str | None = None
    data: tuple[Path, ...] = ()
    tokens: int = 128
    per_category: int = 2
    categories: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()  # none: auto and those that can do something
    batches: tuple[int, ...] = ()
    temperature: float = 0.0
    rules: tuple[str, ...] = ()  # verifiers to compare, NAME or NAME:BOUND
    out: Path | None = None

    def __post_init__(self) -> None:
        if PLAIN in self.settings:
            raise BadRequest("plain decoding is always measured", f"leave {PLAIN!r} out of --drafters")
        if len(set(self.settings)) < len(self.settings):
            raise BadRequest(f"--drafters names one twice: {', '.join(self.settings)}", "name each once")
        if self.rules and not self.temperature:
            raise BadRequest("greedy answers are accepted alike by every rule of --verify", "add --temperature 0.8")
        if self.rules and self.draft is None:
            raise BadRequest("--verify compares rules on drafts that a model draws", "add --draft-model MODEL")
        if self.batches and min(self.batches) < 1:
            raise BadRequest(f"--batch has {min(self.batches)}", "give numbers of requests from 1 on")
        for rule in self.rules:
            parse_rule(rule)
        for name in ("off", *self.settings):
            self.params(name)

    @property
    def settings(self) -> tuple[str, ...]:
        models = () if self.draft is None else ("model",)
        return self.drafters or (AUTO, *models, "lookup", "suffix", "copy")

    @property
    def most(self) -> int:
        """Requests at once."""
        return max(self.batches, default=1)

    def params(self, speculate: Speculation | str, seed: int = 0) -> SamplingParams:
        return SamplingParams(max_tokens=self.tokens, temperature=self.temperature, seed=seed, speculation=speculate)


def parse_rule(text: str) -> Speculation:
    """NAME or NAME:BOUND, drafts by the draft model."""
    name, _, bound = text.partition(":")
    try:
        value = float(bound or 0)
    except ValueError:
        raise BadRequest(f"--verify has {text!r}: {bound!r} is no number", "write NAME or NAME:BOUND") from None
    return Speculation("model", verify=name, bound=value)


@dataclass(frozen=True)
class BenchPrompt:
    """A task as a model gets it."""

    task: BenchTask
    number: int  # seeds its sampling
    ids: list[int]
    two_turns: int  # tokens of its first two turns, with room for what a template puts around them


@dataclass(frozen=True)
class BenchPrompts:
    """All that is asked of a model."""

    asked: list[BenchPrompt]
    crowd: list[list[int]]  # prompts for batches, as different from each other as the data allows
    context: int  # holds the longest task with two answers, if the model can

    @property
    def mixed(self) -> list[BenchPrompt]:
        """Categories taking turns."""
        found = {a.task: a for a in self.asked}
        return [found[task] for task in mixed(list(found))]


def prepare(setup: Setup, plan: SpeculateBench) -> BenchPrompts:
    from forerun.models.fetch.store import resolve
    from forerun.models.formats.checkpoint import open_checkpoint

    everything = read_tasks(plan.data)
    tasks = select(everything, plan.per_category, plan.categories)
    checkpoint = open_checkpoint(resolve(setup.model))
    tokenizer, limit = checkpoint.tokenizer(), checkpoint.config.max_context
    asked = [_asked(task, i, tokenizer) for i, task in enumerate(tasks)]
    longest = max(asked, key=lambda a: len(a.ids))
    if len(longest.ids) + plan.tokens > limit:
        raise BadRequest(
            f"task {longest.task.id} ({longest.task.category}) has {len(longest.ids)} tokens and --tokens is "
            f"{plan.tokens}, the model's context holds {limit}",
            "lower --tokens, or leave that category out with --categories",
        )
    context = min(limit, max(a.two_turns for a in asked) + 2 * plan.tokens)
    wanted = plan.most if plan.batches else 0
    candidates = mixed(select(everything, len(everything), plan.categories))
    return BenchPrompts(asked, _crowd(candidates, tokenizer, wanted, context - plan.tokens), context)


def _asked(task: BenchTask, number: int, tokenizer: Tokenizer) -> BenchPrompt:
    ids = task.ids(tokenizer)
    return BenchPrompt(task, number, ids, len(ids) + len(tokenizer.encode(task.follow_up)) + 64)


def _crowd(tasks: list[BenchTask], tokenizer: Tokenizer, count: int, longest: int) -> list[list[int]]:
    """`count` different prompts of at most `longest` tokens; past the end of the data they are numbered anew."""
    found: list[list[int]] = []
    for turn in range(count):
        for task in tasks:
            if len(found) == count:
                return found
            text = f"({turn}) {task.turns[0]}" if turn else task.turns[0]
            ids = task.ids(tokenizer, text)
            if len(ids) <= longest:
                found.append(ids)
    if len(found) < count:
        raise BadRequest(f"only {len(found)} of {count} prompts for --batch fit into the context", "lower --tokens")
    return found
