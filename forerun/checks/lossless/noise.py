"""Where two answers part: a tie or a bug? The gap between both tokens' logits is compared with the machine's noise.

Noise is measured, not assumed: the same logits are computed in several ways that plain decoding uses as well (alone, in
chunks, as the last few tokens, among other sequences), none of which knows drafts. What these ways disagree about is
rounding. Where they agree to the last bit, as int8 on a CPU does, any difference is a bug; so it is on CUDA where equal
bits are promised: prompts and answers run through different kernels there, but each token always through the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor

from forerun.decode.sampling import Context, Row, distribution, shape, uniform
from forerun.llm import LLM
from forerun.models.execution.runner import Runner, Span
from forerun.params import SamplingParams

TIE_NOISE_FACTOR = 4.0  # a few ways of computing see less than all of the noise: gaps up to this many times it are ties
MAX_TIE_SHARE = 0.05  # of the largest logit: no rounding explains more, however much the ways disagree
TAIL_TOKENS = (1, 2, 4, 8)
CHUNK_TOKENS = (16, 61)
MAX_NEIGHBOURS = 7  # sequences that run along
NEIGHBOUR_TOKENS = 48


@dataclass(frozen=True)
class AnswerDifference:
    """Where an answer leaves the plain one. Gap and noise: of logits where greedy, else of cumulative probability."""

    prompt: int
    position: int
    plain: int | None  # token ids; None: this answer had ended
    other: int | None
    plain_text: str
    other_text: str
    gap: float
    noise: float
    tie: bool

    @property
    def verdict(self) -> str:
        return "tie" if self.tie else "BUG"

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict, "factor": TIE_NOISE_FACTOR}


def compare(
    llm: LLM,
    number: int,
    prompts: list[list[int]],
    plain: list[int],
    other: list[int],
    params: SamplingParams,
    seed: int = 0,
) -> AnswerDifference | None:
    """None where both answers are the same. `prompts[number]` is whose answers they are, the others run beside it."""
    if plain == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    left, right = (answer[at] if at < len(answer) else None for answer in (plain, other))
    part = partial(AnswerDifference, number, at, left, right, _text(llm, left), _text(llm, right))
    if left is None or right is None:  # one is the beginning of the other: lengths are no rounding matter
        return part(0.0, 0.0, tie=False)
    ids = prompts[number] + plain[:at]
    beside = [p for i, p in enumerate(prompts) if i != number]
    rows = logits_in_all_ways(llm, ids, beside)
    context = Context(params, ids, len(prompts[number]), seed)
    measure = _margin if params.greedy else _shortfall
    gaps = [measure(row[None], context, left, right) for row in rows.values()]
    gap, noise = abs(gaps[0]), max(abs(g - gaps[0]) for g in gaps)
    limit = MAX_TIE_SHARE * float(rows["alone"].abs().max()) if params.greedy else MAX_TIE_SHARE
    tie = noise > 0.0 and gap <= min(TIE_NOISE_FACTOR * noise, limit) and not llm.engine.runner.equal_bits
    return part(gap, noise, tie)


def _text(llm: LLM, token: int | None) -> str:
    return "" if token is None else llm.tokenizer.decode([token], skip_special=False)


def _margin(logits: Tensor, context: Context, left: int, right: int) -> float:
    shaped = shape(logits, [Row(context)])[0]
    return float(shaped[left] - shaped[right])


def _shortfall(logits: Tensor, context: Context, left: int, right: int) -> float:
    """How far the number that was drawn is from drawing the other token, in cumulative probability."""
    probs = distribution(shape(logits, [Row(context)]), [context.params])[0].double()
    mass = probs.cumsum(0)
    number = uniform(context.seed, len(context.tokens)) * float(mass[-1])
    edge = mass[right - 1] if right > left else mass[right]
    return float(edge) - number


def logits_in_all_ways(llm: LLM, ids: list[int], beside: list[list[int]]) -> dict[str, Tensor]:
    """Logits [V] of what follows `ids`; the first is the plainest way."""
    engine, runner = llm.engine, llm.engine.runner
    engine.clear_cache()
    ways: dict[str, Callable[[], Tensor]] = {"alone": lambda: _tail(runner, ids, 1, [])}
    ways |= {f"chunks of {size}": lambda size=size: runner.score(ids, size)[-1] for size in CHUNK_TOKENS}  # type: ignore[misc]
    ways["in one"] = lambda: runner.score(ids, engine.config.max_num_batched_tokens)[-1]
    for size in (n for n in TAIL_TOKENS if n < len(ids)):
        ways[f"last {size} tokens"] = lambda size=size: _tail(runner, ids, size, [])  # type: ignore[misc]
    others = [p[:NEIGHBOUR_TOKENS] for p in beside if len(p) > 1][:MAX_NEIGHBOURS]
    if others:
        ways[f"beside {len(others)} others"] = lambda: _tail(runner, ids, 1, others)
        ways[f"last 4 tokens beside {len(others)} others"] = lambda: _tail(runner, ids, min(4, len(ids) - 1), others)
    return {name: way().float().cpu() for name, way in ways.items()}


def _tail(runner: Runner, ids: list[int], count: int, others: list[list[int]]) -> Tensor:
    """Logits after `ids`, whose last tokens run together in one forward, with the last token of each other sequence."""
    pool, spans = runner.pool, list[Span]()
    held: list[array[int]] = []
    count = max(1, min(count, len(ids)))
    try:
        for sequence, size in [(ids, count), *((other, 1) for other in others)]:
            if pool.pages_for(len(sequence)) > pool.free:
                break
            pages = array("i", pool.allocate(pool.pages_for(len(sequence))))
            held.append(pages)
            first = len(sequence) - size
            for at in range(0, first, 256):
                runner.forward([Span(sequence[at : min(first, at + 256)], at, pages, (), prompt=True)])
            spans.append(Span(sequence[first:], first, pages, (size - 1,)))
        return runner.forward(spans).logits[0].clone()
    finally:
        for pages in held:
            pool.release(pages)


def summary(total: int, differences: list[AnswerDifference]) -> str:
    ties = sum(d.tie for d in differences)
    parts = [f"{total - len(differences)} of {total} answers equal"]
    if ties:
        parts.append(f"{ties} part at a tie")
    if ties < len(differences):
        parts.append(f"{len(differences) - ties} differ: BUG")
    return "; ".join(parts)
