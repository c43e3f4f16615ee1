"""What a trained drafter is worth on this machine: tokens a round and tokens a second in the engine itself.

On prompts that training never saw, by kind of text, at two lengths of context, beside plain decoding and beside the
same draft model before training. Knows the public `LLM` only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun import data
from forerun.core import Usage
from forerun.llm import LLM
from forerun.params import SamplingParams, Speculation

ANSWER_TOKENS = 64
KINDS = ("question", "reasoning", "code", "rewrite")  # of the shipped prompts
TREE_NODES = 15  # verified in a round, where tokens a round are measured
FILLER = ("handbook.txt", "depot.py")  # shipped documents before the prompts
CONTEXT_LENGTHS = (512, 4096)  # tokens, prompt included, at which figures are taken
PROMPTS_PER_KIND = 2
MIN_GAIN = 1.05  # of tokens a second over plain decoding and over the untrained draft: less is not worth a file


@dataclass(frozen=True)
class DraftFigure:
    """Of one way to decode, on prompts of one kind after a context of about so many tokens."""

    kind: str
    context: int
    way: str  # plain, untrained (the draft as it was, or none), or the kind of drafter
    tokens_per_round: float  # accepted tokens and the target's own, where a draft of full depth is verified each step
    tokens_per_s: float  # as `auto` decodes, one request at a time


def held_out_prompts(llm: LLM, per_kind: int = PROMPTS_PER_KIND) -> dict[str, list[list[int]]]:
    """The shipped prompts by kind, in the model's own format."""
    kinds: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    for prompt in data.read_prompts():
        found = kinds.get(prompt.kind, [])
        if prompt.kind in KINDS and len(found) < per_kind:
            messages = [{"role": "user", "content": prompt.text}]
            found.append(llm.encode(messages) if llm.tokenizer.has_chat_template else llm.encode(prompt.text))
    return kinds


def at_context(llm: LLM, prompts: dict[str, list[list[int]]], tokens: int) -> dict[str, list[list[int]]]:
    """The same prompts behind unrelated text, the longest of them of so many tokens together."""
    room = max(0, tokens - max(len(ids) for found in prompts.values() for ids in found))
    text = llm.tokenizer.encode("\n\n".join(data.text(f"documents/{name}") for name in FILLER))
    filler = (text * (room // max(1, len(text)) + 1))[:room]
    return {kind: [[*filler, *ids] for ids in found] for kind, found in prompts.items()}


def run_figures(
    llm: LLM,
    way: str,
    drafter: str,
    depth: int,
    prompts: dict[str, list[list[int]]],
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[DraftFigure]:
    """Figures of an opened model; `drafter`: off, or the paid drafter whose rounds are counted."""
    figures = []
    auto = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, speculation="off" if drafter == "off" else "auto")
    first = next(iter(prompts.values()))[0]
    llm.generate([first], auto)  # what is compiled and timed at the first request
    for kind, found in prompts.items():
        on_progress(f"measuring: {way}, {kind}")
        usage, seconds, tokens = Usage(), 0.0, 0
        for ids in found:
            llm.generate([ids], max_tokens=1, speculation="off")  # the prompt's K/V is cached: decoding alone is timed
            llm.engine.speculator.drafter_pool.forget()  # drafters that remember answers would have met this one before
            start = time.perf_counter()
            answer = llm.generate([ids], auto)[0]
            seconds += time.perf_counter() - start
            tokens += len(answer.token_ids)
        rate, per_round = tokens / seconds, 1.0
        if drafter != "off":
            fixed = Speculation(drafter, nodes=max(TREE_NODES, depth), depth=depth)
            for ids in found:
                usage.add(llm.generate([ids], SamplingParams(max_tokens=ANSWER_TOKENS, speculation=fixed))[0].usage)
            per_round = 1.0 + sum(usage.lengths) / max(1, len(usage.lengths))
        context = sum(map(len, found)) // len(found)
        figures.append(DraftFigure(kind, context, way, round(per_round, 3), round(rate, 2)))
    return figures


def kept_at_length(figures: Sequence[DraftFigure], way: str) -> float | None:
    """Tokens a round at the longer context as a share of those at the shorter one; None with one length only."""
    own = [figure for figure in figures if figure.way == way]
    middle = sum(figure.context for figure in own) / max(1, len(own))
    short, long = ([f.tokens_per_round for f in own if (f.context > middle) == far] for far in (False, True))
    return (sum(long) / len(long)) / (sum(short) / len(short)) if short and long else None


def worth(figures: Sequence[DraftFigure], trained_way: str) -> tuple[bool, str]:
    """Whether the drafter pays here, and a sentence that says why."""

    def mean(way: str) -> float:
        rates = [figure.tokens_per_s for figure in figures if figure.way == way]
        return len(rates) / sum(1.0 / rate for rate in rates) if rates else 0.0

    plain, untrained, trained = (mean(way) for way in ("plain", "untrained", trained_way))
    told = f"{trained / plain:.2f} times plain decoding"
    told += f", {trained / untrained:.2f} times without training" if untrained else ""
    kept = kept_at_length(figures, trained_way)
    told += "" if kept is None else f", {kept:.2f} of its tokens a round at the longer context"
    pays = trained >= MIN_GAIN * max(plain, untrained)
    return pays, f"{'worth using here' if pays else 'not worth using here'}: {told} (over all prompts)"
