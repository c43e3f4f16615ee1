"""Sampled part of `forerun check lossless`, on the real model at a temperature above zero.

Under `match` the same seed must give the same tokens. Other verifiers are lossless in distribution: the first tokens of
many answers are compared with the model's own law, which `score` gives exactly. A test that fails is repeated with
twice the samples and other seeds, and only fails if the repetition does: probability alone would once in a million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from torch import Tensor

from forerun.checks import Finding
from forerun.checks.lossless.forced_drafting import all_drafts_verified, registered_drafter
from forerun.checks.lossless.noise import AnswerDifference, compare, summary
from forerun.checks.lossless.statistics import Cells, Fit, Tokens, cells, detectable, fit
from forerun.core import ROOT, Draft, Usage
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters import Drafter, DraftRequest, registered
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.decode.sampling import distribution
from forerun.decode.verifiers import LOSSLESS
from forerun.engine.sequence import Event, Request
from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.params import SamplingParams, Speculation

COMPARED_TOKENS = 3  # tokens of an answer whose law is compared: the first is never drafted, the others are
MAX_EXPANDED = 12  # beginnings whose next token is looked at one by one
SIGNIFICANCE, POWER = 0.001, 0.95
DRAFT_NODES = 6
WITH_MODELS = "rejection"  # the rule for drafters with a model: it shows a wrong claim about a draw most directly
MATCHED_SEEDS = 48  # seeds whose answers are compared token by token
MATCHED_TOKENS = 12


class SketchDrafter(Drafter):
    """Draws trees from a rough version of the model's own law, for verifiers that want drafts drawn at random, where
    there is no draft model. Not free: drafters that are free are not asked to draw."""

    name = "sketch"
    free = False
    can_sample = True
    laws: ClassVar[dict[Tokens, Tensor]] = {}

    def __init__(self, ctx: DraftContext) -> None: ...

    def time_round(self, tokens: int, context: int) -> float:
        return 1e-4

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        answer = tuple(request.tokens[request.context.num_prompt :])
        tree = TreeBuilder(replace(request, max_depth=min(request.max_depth, 2)), self.name)
        level = [ROOT]
        for _ in range(tree.request.max_depth):
            first = len(tree.draft)
            for node in level:
                path = tuple(tree.draft.tokens[i] for i in tree.draft.path(node))
                tree.add_sampled(node, rough(self.laws.get((*answer, *path), self.laws[()])))
            level = list(range(first, len(tree.draft)))
        return tree.draft


def rough(probs: Tensor) -> Tensor:
    """A law that is like another but wrong: flatter, and with its likeliest tokens in another order."""
    flat = probs.float() ** 0.7
    top = flat.topk(min(4, flat.numel()))
    flat[top.indices] = top.values.roll(1)
    return flat / flat.sum()


@dataclass(frozen=True)
class SampledCase:
    """What is sampled: a prompt with the exact law of its answers."""

    prompt: list[int]
    params: SamplingParams
    law: Cells
    samples: int


def check_sampled(
    llm: LLM,
    prompts: list[list[int]],
    temperature: float,
    samples: int,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Finding]:
    params = SamplingParams(temperature=temperature, max_tokens=MATCHED_TOKENS, ignore_eos=True, speculation="off")
    yield from _same_seeds(llm, prompts, params, on_progress)
    on_progress("sampled: the model's own law")
    prompt = prompts[0]
    law = cells(lambda beginning: _probs(llm, prompt, params, beginning), COMPARED_TOKENS, MAX_EXPANDED, samples)
    case = SampledCase(prompt, replace(params, max_tokens=COMPARED_TOKENS + DRAFT_NODES), law, samples)
    SketchDrafter.laws = law.expanded
    with registered_drafter(SketchDrafter, llm.engine), all_drafts_verified(llm.engine):
        rules = [name for name, make in LOSSLESS.items() if make().uses_proposals]
        pairs = [(SketchDrafter.name, rule) for rule in rules]
        pairs += [(name, WITH_MODELS) for name in _paid(llm) if name != SketchDrafter.name]
        for drafter, rule in pairs:
            on_progress(f"sampled: {drafter} with {rule}, {samples} answers")
            yield _fitted(llm, case, drafter, rule)


def _paid(llm: LLM) -> list[str]:
    """Drafters that run a model, and can here."""
    ctx = llm.engine.speculator.ctx
    return [name for name, kind in registered().items() if not kind.free and kind.problem(ctx) is None]


def _probs(llm: LLM, prompt: list[int], params: SamplingParams, beginning: Tokens) -> Tensor:
    logits = llm.engine.score([*prompt, *beginning])[-1:].float()
    return distribution(logits, [params])[0].cpu()


def _fitted(llm: LLM, case: SampledCase, drafter: str, verifier: str) -> Finding:
    params = replace(case.params, speculation=Speculation(drafter, nodes=DRAFT_NODES, verify=verifier))
    usage = Usage()
    first = fit(case.law, sample(llm, case.prompt, params, range(1, case.samples + 1), COMPARED_TOKENS, usage))
    seen = detectable(first.samples, first.cells, SIGNIFICANCE, POWER)
    detail = f"{first.samples} answers in {first.cells} cells, p = {first.p_value:.2g}"
    again: Fit | None = None
    if first.p_value < SIGNIFICANCE:
        seeds = range(case.samples + 1, 3 * case.samples + 1)
        again = fit(case.law, sample(llm, case.prompt, params, seeds, COMPARED_TOKENS, usage))
        detail += f"; again with {again.samples}: p = {again.p_value:.2g}"
    passed = again is None or again.p_value >= SIGNIFICANCE
    detail += f"; a distance of {seen:.3f} would show with probability {POWER:g} at significance {SIGNIFICANCE:g}"
    detail += f"; {usage.drafted} tokens drafted, {usage.accepted} accepted"
    found = {"first": asdict(first), "again": asdict(again) if again else None, "detectable_distance": seen}
    found |= {"significance": SIGNIFICANCE, "power": POWER, "drafted": usage.drafted, "accepted": usage.accepted}
    return Finding("sampled", f"{drafter}, {verifier}", passed, detail, usage.drafted > 0, found)


def _same_seeds(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, on_progress: Callable[[str], None]
) -> Iterator[Finding]:
    """Under `match`: each drafter that a user gets, all prompts in turn, a seed each."""
    seeds = range(1, MATCHED_SEEDS + 1)
    jobs = [(prompts[i % len(prompts)], replace(params, seed=seed)) for i, seed in enumerate(seeds)]
    on_progress("sampled: plain answers")
    plain = answers(llm, jobs)
    for drafter in ["auto", *_paid(llm)]:
        on_progress(f"sampled: {drafter}, the same seeds")
        llm.clear_cache()
        spec = Speculation(drafter, nodes=DRAFT_NODES)
        usage, found = Usage(), list[AnswerDifference]()
        with all_drafts_verified(llm.engine):
            drafted, together = [(ids, replace(p, speculation=spec)) for ids, p in jobs], sampled_together(llm)
            parts = [answers(llm, drafted[i : i + together], usage=usage) for i in range(0, len(jobs), together)]
            mine = [answer for part in parts for answer in part]
        for i, (a, b) in enumerate(zip(plain, mine, strict=True)):
            difference = compare(llm, i % len(prompts), prompts, a, b, params, seed=seeds[i])
            if difference is not None:
                found.append(difference)
        detail = f"the same {len(seeds)} seeds: {summary(len(plain), found)}"
        detail += f"; {usage.drafted} tokens drafted, {usage.accepted} accepted"
        figures = {"drafted": usage.drafted, "accepted": usage.accepted, "differences": [d.record() for d in found]}
        yield Finding("sampled", f"{drafter}, match", all(d.tie for d in found), detail, usage.drafted > 0, figures)


def sample(
    llm: LLM, prompt: list[int], params: SamplingParams, seeds: range, length: int, usage: Usage
) -> list[Tokens]:
    """The first tokens of one answer for each seed; answers are given up as soon as they have them."""
    llm.clear_cache()
    answers(llm, [(prompt, replace(params, max_tokens=1, speculation="off"))])  # so that all others share its pages
    jobs, together = [(prompt, replace(params, seed=seed)) for seed in seeds], sampled_together(llm)
    parts = [answers(llm, jobs[i : i + together], length, usage) for i in range(0, len(jobs), together)]
    return [tuple(answer[:length]) for part in parts for answer in part]


def sampled_together(llm: LLM) -> int:
    """Answers that run at once. On a device a step's drafts have to fit into one launch, or nothing would be drafted
    and so nothing checked."""
    rows = llm.engine.runner.most_rows(2)
    return max(1, min(llm.engine.config.max_num_seqs, rows // (DRAFT_NODES + 1)))


def answers(
    llm: LLM, jobs: list[tuple[list[int], SamplingParams]], length: int | None = None, usage: Usage | None = None
) -> list[list[int]]:
    """Run requests together on the engine itself: the public API waits for whole answers."""
    engine = llm.engine
    found: list[list[int]] = [[] for _ in jobs]
    failed: list[Exception] = []

    def sink(index: int, event: Event) -> None:
        found[index] += event.token_ids
        if event.error is not None:
            failed.append(event.error)
        if event.usage is not None and usage is not None:
            usage.add(event.usage)
        if event.finish_reason is None and length is not None and len(found[index]) >= length:
            engine.cancel(event.request_id)

    for index, (ids, params) in enumerate(jobs):
        engine.submit(Request(ids, params, sink=lambda event, index=index: sink(index, event)))  # type: ignore[misc]
    try:
        while not engine.idle:
            if not engine.step() and not engine.idle:
                raise ForerunError("the engine has requests but nothing to run", "report this")
    finally:
        engine.end_all()
    if failed:
        raise failed[0] if isinstance(failed[0], ForerunError) else ForerunError(str(failed[0]), "see the log")
    return found
