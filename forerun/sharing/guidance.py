"""Classifier-free guidance: one answer from a pair of sequences, with and without the condition.

Both sequences run in one forward, the second behind another prompt (or none that matters), and the next token is drawn
from other + scale * (own - other) of their log-probabilities. A drafted chunk runs behind both, and is accepted token
by token as far as the guided distribution draws the same, so drafts change the number of passes and nothing else. Runs
between the engine's steps, on leased pages. Knows tokens only.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core import SamplingParams
from forerun.decode.sampling import Context, Row, choose
from forerun.engine.intake import check_token_ids
from forerun.errors import BadRequest, OutOfPages
from forerun.llm import LLM
from forerun.models.execution.runner import Span
from forerun.runtime.lease import EngineLease

MAX_GUIDANCE = 50.0

ProposeChunk = Callable[[list[int]], Sequence[int]]


@dataclass(frozen=True)
class Guided:
    """An answer and how many forwards of the pair it took, those of the prompts not counted."""

    token_ids: list[int]
    passes: int
    accepted: int  # drafted tokens that became part of the answer


def guided(
    llm: LLM,
    prompt_ids: Sequence[int],
    other_ids: Sequence[int],
    scale: float,
    params: SamplingParams,
    propose: ProposeChunk | None = None,
) -> Guided:
    """Answer `prompt_ids`, guided away from what would answer `other_ids`; a `scale` of 1 is the prompt alone.
    `propose` returns tokens that may well follow the answer so far."""
    if not 0.0 <= scale <= MAX_GUIDANCE:
        raise BadRequest(f"the guidance scale is {scale}, allowed is from 0 to {MAX_GUIDANCE:g}", "use 1.5 to 7.5")
    _check_params(params)
    pair = [list(prompt_ids), list(other_ids)]
    for ids in pair:
        llm.engine.intake.check(ids, params)
    with llm.driver.lease() as lease:
        return _Pair(llm, lease, pair, scale, params).run(propose or (lambda answer: ()))


def _check_params(params: SamplingParams) -> None:
    """What is not done here is refused."""
    given = {name: getattr(params, name) for name in ("grammar", "stop", "stop_token_ids", "logprobs", "prediction")}
    given |= {"n": params.n > 1, "prefill": not params.prefill.exact}
    unused = [name for name, value in given.items() if value is not None and value is not False and value != ()]
    if unused:
        raise BadRequest(f"guidance makes one answer of tokens, without {', '.join(unused)}", "leave that out")


class _Pair:
    def __init__(self, llm: LLM, lease: EngineLease, prompts: list[list[int]], scale: float, params: SamplingParams):
        self.engine, self.lease, self.prompts, self.scale, self.params = llm.engine, lease, prompts, scale, params
        seed = random.getrandbits(63) if params.seed is None else params.seed
        self.context = Context(params, list(prompts[0]), len(prompts[0]), seed)
        longest = self.engine.max_length - max(map(len, prompts))
        self.limit, self.end_ids = min(params.max_tokens, longest), set(self.engine.intake.end_ids)
        self.rows: list[array[int]] = []

    def run(self, propose: ProposeChunk) -> Guided:
        for ids in self.prompts:
            with self.lease.exclusive() as engine:
                row = self.lease.hold_prefix(engine, ids[:-1])
                known = len(row) * engine.pool.page_size
                if not self.lease.pages.extend(row, len(ids) + self.limit):
                    hint = "lower max_tokens, or raise kv_cache_tokens"
                    raise OutOfPages(f"guidance needs pages for {len(ids) + self.limit} tokens twice", hint)
            self.lease.prefill(ids[:-1], row, known)
            self.rows.append(row)
        answer: list[int] = []
        passes = accepted = 0
        while len(answer) < self.limit and not self._ended(answer):
            chunk = [int(token) for token in propose(list(answer))][: self.limit - len(answer) - 1]
            check_token_ids(chunk, self.engine.intake.model.vocab_size)
            found = self._accept(chunk, self._forward(answer, chunk))
            passes, accepted = passes + 1, accepted + len(found) - 1
            answer += found
            self.context.tokens += found
        return Guided(answer, passes, accepted)

    def _ended(self, answer: list[int]) -> bool:
        return bool(answer) and answer[-1] in self.end_ids and not self.params.ignore_eos

    def _forward(self, answer: list[int], chunk: list[int]) -> Tensor:
        """Guided log-probabilities after the last token and after each of the chunk, [1 + chunk, V]."""
        spans = []
        for ids, row in zip(self.prompts, self.rows, strict=True):
            whole = [*ids, *answer, *chunk]
            first = len(ids) + len(answer) - 1
            spans.append(Span(whole[first:], first, row, range(len(chunk) + 1)))
        with self.lease.exclusive() as engine:
            logits = engine.runner.forward(spans).logits.float()
            own, other = torch.log_softmax(logits, -1).chunk(2)
            return other + self.scale * (own - other)

    def _accept(self, chunk: list[int], guided_rows: Tensor) -> list[int]:
        found: list[int] = []
        for at in range(len(chunk) + 1):
            (token,) = choose(guided_rows[at : at + 1], [Row(self.context, found)])
            found.append(token)
            if self._ended(found) or at == len(chunk) or token != chunk[at]:
                break
        return found
