"""From one forward's logits to verdicts: every sequence's rows go to the verifier it asked for.

Sequences that follow the target's own draws (`match`, and whoever drafted nothing) are walked together, a token at a
time, so that a batch costs as many sampling calls as its longest accepted path. Knows no drafter and no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core import ROOT, Draft, TokenLogprob, Verdict
from forerun.decode.sampling import Context, logprob
from forerun.decode.target import SeededRng, Target, draw_all
from forerun.decode.verifiers.base import Verifier
from forerun.decode.verifiers.match import Match
from forerun.errors import ForerunError
from forerun.models.decoder import Output


@dataclass
class VerifyInput:
    """A sequence whose next tokens are to be settled."""

    context: Context
    draft: Draft
    verifier: Verifier


@dataclass
class StepOutput:
    """The new tokens of a sequence: the accepted path, then one drawn by the target."""

    verdict: Verdict
    tokens: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: ForerunError | None = None  # a grammar at a dead end: there is no next token


def verify(output: Output, cases: list[VerifyInput]) -> list[StepOutput]:
    """`output` has 1 + nodes rows for each case, in order. One case's failure is no other's."""
    try:
        return _verify(output, cases)
    except ForerunError as error:
        if len(cases) == 1:
            return [StepOutput(Verdict([], -1), [], error=error)]
    rulings, at = [], 0
    for case in cases:
        rows = slice(at, at + 1 + len(case.draft))
        greedy = None if output.greedy is None else output.greedy[rows]
        rulings += verify(Output(output.logits[rows], greedy), [case])
        at = rows.stop
    return rulings


def _verify(output: Output, cases: list[VerifyInput]) -> list[StepOutput]:
    greedy: list[int] | None = None
    if any(case.context.plain for case in cases):
        greedy = (output.logits.argmax(-1) if output.greedy is None else output.greedy).tolist()
    targets, at = [], 0
    for case in cases:
        rows = slice(at, at + 1 + len(case.draft))
        known = greedy[rows] if greedy is not None else None
        targets.append(Target(output.logits[rows], case.context, case.draft, known))
        at = rows.stop
    verdicts = _follow([i for i, case in enumerate(cases) if _matches(case)], cases, targets)
    for i, case in enumerate(cases):
        if i not in verdicts:
            rng = SeededRng(case.context.seed, len(case.context.tokens))
            verdicts[i] = case.verifier.verify(case.draft, targets[i], rng)
    return [_step_output(targets[i], verdicts[i]) for i in range(len(cases))]


def _matches(case: VerifyInput) -> bool:
    return not len(case.draft) or isinstance(case.verifier, Match)


def _follow(rows: list[int], cases: list[VerifyInput], targets: list[Target]) -> dict[int, Verdict]:
    """`Match.verify` of many sequences at once."""
    verdicts: dict[int, Verdict] = {}
    children = {i: cases[i].draft.children() for i in rows}
    paths: dict[int, list[int]] = {i: [] for i in rows}
    while rows:
        nodes = [paths[i][-1] if paths[i] else ROOT for i in rows]
        open_rows = []
        for i, node, token in zip(rows, nodes, draw_all([targets[i] for i in rows], nodes), strict=True):
            tokens = cases[i].draft.tokens
            child = next((c for c in children[i].get(node, ()) if tokens[c] == token), None)
            if child is None:
                verdicts[i] = Verdict(paths[i], token)
            else:
                paths[i].append(child)
                open_rows.append(i)
        rows = open_rows
    return verdicts


def _step_output(target: Target, verdict: Verdict) -> StepOutput:
    tokens = [*(target.draft.tokens[node] for node in verdict.path), verdict.next_token]
    params = target.context.params
    if params.logprobs is None:
        return StepOutput(verdict, tokens)
    rows = [ROOT, *verdict.path]
    found = [logprob(target.logits[row + 1], token, params) for row, token in zip(rows, tokens, strict=True)]
    return StepOutput(verdict, tokens, [entry for entry in found if entry is not None])
