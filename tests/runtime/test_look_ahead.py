"""Answers drawn from the model conditioned on a grammar, through the engine of a tiny model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun import LLM, BadRequest, Grammar, SamplingParams
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.decode.rejection_draws import Prefix, RejectionDraws
from forerun.decode.sampling import SeededRng
from forerun.decode.trie import TokenTrie
from forerun.sharing.scoring import score_continuations

TEXTS = ["a ship", "a shipwreck", "the lamp", "the lamp turns", "fog"]
PROMPT = "The keeper of the lighthouse writes about"


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny_folder("llama"), dtype="float32", max_model_len=256, quiet=True) as opened:
        yield opened


def law(llm: LLM, texts: list[str]) -> np.ndarray:
    """By scoring each text and its end by itself."""
    ends = llm.engine.intake.end_ids
    ids = [llm.tokenizer.encode(text) for text in texts]
    scores = score_continuations(llm, PROMPT, [[*each, end] for each in ids for end in ends]).totals
    weights = np.exp(scores).reshape(len(texts), len(ends)).sum(1)
    return weights / weights.sum()


def test_finite_language_is_sampled_exactly(llm: LLM) -> None:
    expected, drawn = law(llm, TEXTS), 400
    grammar = Grammar.choice(TEXTS, "conditional")
    for speculation in ("off", "auto"):
        found = Counter()
        for seed in range(0, drawn, 200):
            done = llm.generate(PROMPT, temperature=1.0, grammar=grammar, n=200, seed=seed, speculation=speculation)[0]
            found.update(choice.text for choice in done.choices)
        counts = np.array([found[text] for text in TEXTS])
        assert counts.sum() == drawn
        assert ((counts - drawn * expected) ** 2 / (drawn * expected)).sum() < 23.0  # chi-square, 4 degrees: 1e-4
    report = done.usage.conditional
    assert report is not None and report.exact and report.error == 0.0 and report.answers == len(TEXTS)


def test_greedy_is_the_likeliest_whole_answer(llm: LLM) -> None:
    done = llm.generate(PROMPT, grammar=Grammar.choice(TEXTS, "conditional"))[0]
    assert done.text == TEXTS[int(law(llm, TEXTS).argmax())]


def test_json_schema_of_few_values(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    grammar = Grammar.json({**schema, "additionalProperties": False}, "conditional")
    texts = ['{"ok": true}', '{"ok": false}']
    done = llm.generate(PROMPT, grammar=grammar)[0]
    assert done.text == texts[int(law(llm, texts).argmax())]


def test_infinite_language_by_rejection(llm: LLM) -> None:
    """Greedy: no answer that was sampled is likelier than the one that is called the likeliest."""
    grammar = Grammar.regex("[ab]+", "conditional")
    greedy = llm.generate(PROMPT, grammar=grammar, max_tokens=3)[0]
    assert greedy.usage.conditional is not None and greedy.usage.conditional.exact
    sampled = llm.generate(PROMPT, grammar=grammar, max_tokens=3, temperature=1.0, n=5, seed=3)[0]
    report = sampled.usage.conditional
    assert report is not None and report.exact and report.tries >= 5 and report.answers == 0
    ids = [list(choice.token_ids) for choice in sampled.choices]
    assert all(set(choice.text) <= set("ab") and choice.finish_reason == "stop" for choice in sampled.choices)
    best, *others = score_continuations(llm, PROMPT, [list(greedy.choices[0].token_ids), *ids]).totals
    assert best >= max(others) - 1e-5


def test_draws_beyond_their_budget_state_an_error() -> None:
    """A language whose second token is nearly always wrong: with one row a draw nothing can be rejected."""
    first, second = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([[0.999, 0.0, 0.001], [0.5, 0.0, 0.5]])

    def logprobs(prefixes: list[Prefix]) -> torch.Tensor:
        return torch.stack([(second[each.path[0]] if each.path else first) for each in prefixes]).log()

    def allowed(path: list[int]) -> torch.Tensor:
        return torch.tensor([True, True, False] if not path else [False, False, True])

    draws = RejectionDraws(allowed, logprobs, [2], 4, rows_per_draw=0, look_ahead_rows=1)
    assert draws.error == 1.0
    found = [draws.draw(SeededRng(seed, 0)) for seed in range(3)]
    assert all(answer[-1] == 2 for answer in found)
    exact = RejectionDraws(allowed, logprobs, [2], 4)
    counts = Counter(exact.draw(SeededRng(seed, 0))[0] for seed in range(2000))
    assert exact.exact and exact.error == 0.0
    assert counts[0] < 20  # 0.001 of 0.501


def test_what_does_not_go_together_is_refused(llm: LLM, tmp_path: Path) -> None:
    grammar = Grammar.choice(TEXTS, "conditional")
    with pytest.raises(BadRequest, match="top_p 0.9"):
        llm.generate(PROMPT, grammar=grammar, temperature=1.0, top_p=0.9)
    with pytest.raises(BadRequest, match="prefill is 'speculative'"):
        llm.generate(PROMPT, grammar=grammar, prefill="speculative")
    with pytest.raises(BadRequest, match="looks ahead"):
        list(llm.workers(PROMPT, 2, SamplingParams(grammar=grammar, max_tokens=8)))
    with pytest.raises(BadRequest, match="sampling is 'exact'"):
        Grammar.regex("a", "exact")  # type: ignore[arg-type]


def test_a_look_ahead_leaves_nothing_where_nothing_is_shared(llm: LLM) -> None:
    prompt, grammar = "A prompt of its own, " * 8, Grammar.choice(TEXTS, "conditional")
    before = llm.prefixes().tokens
    alone = llm.generate(prompt, grammar=grammar, cache=False)[0]
    assert llm.prefixes().tokens == before
    assert llm.generate(prompt, grammar=grammar)[0].token_ids == alone.token_ids
    assert llm.prefixes().tokens > before


def test_a_look_ahead_that_is_cancelled_ends(llm: LLM) -> None:
    class Gone(Exception):
        pass

    forwards = 0

    def check() -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 4:
            raise Gone

    params = SamplingParams(grammar=Grammar.regex("[ab]+", "conditional"), temperature=1.0, max_tokens=64)
    request = llm.driver.request(llm.encode(PROMPT), params, looks_ahead=False)
    with pytest.raises(Gone):
        llm.driver.look_ahead(request, check)
    assert forwards == 4 and request.conditional is None and len(llm.engine.leases) == 0


def test_trie_file_as_grammar(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "items.trie"
    TokenTrie.build([llm.tokenizer.encode(text) for text in TEXTS], TEXTS).save(path)
    masked = llm.generate(PROMPT, grammar=Grammar.trie(path))[0]
    assert masked.text in TEXTS and masked.finish_reason == "stop"
    plain = llm.generate(PROMPT, grammar=Grammar.trie(path), speculation="off")[0]
    with all_drafts_verified(llm.engine):  # every child of a level is drafted, so no level takes a pass of its own
        drafted = llm.generate(PROMPT, grammar=Grammar.trie(path), speculation="grammar")[0]
    assert drafted.token_ids == plain.token_ids == masked.token_ids
    assert drafted.usage.steps < plain.usage.steps == len(plain.token_ids)
    with all_drafts_verified(llm.engine):  # the answer is known from looking ahead, and drafted
        conditional = llm.generate(PROMPT, grammar=Grammar.trie(path, "conditional"), speculation="grammar")[0]
    assert conditional.text == TEXTS[int(law(llm, TEXTS).argmax())]
    assert conditional.usage.steps <= 3 and conditional.usage.accepted >= len(conditional.token_ids) - 3
