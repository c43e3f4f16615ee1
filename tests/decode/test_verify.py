"""Verdicts on hand-made logits: a batch is judged as its sequences would be alone, and as plain decoding would go."""

from __future__ import annotations

import torch

from forerun.core import ROOT, Draft, SamplingParams, Speculation
from forerun.decode.sampling import Context, Row, choose
from forerun.decode.target import SeededRng, Target
from forerun.decode.verifiers import make_verifier
from forerun.decode.verifiers.match import Match
from forerun.decode.verify import VerifyInput, verify
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
    rulings = verify(
        output(contexts, drafts), [VerifyInput(c, d, Match()) for c, d in zip(contexts, drafts, strict=True)]
    )
    for i, (context, ruling) in enumerate(zip(contexts, rulings, strict=True)):
        assert ruling.tokens == plain(context, len(ruling.tokens))
        assert len(ruling.tokens) == [1, 5, 4, 1][i % 4]
        assert [drafts[i].tokens[n] for n in ruling.verdict.path] == ruling.tokens[:-1]


def test_a_batch_is_judged_as_its_members_alone():
    params = SamplingParams(temperature=0.8, speculate=Speculation(verify="rejection"))
    contexts = [Context(params, [i, 1, 2], 1, seed=i) for i in range(6)]
    drafts = [Draft.chain([i, i + 1], [0.5, 0.5], "x") for i in range(6)]
    verifiers = [make_verifier(params.speculation) if i % 2 else Match() for i in range(6)]
    rulings = verify(
        output(contexts, drafts), [VerifyInput(*case) for case in zip(contexts, drafts, verifiers, strict=True)]
    )
    for context, draft, verifier, ruling in zip(contexts, drafts, verifiers, rulings, strict=True):
        target = Target(output([context], [draft]).logits, context, draft)
        assert verifier.verify(draft, target, SeededRng(context.seed, len(context.tokens))) == ruling.verdict


def test_logprobs_come_for_every_token():
    context = Context(SamplingParams(logprobs=2), [3, 4], 2, seed=0)
    right = plain(context, 3)
    draft = Draft.chain(right, [0.9] * 3, "x")
    ruling = verify(output([context], [draft]), [VerifyInput(context, draft, Match())])[0]
    assert [entry.token_id for entry in ruling.logprobs] == ruling.tokens
    for i, entry in enumerate(ruling.logprobs):
        row = logits_after((*context.tokens, *ruling.tokens[:i]))
        assert abs(entry.logprob - float(torch.log_softmax(row, -1)[entry.token_id])) < 1e-6


def test_dice_of_two_steps_and_of_drafting_never_repeat_a_number():
    seen = set()
    for position in range(50):
        for stream in (1, 2):
            rng = SeededRng(7, position, stream)
            seen |= {rng._next() for _ in range(20)}
    assert len(seen) == 50 * 2 * 20
