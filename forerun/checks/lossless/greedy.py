"""Greedy part of `forerun check lossless`: plain answers, against those of every drafter, alone and in a batch.

Tokens must be equal, and so must their probabilities, up to noise. Beside the drafters of the engine there is one that
knows the plain answers and drafts trees of right and wrong tokens from them: with any model, on any prompt, tokens are
accepted on side branches, and rejected after some were accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from forerun import data
from forerun.checks import Finding
from forerun.checks.lossless.forced_drafting import all_drafts_verified, registered_drafter
from forerun.checks.lossless.noise import AnswerDifference, compare, logits_in_all_ways, summary
from forerun.core import ROOT, Draft, Usage
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters import Drafter, DraftRequest, registered
from forerun.llm import LLM, Completion, Prompt
from forerun.params import Grammar, SamplingParams, Speculation

DRAFT_NODES = 12  # of a draft: enough for branches
PROBED_ANSWERS = 3  # answers at which the noise of probabilities is measured
# Of the noise at a few places, which is less than all of it: beyond, K/V is wrong though tokens agree.
MAX_DRIFT_FACTOR = 16.0
ANSWER_GRAMMAR = Grammar(
    "json_schema", '{"type": "object", "properties": {"answer": {"type": "string"}, "sure": {"type": "boolean"}}}'
)


class OracleDrafter(Drafter):
    """Drafts from the plain answers, wrong on purpose in turns: a wrong token first and the right one beside it, a
    right beginning that goes wrong, all tokens right."""

    name = "oracle"
    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # by prompt

    def __init__(self, ctx: DraftContext) -> None:
        self._vocab = ctx.runner.decoder.config.vocab_size

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        answer = self.answers.get(tuple(request.tokens[: request.context.num_prompt]), [])
        at, draft = len(request.tokens) - request.context.num_prompt, Draft()
        node, room = ROOT, min(request.max_nodes, 10)
        for depth, token in enumerate(answer[at : at + 4]):
            kind = (at + depth) % 4
            wrong = (token + 1 + kind) % self._vocab
            if kind in (1, 2) and len(draft) + 2 < room:  # a wrong token, and what would follow it
                # likelier than the right one, so that it is laid out first
                false = draft.add(wrong, node, 0.95, self.name)
                draft.add(token, false, 0.95, self.name)
            if kind == 3 and depth:  # right tokens end here
                break
            if len(draft) >= room:
                break
            node = draft.add(token, node, 0.7, self.name)
        if len(draft) < room and node != ROOT:
            draft.add((draft.tokens[node] + 7) % self._vocab, node, 0.5, self.name)
        return draft


@dataclass(frozen=True)
class PlainAnswers:
    """Prompts with their plain answers, each computed alone."""

    prompts: list[list[int]]
    plain: list[Completion]
    params: SamplingParams  # without speculation
    noise: float  # of the logarithm of a token's probability


def ask_plain(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> PlainAnswers:
    params = replace(params, speculation="off", logprobs=0)
    llm.clear_cache()
    plain = [llm.generate(ids, params)[0] for ids in prompts]
    return PlainAnswers(prompts, plain, params, _noise(llm, plain))


def _noise(llm: LLM, plain: list[Completion]) -> float:
    """How much ways of computing disagree about the probability of a token, at the ends of a few answers."""
    worst = 0.0
    for answer in plain[:PROBED_ANSWERS]:
        ids, beside = [*answer.prompt_ids, *answer.token_ids[:-1]], [p.prompt_ids for p in plain if p is not answer]
        for at in (len(answer.prompt_ids), len(ids)):
            token = answer.token_ids[at - len(answer.prompt_ids)]
            rows = logits_in_all_ways(llm, ids[:at], beside)
            found = [float(torch.log_softmax(row, -1)[token]) for row in rows.values()]
            worst = max(worst, max(found) - min(found))
    return worst


def choose_prompts(llm: LLM, count: int, limit: int) -> list[list[int]]:
    """Shipped prompts of every kind in turn, in the model's own format, cut to `limit` tokens."""
    kinds: dict[str, list[str]] = {}
    for prompt in data.read_prompts():
        kinds.setdefault(prompt.kind, []).append(prompt.text)
    rounds = max(map(len, kinds.values()))
    texts = [texts[i] for i in range(rounds) for texts in kinds.values() if i < len(texts)]
    chat = llm.tokenizer.has_chat_template
    chosen = []
    for i in range(count):
        text = texts[i % len(texts)] if i < len(texts) else f"{i}. {texts[i % len(texts)]}"
        ids = llm.encode([{"role": "user", "content": text}]) if chat else llm.encode(text)
        chosen.append(ids if len(ids) <= limit else [*ids[: limit // 2], *ids[len(ids) - limit + limit // 2 :]])
    return chosen


def check_greedy(
    llm: LLM, prompts: list[list[int]], tokens: int, on_progress: Callable[[str], None] = lambda text: None
) -> Iterator[Finding]:
    on_progress("greedy: plain answers, one by one")
    asked = ask_plain(llm, prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    batch = f"batch of {len(prompts)}"
    run = partial(_run, llm, on_progress=on_progress)
    yield run(asked, "off", f"plain, {batch}")
    yield run(asked, "auto", "auto, one by one", together=False)
    yield run(asked, "auto", f"auto, {batch}")
    for name in usable(llm):
        if name != "grammar":
            yield run(asked, name, f"{name}, {batch}", pays=True)
    OracleDrafter.answers = {tuple(answer.prompt_ids): answer.token_ids for answer in asked.plain}
    with registered_drafter(OracleDrafter, llm.engine):
        for together, how in ((False, "one by one"), (True, batch)):
            yield run(asked, OracleDrafter.name, f"right and wrong drafts, {how}", together, pays=True)
    on_progress("greedy: plain answers within a grammar")
    within = replace(asked.params, grammar=ANSWER_GRAMMAR, ignore_eos=False)
    shaped = ask_plain(llm, prompts[: max(2, len(prompts) // 2)], within)
    yield run(shaped, "auto", f"auto with a grammar, batch of {len(shaped.prompts)}", pays=True)


def usable(llm: LLM) -> list[str]:
    ctx = llm.engine.speculator.ctx
    return [name for name, kind in registered().items() if kind.problem(ctx) is None]


def _run(
    llm: LLM,
    asked: PlainAnswers,
    drafter: str,
    name: str,
    together: bool = True,
    *,
    on_progress: Callable[[str], None],
    pays: bool = False,
) -> Finding:
    on_progress(f"greedy: {name}")
    params = replace(asked.params, speculation=Speculation(drafter, nodes=DRAFT_NODES) if pays else drafter)
    llm.clear_cache()
    with ExitStack() as stack:
        if pays:
            stack.enter_context(all_drafts_verified(llm.engine))
        prompts: list[Prompt] = [*asked.prompts]
        answers = llm.generate(prompts, params) if together else [llm.generate(p, params)[0] for p in prompts]
    return _finding(llm, asked, name, answers, drafter)


def _finding(llm: LLM, asked: PlainAnswers, name: str, answers: list[Completion], drafter: str) -> Finding:
    found: list[AnswerDifference] = []
    usage, drift = Usage(), 0.0
    for number, (plain, answer) in enumerate(zip(asked.plain, answers, strict=True)):
        usage.add(answer.usage)
        drift = max(drift, _drift(plain, answer))
        difference = compare(llm, number, asked.prompts, plain.token_ids, answer.token_ids, asked.params)
        if difference is not None:
            found.append(difference)
    detail = summary(len(answers), found)
    drifted = drift > MAX_DRIFT_FACTOR * asked.noise
    detail += f"; probabilities of equal tokens {'drifted' if drifted else 'differ'} by up to {drift:.1g}"
    detail += f" (logarithm; noise {asked.noise:.1g}, allowed {MAX_DRIFT_FACTOR:g} times)" if drift else ""
    if drafter != "off":
        detail += f"; {usage.drafted} tokens drafted, {usage.accepted} accepted"
    figures: dict[str, Any] = {"drafted": usage.drafted, "accepted": usage.accepted, "answers": len(answers)}
    figures |= {"drift": drift, "noise": asked.noise, "drift_factor": MAX_DRIFT_FACTOR}
    passed = all(d.tie for d in found) and not drifted
    checked = drafter == "off" or usage.drafted > 0
    return Finding("greedy", name, passed, detail, checked, {**figures, "differences": [d.record() for d in found]})


def _drift(plain: Completion, other: Completion) -> float:
    """Largest difference in the logarithm of a token's probability, as far as both answers agree. A wrong entry of the
    cache shows here long before it changes a token."""
    pairs = zip(plain.choices[0].logprobs, other.choices[0].logprobs, strict=False)
    same = itertools.takewhile(lambda pair: pair[0].token_id == pair[1].token_id, pairs)
    return max((abs(a.logprob - b.logprob) for a, b in same), default=0.0)
