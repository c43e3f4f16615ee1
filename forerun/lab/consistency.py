"""Does an answer depend on how it was computed? Greedy tokens of each prompt alone, against the same prompts in a
batch, with chunked prefill, from a warm prefix tree and after preemption.

Where two answers part, the logits at that point tell a rounding tie (both tokens score the same up to rounding) from a
bug. Knows only the public API and `engine.score`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from forerun import data
from forerun.api import LLM, Completion, Prompt
from forerun.core import SamplingParams

PAGE = 16
TIE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the largest logit, by activation dtype


@dataclass(frozen=True)
class Finding:
    """One way of computing, compared with every prompt alone."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Case:
    """The prompts of a check and what each answers when it runs alone."""

    prompts: list[list[int]]
    alone: list[list[int]]
    params: SamplingParams


def check_model(
    model: str, *, weights: str = "auto", device: str = "auto", prompts: int = 16, tokens: int = 32
) -> Iterator[Finding]:
    """Findings one by one as they are known; the model is loaded once for each engine setting."""
    params = SamplingParams(max_tokens=tokens)

    def load(**options: int | bool) -> LLM:
        return LLM(model, weights=weights, device=device, max_batch=prompts, quiet=True, **options)  # type: ignore[arg-type]

    with load(prefix_cache=False) as llm:
        asked = _prompts(llm, prompts)
        together: list[Prompt] = [*asked]
        case = Case(asked, [llm.generate(ids, params)[0].token_ids for ids in asked], params)
        yield _compare(llm, case, f"batch of {prompts}", llm.generate(together, params))
    with load(prefix_cache=False, chunk_tokens=max(prompts, 2 * PAGE)) as llm:
        yield _compare(llm, case, f"prefill in chunks of {max(prompts, 2 * PAGE)}", llm.generate(together, params))
    with load() as llm:
        yield _compare(llm, case, "prefix tree, cold", llm.generate(together, params))
        warm = llm.generate(together, params)
        reused = sum(answer.usage.cached_tokens for answer in warm)
        yield _compare(llm, case, "prefix tree, warm", warm, f"{reused} prompt tokens reused", happened=reused > 0)
    with load(pool_tokens=_tight_pool(case)) as llm:
        answers = llm.generate(together, params)
        preempted = sum(answer.usage.preemptions for answer in answers)
        yield _compare(llm, case, "after preemption", answers, f"{preempted} preemptions", happened=preempted > 0)


def _prompts(llm: LLM, count: int) -> list[list[int]]:
    """Shipped prompts of different lengths: every other one starts with a piece of the handbook, so some overlap."""
    handbook = " ".join(data.text("documents/handbook.txt").split()[:150])
    prompts = data.read_prompts()
    texts = [prompts[i % len(prompts)].text for i in range(count)]
    return [llm.encode(f"{handbook}\n\n{text}" if i % 2 else text) for i, text in enumerate(texts)]


def _tight_pool(case: Case) -> int:
    """All prompts fit, their answers do not: somebody must give way."""

    def pages(tokens: int) -> int:
        return -(-tokens // PAGE)

    prompts = sum(pages(len(ids) + 1) for ids in case.prompts)
    answers = sum(pages(len(i) + len(a)) for i, a in zip(case.prompts, case.alone, strict=True))
    longest = max(pages(len(i) + len(a)) for i, a in zip(case.prompts, case.alone, strict=True)) + 1
    return max(longest, (prompts + answers) // 2) * PAGE


def _compare(
    llm: LLM, case: Case, name: str, answers: list[Completion], note: str = "", happened: bool = True
) -> Finding:
    ties, wrong = 0, []
    for number, (ids, alone, answer) in enumerate(zip(case.prompts, case.alone, answers, strict=True)):
        if answer.token_ids != alone:
            if is_tie(llm, ids, alone, answer.token_ids):
                ties += 1
            else:
                wrong.append(number)
    parts = [f"{len(answers) - ties - len(wrong)} of {len(answers)} answers equal"]
    if ties:
        parts.append(f"{ties} part at a rounding tie")
    if wrong:
        parts.append(f"prompts {', '.join(map(str, wrong))} differ")
    if note:
        parts.append(note)
    return Finding(name, not wrong and happened, "; ".join(parts))


def is_tie(llm: LLM, ids: list[int], left: list[int], right: list[int]) -> bool:
    """Whether two answers part where both next tokens score the same, up to the rounding of the model's dtype."""
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if at is None:  # one is the beginning of the other: lengths are no rounding matter
        return False
    logits = llm.engine.score(ids + left[:at])[-1].float()  # [V]
    gap = float((logits[left[at]] - logits[right[at]]).abs())
    return gap <= TIE[llm.precision.dtype] * float(logits.abs().max())
