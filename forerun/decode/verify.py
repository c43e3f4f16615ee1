"""The acceptance side of a step: from the logits of one forward to the new tokens of every sequence (`StepOutput`).

Every sequence's rows go to the verifier of its request. Sequences that follow the target's own draws (`match`, and
those without a draft) are walked together, one token at a time, so that a batch costs as many sampling calls as its
longest accepted path. An error in one sequence ends that sequence only. Knows no drafter and no scheduler.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core import ROOT, Draft, TokenLogprob, Verdict
from forerun.decode.sampling import Context, Row, SeededRng, choose, distribution, logprob, shape
from forerun.decode.verifiers.base import MatchVerifier, Verifier
from forerun.errors import ForerunError
from forerun.models.decoder import Output, likeliest

log = logging.getLogger("forerun")


@dataclass
class VerifyInput:
    """One sequence that samples in this step. Without a draft it decodes plainly."""

    context: Context
    draft: Draft
    verifier: Verifier
    margins: bool = False  # whether it is asked how sure each token is


@dataclass
class StepOutput:
    """The new tokens of one sequence: the accepted path of its draft, then one token of the target."""

    verdict: Verdict
    tokens: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # of argmaxes, if asked for: each logit above the next best one
    error: ForerunError | None = None  # there is no next token: a grammar at a dead end, or parameters that raised


class Target:
    """What a verifier sees of the target (a `TargetView`): one sequence's rows of a forward.

    Row 0 belongs to the root, row 1 + i to node i. Distributions are computed when first asked for.
    """

    def __init__(self, logits: Tensor, context: Context, draft: Draft, greedy: list[int] | None = None) -> None:
        self.logits, self.context, self.draft = logits, context, draft  # logits: [1 + nodes, V]
        self._greedy = greedy  # argmax of each row, where the forward computed it
        self._probs: dict[int, Tensor] = {}

    def row(self, node: int) -> Row:
        return Row(self.context, [self.draft.tokens[i] for i in self.draft.path(node)])

    def probs(self, node: int) -> Tensor:
        if node not in self._probs:
            shaped = shape(self.logits[node + 1][None], [self.row(node)])
            self._probs[node] = self._distribution(shaped)
        return self._probs[node]

    def _distribution(self, shaped: Tensor) -> Tensor:
        if self.context.params.greedy:
            one_hot = shaped.new_zeros(shaped.shape[-1])
            one_hot[shaped[0].argmax()] = 1.0
            return one_hot
        return distribution(shaped, [self.context.params])[0]

    def draw(self, node: int) -> int:
        return draw_all([self], [node])[0]

    def greedy_token(self, node: int) -> int | None:
        """The next token where it is the argmax of the logits and the forward computed that already."""
        return self._greedy[node + 1] if self._greedy is not None and self.context.plain else None


def draw_all(targets: list[Target], nodes: list[int]) -> list[int]:
    """The tokens that plain decoding draws after these nodes, one per target, in one sampling call."""
    tokens = [target.greedy_token(node) for target, node in zip(targets, nodes, strict=True)]
    sampled = [i for i, token in enumerate(tokens) if token is None]
    if sampled:
        logits = torch.stack([targets[i].logits[nodes[i] + 1] for i in sampled])
        chosen = choose(logits, [targets[i].row(nodes[i]) for i in sampled])
        for i, token in zip(sampled, chosen, strict=True):
            tokens[i] = token
    return [token for token in tokens if token is not None]


def verify(output: Output, inputs: list[VerifyInput]) -> list[StepOutput]:
    """One output for each input, in order; `output` has 1 + nodes rows for each. An input that raises gets its error in
    its `StepOutput`, and the others get their tokens: after a failure of the batch every input is verified alone."""
    try:
        return _verify(output, inputs)
    except Exception as error:
        if len(inputs) == 1:
            return [StepOutput(Verdict([], -1), [], error=_as_forerun_error(error))]
    outputs: list[StepOutput] = []
    for each, rows in zip(inputs, _row_slices(inputs), strict=True):
        greedy = None if output.greedy is None else output.greedy[rows]
        outputs += verify(Output(output.logits[rows], greedy), [each])
    return outputs


def _as_forerun_error(error: Exception) -> ForerunError:
    if isinstance(error, ForerunError):
        return error
    log.error("sampling the next token of a request failed", exc_info=error)
    wrapped = ForerunError(
        f"the next token could not be sampled: {type(error).__name__}",  # its message may contain a prompt
        "check the request's sampling parameters, logit_bias and grammar; the log has the traceback",
    )
    wrapped.__cause__ = error
    return wrapped


def _row_slices(inputs: list[VerifyInput]) -> list[slice]:
    """The rows of each input among the forward's."""
    slices, first = [], 0
    for each in inputs:
        slices.append(slice(first, first + 1 + len(each.draft)))
        first = slices[-1].stop
    return slices


