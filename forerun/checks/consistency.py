"""Does an answer depend on how it was computed? Greedy tokens of each prompt alone, against the same prompts in a
batch, with chunked prefill, from a warm prefix tree and after preemption.

Where two answers part, the logits at that point tell a rounding tie (both tokens score the same up to rounding) from a
bug. Knows only the public API and `engine.score`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from forerun import data
from forerun.checks import Finding
from forerun.core import SamplingParams
from forerun.llm import LLM, Completion, Prompt

PAGE_TOKENS = 16
# Logits this close, as a share of the largest, are equal up to rounding. On a CPU answers of int8 and of a file's own
# blocks never part at all, nor do those of bf16 on CUDA where one launch runs all layers: there a token gets the same
# bits however it is computed, so any difference is a bug.
TIE_TOLERANCE = {"float32": 1e-4, "fp16": 1e-4, "float16": 4e-3, "bf16": 3e-2, "int8": 0.0, "file": 0.0, "mixed": 1e-4}


@dataclass(frozen=True)
class SoloAnswers:
    """The prompts of a check and what each answers when it runs alone."""

    prompts: list[list[int]]
    alone: list[list[int]]
    params: SamplingParams


def check_model(
    model: str,
    *,
    weights: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    prompts: int = 16,
    tokens: int = 32,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Finding]:
    """Findings one by one as they are known; the model is loaded once for each engine setting. `on_progress` is called
    with what is being done."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)  # full length: enough steps to be preempted in

    def load(**options: int | bool) -> LLM:
        settings: dict[str, Any] = {"dtype": weights, "device": device, "threads": threads, **options}
        return LLM(model, max_num_seqs=prompts, quiet=True, batch_invariant=True, **settings)

    with load(enable_prefix_caching=False) as llm:
        asked = _prompts(llm, prompts)
        together: list[Prompt] = [*asked]
        on_progress("each prompt alone")
        solo = SoloAnswers(asked, [llm.generate(ids, params)[0].token_ids for ids in asked], params)
        on_progress("all prompts in a batch")
        yield _compare(llm, solo, f"batch of {prompts}", llm.generate(together, params))
    chunk = max(prompts, 2 * PAGE_TOKENS)
    on_progress("prompts in chunks")
    with load(enable_prefix_caching=False, max_num_batched_tokens=chunk) as llm:
        yield _compare(llm, solo, f"prefill in chunks of {chunk}", llm.generate(together, params))
    on_progress("prompts from the prefix tree")
    with load() as llm:
        yield _compare(llm, solo, "prefix tree, cold", llm.generate(together, params))
        warm = llm.generate(together, params)
        reused = sum(answer.usage.cached_tokens for answer in warm)
        yield _compare(llm, solo, "prefix tree, warm", warm, f"{reused} prompt tokens reused", happened=reused > 0)
    on_progress("prompts that are preempted")
    with load(enable_prefix_caching=False, **_tight(solo)) as llm:
        answers = llm.generate(together, params)
        preempted = sum(answer.usage.preemptions for answer in answers)
        yield _compare(llm, solo, "after preemption", answers, f"{preempted} preemptions", happened=preempted > 0)


def _prompts(llm: LLM, count: int) -> list[list[int]]:
    """Shipped prompts of different lengths: every other one starts with a piece of the handbook, so some overlap."""
    handbook = " ".join(data.text("documents/handbook.txt").split()[:150])
    prompts = data.read_prompts()
    texts = [prompts[i % len(prompts)].text for i in range(count)]
    return [llm.encode(f"{handbook}\n\n{text}" if i % 2 else text) for i, text in enumerate(texts)]


def _tight(solo: SoloAnswers) -> dict[str, int]:
    """All prompts start in one step and fit; their answers do not, so some are preempted."""
    prompts = sum(-(-len(ids) // PAGE_TOKENS) for ids in solo.prompts) + 1
    longest = max(map(len, solo.prompts)) + max(map(len, solo.alone))
    return {
        "kv_cache_tokens": max(prompts * PAGE_TOKENS, longest + PAGE_TOKENS),
        "max_num_batched_tokens": sum(map(len, solo.prompts)),
    }


def _compare(
    llm: LLM, solo: SoloAnswers, name: str, answers: list[Completion], note: str = "", happened: bool = True
) -> Finding:
    ties, wrong = 0, []
    for number, (ids, alone, answer) in enumerate(zip(solo.prompts, solo.alone, answers, strict=True)):
        if answer.token_ids != alone:
            if is_tie(llm, ids, alone, answer.token_ids):
                ties += 1
            else:
                wrong.append(number)
    parts = (
        f"{len(answers) - ties - len(wrong)} of {len(answers)} answers equal",
        f"{ties} part at a rounding tie" if ties else "",
        f"prompts {', '.join(map(str, wrong))} differ" if wrong else "",
        note,
    )
    return Finding("consistency", name, not wrong and happened, "; ".join(filter(None, parts)))


def is_tie(llm: LLM, ids: list[int], left: list[int], right: list[int]) -> bool:
    """Whether two answers part where both next tokens score the same, up to the rounding of the weights mode."""
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if at is None or llm.engine.runner.equal_bits:  # one is the beginning of the other: lengths are no rounding matter
        return False
    logits = llm.engine.score(ids + left[:at])[-1].float()  # [V]
    gap = float((logits[left[at]] - logits[right[at]]).abs())
    return gap <= TIE_TOLERANCE[llm.precision.name] * float(logits.abs().max())
