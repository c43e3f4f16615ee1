"""The boundary trap of forced text: spellings the grammar allows keep their probabilities, drafted or not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from forerun.checks.enumeration import outcomes
from forerun.core import ROOT, Draft
from forerun.decode.drafters.grammar import prune
from forerun.decode.grammar import AnswerGrammar, GrammarCompiler
from forerun.decode.sampling import Context, Rng, Row, SeededRng, choose, distribution, shape
from forerun.decode.verifiers.base import MatchVerifier
from forerun.decode.verify import Target
from forerun.params import Grammar, SamplingParams
from forerun.text.tokenizer import Tokenizer
from tests.decode.drafters.test_grammar import proposed, random_tree

# --- The boundary trap, by enumeration. Six tokens and an end; `abc` has the usual spelling [ab, c] and two others.

LETTERS = ["<e>", "a", "b", "c", "ab", "bc", "d"]
PARAMS = SamplingParams(temperature=0.9, top_k=4)


@pytest.fixture(scope="module")
def abc() -> GrammarCompiler:
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(LETTERS)}, [("a", "b"), ("b", "c")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<e>"])
    return GrammarCompiler(Tokenizer(backend, eos_ids=[0]), len(LETTERS) + 1)


def model(tokens: list[int]) -> torch.Tensor:
    """Logits that depend on all tokens before; likeliest is mostly what the grammar forbids."""
    generator = torch.Generator().manual_seed(sum(3**i * (token + 1) for i, token in enumerate(tokens)))
    return torch.randn(len(LETTERS) + 1, generator=generator) * 1.5


class Chances:
    """A target that draws with random numbers that show every side."""

    def __init__(self, target: Target, rng: Rng) -> None:
        self.target, self.rng = target, rng

    def probs(self, node: int) -> torch.Tensor:
        return self.target.probs(node)

    def draw(self, node: int) -> int:
        return self.rng.pick(self.probs(node))


def target_of(constraint: AnswerGrammar, draft: Draft) -> Target:
    rows = [
        model([*constraint.tokens, *(draft.tokens[i] for i in draft.path(node))]) for node in range(ROOT, len(draft))
    ]
    return Target(torch.stack(rows), Context(PARAMS, list(constraint.tokens), 0, 0, constraint), draft)


def one_step(constraint: AnswerGrammar, draft: Draft) -> Iterator[tuple[float, list[int]]]:
    """Every token sequence that one step can add, with its probability."""

    def step(rng: Rng) -> list[int]:
        verdict = MatchVerifier().verify(draft, Chances(target_of(constraint, draft), rng), rng)
        return [*(draft.tokens[i] for i in verdict.path), verdict.next_token]

    return outcomes(step)


def answers(
    compiler: GrammarCompiler, grammar: Grammar, draft_of: Callable[[AnswerGrammar], Draft]
) -> dict[tuple[int, ...], float]:
    """The distribution of whole answers."""
    found: dict[tuple[int, ...], float] = {}
    open_: list[tuple[list[int], float]] = [([], 1.0)]
    while open_:
        tokens, mass = open_.pop()
        constraint = compiler.constraint(grammar)
        constraint.advance(tokens)
        for prob, more in one_step(constraint, draft_of(constraint)):
            more = more[: more.index(0) + 1] if 0 in more else more  # an end ends it, whatever was drawn after it
            answer = (*tokens, *more)
            if more[-1] == 0:
                found[answer] = found.get(answer, 0.0) + mass * prob
            else:
                open_.append((list(answer), mass * prob))
    return found


def by_hand(compiler: GrammarCompiler, grammar: Grammar) -> dict[tuple[int, ...], float]:
    """Masked softmax, token by token: nothing of drafts, verifiers or targets."""
    found: dict[tuple[int, ...], float] = {}
    open_: list[tuple[list[int], float]] = [([], 1.0)]
    while open_:
        tokens, mass = open_.pop()
        constraint = compiler.constraint(grammar)
        constraint.advance(tokens)
        row = Row(Context(PARAMS, tokens, 0, 0, constraint))
        probs = distribution(shape(model(tokens)[None], [row]), [PARAMS])[0]
        for token in probs.nonzero().flatten().tolist():
            answer, prob = (*tokens, token), mass * float(probs[token])
            if token == 0:
                found[answer] = prob
            else:
                open_.append((list(answer), prob))
    return found


@pytest.mark.parametrize("pattern", ["abc", "abcd?", "(abc|abd)(abc)?", "d{0,2}abcab"])
def test_the_boundary_trap(abc: GrammarCompiler, pattern: str) -> None:
    grammar = Grammar("regex", pattern)
    truth = by_hand(abc, grammar)
    drafted = answers(abc, grammar, lambda constraint: proposed(constraint, nodes=5))
    assert sum(truth.values()) == pytest.approx(1.0, abs=1e-5)
    assert drafted.keys() == truth.keys()
    assert all(math.isclose(drafted[answer], truth[answer], abs_tol=1e-6) for answer in truth)
    assert answers(abc, grammar, lambda _: Draft()).keys() == truth.keys()
    # It is a trap: the text is certain and its usual spelling is not, by far
    spellings = {answer: mass for answer, mass in truth.items() if abc.vocabulary.text(answer[:-1]).startswith(b"abc")}
    usual = sum(mass for answer, mass in spellings.items() if answer[:2] == (4, 3))
    assert len({answer[:2] for answer in spellings}) >= 2 and usual < 0.95 * sum(spellings.values())


def test_all_spellings_stay_allowed(abc: GrammarCompiler) -> None:
    constraint = abc.constraint(Grammar("regex", "abc"))
    assert constraint.certain_text(()) == b"abc"
    assert proposed(constraint).tokens == [4, 3, 0] == [*abc.vocabulary.tokenizer.encode("abc"), 0]
    assert [constraint.accepts((), spelling) for spelling in ([4, 3, 0], [1, 5, 0], [1, 2, 3, 0])] == [3, 3, 4]
    assert constraint.allowed(()).nonzero().flatten().tolist() == [1, 4]
    assert constraint.allowed([1]).nonzero().flatten().tolist() == [2, 5]


def test_seeded_answers_are_plain_decodings(abc: GrammarCompiler) -> None:
    """Token for token, with drafts that other drafters made and `prune` went over, too."""
    grammar, rng, accepted = Grammar("regex", "(abc|abd|d){2,4}"), random.Random(2), 0
    for seed in range(60):
        plain, constraint = list[int](), abc.constraint(grammar)
        while plain[-1:] != [0]:
            plain += choose(model(plain)[None], [Row(Context(PARAMS, plain, 0, seed, constraint))])
            constraint.advance(plain[-1:])
        answer, constraint = list[int](), abc.constraint(grammar)
        while 0 not in answer:
            draft = proposed(constraint) if rng.random() < 0.5 else random_tree(rng, constraint, 8, len(LETTERS))
            draft = prune(draft, constraint)
            target = target_of(constraint, draft)
            target.context.seed = seed
            verdict = MatchVerifier().verify(draft, target, SeededRng(seed, len(answer)))
            more = [*(draft.tokens[i] for i in verdict.path), verdict.next_token]
            more = more[: more.index(0) + 1] if 0 in more else more
            accepted += len(more) - 1
            constraint.advance(more)
            answer += more
        assert answer == plain
    assert accepted > 60