def _verify(output: Output, inputs: list[VerifyInput]) -> list[StepOutput]:
    greedy: list[int] | None = None
    if any(each.context.plain for each in inputs):
        greedy = (likeliest(output.logits) if output.greedy is None else output.greedy).tolist()
    if not any(len(each.draft) or each.context.params.logprobs is not None or each.margins for each in inputs):
        return [StepOutput(Verdict([], token), [token]) for token in _next_tokens(output.logits, inputs, greedy)]
    targets = []
    for each, rows in zip(inputs, _row_slices(inputs), strict=True):
        known = greedy[rows] if greedy is not None else None
        targets.append(Target(output.logits[rows], each.context, each.draft, known))
    verdicts = _match_all([i for i, each in enumerate(inputs) if _matches(each)], inputs, targets)
    for i, each in enumerate(inputs):
        if i not in verdicts:
            rng = SeededRng(each.context.seed, len(each.context.tokens))
            verdicts[i] = each.verifier.verify(each.draft, targets[i], rng)
    return [_step_output(targets[i], verdicts[i], each.margins) for i, each in enumerate(inputs)]


def _next_tokens(logits: Tensor, inputs: list[VerifyInput], greedy: list[int] | None) -> list[int]:
    """Of sequences without drafts, one row each."""
    if greedy is not None and all(each.context.plain for each in inputs):
        return greedy
    tokens = choose(logits, [Row(each.context) for each in inputs])
    known = tokens if greedy is None else greedy
    return [k if each.context.plain else t for each, k, t in zip(inputs, known, tokens, strict=True)]


def _matches(each: VerifyInput) -> bool:
    return not len(each.draft) or isinstance(each.verifier, MatchVerifier)


def _match_all(rows: list[int], inputs: list[VerifyInput], targets: list[Target]) -> dict[int, Verdict]:
    """`MatchVerifier.verify` of many sequences at once: one sampling call per level of the trees."""
    verdicts: dict[int, Verdict] = {}
    children = {i: inputs[i].draft.children() for i in rows if len(inputs[i].draft)}  # none: plain decoding
    paths: dict[int, list[int]] = {i: [] for i in rows}
    while rows:
        nodes = [paths[i][-1] if paths[i] else ROOT for i in rows]
        matched = []
        for i, node, token in zip(rows, nodes, draw_all([targets[i] for i in rows], nodes), strict=True):
            tokens = inputs[i].draft.tokens
            child = next((c for c in children.get(i, {}).get(node, ()) if tokens[c] == token), None)
            if child is None:
                verdicts[i] = Verdict(paths[i], token)
            else:
                paths[i].append(child)
                matched.append(i)
        rows = matched
    return verdicts


def _step_output(target: Target, verdict: Verdict, margins: bool) -> StepOutput:
    tokens = [*(target.draft.tokens[node] for node in verdict.path), verdict.next_token]
    params, rows = target.context.params, [ROOT, *verdict.path]
    output = StepOutput(verdict, tokens)
    if margins and target.context.plain:
        best = target.logits[[row + 1 for row in rows]].topk(2).values
        output.margins = (best[:, 0] - best[:, 1]).tolist()
    if params.logprobs is not None:
        found = [logprob(target.logits[row + 1], token, params) for row, token in zip(rows, tokens, strict=True)]
        output.logprobs = [entry for entry in found if entry is not None]
    return output
