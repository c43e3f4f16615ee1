"""Verification on hand-made logits: a batch gives what its sequences give alone, and what plain decoding gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.core import ROOT, Draft, SamplingParams, Speculation
from forerun.decode.sampling import Context, Row, SeededRng, choose
from forerun.decode.verifiers import make_verifier
from forerun.decode.verifiers.base import MatchVerifier
from forerun.decode.verifiers.lossless import RejectionVerifier
from forerun.decode.verify import Target, VerifyInput, verify
from forerun.errors import ForerunError
from forerun.models.decoder import Output

VOCAB = 12


def logits_after(tokens: tuple[int, ...]) -> torch.Tensor:
    """A model of sorts: logits that depend on all tokens so far."""
    seed = 1
    for token in tokens:
        seed = (seed * 31 + token + 7) % 1_000_003
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def output(contexts: list[Context], drafts: list[Draft]) -> Output:
    rows = []
    for context, draft in zip(contexts, drafts, strict=True):
        for node in range(ROOT, len(draft)):
            path = [draft.tokens[n] for n in draft.path(node)] if node != ROOT else []
            rows.append(logits_after((*context.tokens, *path)))
    return Output(torch.stack(rows))


def plain(context: Context, count: int) -> list[int]:
    tokens = list(context.tokens)
    for _ in range(count):
        now = Context(context.params, tokens, context.num_prompt, context.seed)
        tokens = [*tokens, choose(logits_after(tuple(tokens))[None], [Row(now)])[0]]
    return tokens[len(context.tokens) :]


KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=4),
    SamplingParams(temperature=1.3, top_k=4, repetition_penalty=1.2),
    SamplingParams(frequency_penalty=1.0),
]


def test_match_gives_what_plain_decoding_gives_whatever_was_drafted():
    contexts = [Context(kind, [3, i, 5], 2, seed=i) for i in range(8) for kind in KINDS]
    drafts = []
    for i, context in enumerate(contexts):
        right = plain(context, 4)
        wrong = [(t + 1) % VOCAB for t in right]
        tokens = [wrong[0], right[0], wrong[1], right[1], right[2]]
        branching = Draft(tokens, [ROOT, ROOT, 1, 1, 3], [0.5] * 5, ["x"] * 5)
        chains = [Draft.chain(chain, [0.5] * 4, "x") for chain in (right, wrong)]
        drafts.append([Draft(), chains[0], branching, chains[1]][i % 4])
    outputs = verify(
        output(contexts, drafts), [VerifyInput(c, d, MatchVerifier()) for c, d in zip(contexts, drafts, strict=True)]
    )
    for i, (context, step) in enumerate(zip(contexts, outputs, strict=True)):
        assert step.tokens == plain(context, len(step.tokens))
        assert len(step.tokens) == [1, 5, 4, 1][i % 4]
        assert [drafts[i].tokens[n] for n in step.verdict.path] == step.tokens[:-1]


def test_a_batch_is_verified_as_its_sequences_are_alone():
    params = SamplingParams(temperature=0.8, speculation=Speculation(verify="rejection"))
    contexts = [Context(params, [i, 1, 2], 1, seed=i) for i in range(6)]
    drafts = [Draft.chain([i, i + 1], [0.5, 0.5], "x") for i in range(6)]
    verifiers = [make_verifier(params.speculation) if i % 2 else MatchVerifier() for i in range(6)]
    outputs = verify(
        output(contexts, drafts), [VerifyInput(*case) for case in zip(contexts, drafts, verifiers, strict=True)]
    )
    for context, draft, verifier, step in zip(contexts, drafts, verifiers, outputs, strict=True):
        target = Target(output([context], [draft]).logits, context, draft)
        assert verifier.verify(draft, target, SeededRng(context.seed, len(context.tokens))) == step.verdict


def test_logprobs_come_for_every_token():
    context = Context(SamplingParams(logprobs=2), [3, 4], 2, seed=0)
    right = plain(context, 3)
    draft = Draft.chain(right, [0.9] * 3, "x")
    step = verify(output([context], [draft]), [VerifyInput(context, draft, MatchVerifier())])[0]
    assert [entry.token_id for entry in step.logprobs] == step.tokens
    for i, entry in enumerate(step.logprobs):
        row = logits_after((*context.tokens, *step.tokens[:i]))
        assert abs(entry.logprob - float(torch.log_softmax(row, -1)[entry.token_id])) < 1e-6


def test_margins_come_for_every_argmax():
    """Of a drafted chain, of plain decoding beside it, and none where logits are changed or a token is drawn."""
    contexts = [Context(kind, [3, i, 5], 2, seed=i) for i, kind in enumerate([KINDS[0], KINDS[0], *KINDS[1:]])]
    drafts = [Draft.chain(plain(contexts[0], 3), [0.9] * 3, "x"), *[Draft()] * 4]
    inputs = [VerifyInput(c, d, MatchVerifier(), margins=True) for c, d in zip(contexts, drafts, strict=True)]
    steps = verify(output(contexts, drafts), inputs)
    assert [len(step.margins) for step in steps] == [4, 1, 0, 0, 0]
    for context, step in zip(contexts, steps[:2], strict=False):
        for i, margin in enumerate(step.margins):
            best = logits_after((*context.tokens, *step.tokens[:i])).sort(descending=True).values
            assert margin == pytest.approx(float(best[0] - best[1]), abs=1e-6)
    assert not verify(output(contexts[:1], [Draft()]), [replace(inputs[1], margins=False)])[0].margins


def test_an_exception_in_one_sequence_ends_that_sequence_only():
    """`True` is no token id: as an index it selects by mask, and torch raises an IndexError."""
    bad = SamplingParams(logit_bias={1: 1.0})
    object.__setattr__(bad, "logit_bias", {True: 1.0})  # past the checks of requests
    contexts = [Context(bad if i == 1 else KINDS[i % 2], [3, i, 5], 2, seed=i) for i in range(4)]
    drafts = [
        Draft.chain(plain(context, 2), [0.5] * 2, "x") if i != 1 else Draft() for i, context in enumerate(contexts)
    ]
    inputs = [VerifyInput(c, d, MatchVerifier()) for c, d in zip(contexts, drafts, strict=True)]
    outputs = verify(output(contexts, drafts), inputs)
    assert [step.tokens for step in outputs] == [plain(c, 3) if i != 1 else [] for i, c in enumerate(contexts)]
    assert [step.error is None for step in outputs] == [True, False, True, True]
    error = outputs[1].error
    assert isinstance(error, ForerunError) and "IndexError" in str(error) and "logit_bias" in error.hint
    assert isinstance(error.__cause__, IndexError)


def test_an_expected_error_reaches_the_caller_unchanged():
    class Raises(RejectionVerifier):
        def verify(self, draft, target, rng):
            raise dead_end

    dead_end = ForerunError("no next token", "loosen the grammar")
    context, draft = Context(SamplingParams(), [3, 4], 2, seed=0), Draft.chain([1], [0.5], "x")
    (step,) = verify(output([context], [draft]), [VerifyInput(context, draft, Raises())])
    assert step.error is dead_end


def test_random_numbers_of_steps_and_streams_never_repeat():
    seen = set()
    for position in range(50):
        for stream in (1, 2):
            rng = SeededRng(7, position, stream)
            seen |= {rng._next() for _ in range(20)}
    assert len(seen) == 50 * 2 * 20
