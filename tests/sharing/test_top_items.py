"""The best items of a trie equal exhaustive scoring; labels likewise; and the commands around them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from forerun import LLM, BadRequest, Grammar, SamplingParams, recipes
from forerun.cli import main
from forerun.decode.trie import TokenTrie
from forerun.sharing.scoring import score_continuations

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", max_model_len=256, quiet=True) as opened:
        yield opened


def items() -> list[list[int]]:
    draw = random.Random(0)
    return [list(ids) for ids in sorted({tuple(draw.choices(range(30, 42), k=draw.randint(1, 5))) for _ in range(400)})]


@pytest.mark.parametrize("end", [False, True])
def test_best_items_equal_exhaustive_scoring(llm: LLM, end: bool) -> None:
    wanted = items()
    (stop,) = llm.engine.intake.end_ids
    scores = score_continuations(llm, PROMPT, [[*ids, stop] if end else ids for ids in wanted]).totals
    best = np.argsort(-np.array(scores))[:10].tolist()
    found = llm.topk(PROMPT, TokenTrie.build(wanted), 10, end)
    assert [ranked.item for ranked in found.items] == best
    assert [ranked.token_ids for ranked in found.items] == [wanted[i] for i in best]
    assert [ranked.score for ranked in found.items] == pytest.approx([scores[i] for i in best], abs=1e-4)
    assert found.scored_tokens < sum(map(len, wanted)) / 2


def test_all_items(llm: LLM) -> None:
    wanted = items()[:50]
    found = llm.topk(PROMPT, TokenTrie.build(wanted), 50)
    assert sorted(ranked.item for ranked in found.items) == list(range(50))
    assert all(a.score >= b.score for a, b in itertools.pairwise(found.items))
    with pytest.raises(BadRequest, match="k is 51, the trie has 50 items"):
        llm.topk(PROMPT, TokenTrie.build(wanted), 51)


@pytest.mark.parametrize("end", [False, True])
def test_a_beam_has_exact_scores_and_knows_whether_its_items_are_the_best(llm: LLM, end: bool) -> None:
    draw = random.Random(1)
    trie = TokenTrie.build(sorted({tuple(draw.choices(range(30, 42), k=3)) for _ in range(300)}))  # of one length
    exact, every = llm.topk(PROMPT, trie, 10, end), llm.topk(PROMPT, trie, trie.num_items, end)
    scores = {ranked.item: ranked.score for ranked in every.items}
    assert exact.proven
    proofs = []
    for width in (10, 40, 400):
        found = llm.topk(PROMPT, trie, 10, end, beam=width)
        assert len(found.items) == 10 and found.forwards <= 5
        assert all(ranked.score == pytest.approx(scores[ranked.item], abs=1e-4) for ranked in found.items)
        if found.proven:
            assert [ranked.item for ranked in found.items] == [ranked.item for ranked in exact.items]
        proofs.append(found.proven)
    assert proofs[-1] and not proofs[0]
    for width in (9, 0, True, 2**20, "wide"):
        with pytest.raises(BadRequest, match="beam is"):
            llm.topk(PROMPT, trie, 10, beam=width)  # type: ignore[arg-type]


def test_labels_have_the_probabilities_of_their_answers(llm: LLM) -> None:
    labels = ["a ship", "fog", "a lamp"]
    question = recipes.label_question("The horn sounds.", labels)
    found = recipes.classify(llm, question, labels)
    (stop,) = llm.engine.intake.end_ids
    answers = [[*llm.tokenizer.encode(label), stop] for label in labels]
    weights = np.exp(score_continuations(llm, llm.encode(question), answers).totals)
    assert [found.probs[label] for label in labels] == pytest.approx((weights / weights.sum()).tolist(), rel=1e-3)
    assert found.label == labels[int(weights.argmax())] and found.mass == pytest.approx(weights.sum(), rel=1e-3)
    with pytest.raises(BadRequest, match="at least two different"):
        recipes.classify(llm, question, ["one"])


def test_commands(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps([40, 41]), json.dumps({"ids": [40, 42], "name": "b"}), json.dumps({"text": "fog"}), '"a ship"']
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    trie = tmp_path / "items.trie"
    run(["trie", "build", str(tmp_path / "items.jsonl"), "-o", str(trie), "--model", str(folder)])
    assert "4 items" in capsys.readouterr().out
    options = ["--model", str(folder), "--dtype", "float32", "--max-model-len", "256", "--json"]
    run(["trie", "top", str(trie), "The keeper", "-k", "4", *options])
    names = [ranked["name"] for ranked in json.loads(capsys.readouterr().out)["items"]]
    assert sorted(names) == ["40 41", "a ship", "b", "fog"]
    run(["generate", "The keeper", "--trie", str(trie), "--conditional", *options])
    assert json.loads(capsys.readouterr().out)["choices"][0]["finish_reason"] == "stop"
    run(["classify", "The horn sounds.", "--labels", "fog, a ship", *options])
    assert set(json.loads(capsys.readouterr().out)["probs"]) == {"fog", "a ship"}
    run(["trie", "top", str(trie), "The keeper", "--beam", "4", *options])  # ten items, or all of fewer
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["items"]) == 4 and shown["proven"]
    (tmp_path / "items.txt").write_text("fog\r\na\u2028ship\n\nfog\r\n")  # a line ends with a line end and nothing else
    run(["trie", "build", str(tmp_path / "items.txt"), "-o", str(trie), "--model", str(folder)])
    assert "2 items" in (shown := capsys.readouterr().out) and "repeated lines left out: 1" in shown
    for labels in ("fog", "fog,fog", " , "):
        with pytest.raises(SystemExit):
            main(["classify", "The horn sounds.", "--labels", labels, "--model", "no such model"])
        assert "at least two different texts" in capsys.readouterr().err  # before a model is looked for
    (tmp_path / "items.jsonl").write_text('{"ids": ["a"]}')
    with pytest.raises(SystemExit):
        main(["trie", "build", str(tmp_path / "items.jsonl"), "-o", str(trie)])
    assert "items.jsonl, line 1" in capsys.readouterr().err


def test_a_trie_of_text_is_for_models_with_the_same_tokens(folder: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "items.txt").write_text("fog\na ship\n")
    path = tmp_path / "items.trie"
    run(["trie", "build", str(tmp_path / "items.txt"), "-o", str(path), "--model", str(folder)])
    assert llm.topk(PROMPT, path, 2).proven
    other = TokenTrie.open(path)
    assert other.vocabulary
    other.vocabulary = "00" * 16
    other.save(path)
    grammar = Grammar.trie(str(path))
    for asked in (lambda: llm.topk(PROMPT, path, 2), lambda: llm.generate([PROMPT], SamplingParams(grammar=grammar))):
        with pytest.raises(BadRequest, match="built with another model's tokens"):
            asked()
    other.vocabulary = ""  # ids that were no text
    assert llm.topk(PROMPT, other, 2).proven


def run(args: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(args)
    assert left.value.code in (0, None)
