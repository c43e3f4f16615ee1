"""Models trained on the spot: their tokenizer and text, that they learn and open, and what is asked of them."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from forerun.models.formats.checkpoint import open_checkpoint
from forerun_research.bench.shapes import SHAPES
from forerun_research.studies import small_models
from forerun_research.studies.prefill_measure import StudyCase
from forerun_research.studies.prefill_recall import FIRST, SECOND, Recall, facts
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.prefill_texts import held_out
from forerun_research.studies.study import EXACT
from tests.research.studies.common import make_study, write_data

TEXTS = [f"def work_{n}(value):\n    return value * {n} + offset({n % 7})\n" * 8 for n in range(30)]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> tuple[tokenizers.Tokenizer, Path]:
    folder = tmp_path_factory.mktemp("model")
    return small_models.make_tokenizer(TEXTS, 400, folder), folder


def test_a_tokenizer_gives_text_back_and_knows_chats(backend: tuple[tokenizers.Tokenizer, Path]) -> None:
    made, folder = backend
    text = "def wörk(x):\n\treturn x['é']\n"
    assert made.decode(made.encode(text).ids) == text and made.get_vocab_size() <= 400
    assert [made.token_to_id(token) for token in (small_models.END, small_models.START, small_models.STOP)] == [0, 1, 2]
    assert "<|im_start|>" in (folder / "tokenizer_config.json").read_text()
    stream = small_models.as_stream(made, TEXTS)
    assert (stream == 0).sum() == len(TEXTS) and stream[-1] == 0


def test_code_leaves_out_what_studies_measure_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("stdlib", "purelib"):
        (tmp_path / folder / "inner").mkdir(parents=True)
        for number in range(40):
            (tmp_path / folder / f"m{number}.py").write_text(f"# {folder} {number}\n" + "x = 1\n" * 200)
    (tmp_path / "purelib" / "inner" / "short.py").write_text("y = 2\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    found = small_models.code_texts(10**6)
    assert found == small_models.code_texts(10**6) and not any("y = 2" in text for text in found)
    kept = {f"# stdlib {n}\n" for n in range(40) if not held_out(Path(f"m{n}.py"))}
    assert {text[: text.index("x")] for text in found if text.startswith("# stdlib")} == kept and len(kept) < 40
    assert sum(map(len, small_models.code_texts(5000))) < 7000


def test_practice_repeats_and_states_facts_again() -> None:
    def encode(text: str) -> list[int]:
        return [1000 + ord(c) for c in text]

    row = list(range(2000))
    seen = set()
    for seed in range(12):
        made = small_models.practice(row.copy(), random.Random(seed), encode)
        assert len(made) == len(row)
        said = "".join(chr(token - 1000) for token in made if token >= 1000 and token < 1200)
        if made == row:
            seen.add("plain")
        elif "access code" in said:
            seen.add("facts")
        else:
            assert len(set(made)) < len(made) and set(made) <= set(row)
            seen.add("repeats")
    assert seen == {"plain", "facts", "repeats"}
    rows = next(small_models.batches(np.arange(5000, dtype=np.uint16), encode, 512, 3, seed=1))
    assert rows.shape == (3, 512) and rows.dtype == torch.int64


def test_the_rate_rises_and_falls() -> None:
    rates = [small_models.rate_at(done) for done in np.linspace(0.0, 1.0, 41)]
    assert rates[0] == 0.0 and rates[-1] == 0.0 and max(rates) == 1.0 == small_models.rate_at(0.3)
    assert small_models.rate_at(0.75) < 1.0


@pytest.mark.parametrize("shape", ["tinier", "tinier deep"])
def test_a_model_learns_within_its_seconds_and_opens(
    backend: tuple[tokenizers.Tokenizer, Path], monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    made, folder = backend
    monkeypatch.setattr(small_models, "ROW_TOKENS", 64)
    config = replace(SHAPES["tinier"], vocab_size=made.get_vocab_size())
    if shape == "tinier deep":
        config = replace(config, family="qwen3", num_layers=3, qk_norm=True)
    stream = small_models.as_stream(made, TEXTS)
    small_models.network(config)  # what is imported for it takes longer than the training
    found = small_models.train(
        *(config, stream, lambda text: made.encode(text).ids, folder, 1.5, torch.device("cpu")),
    )
    assert found["steps"] >= 2 and found["tokens"] == found["steps"] * small_models.ROWS * 64
    assert found["loss"] < 0.98 * np.log(config.vocab_size)
    opened = open_checkpoint(folder)
    assert (opened.config.family, opened.config.num_layers) == (config.family, config.num_layers)
    assert opened.config.hidden_size == config.hidden_size and opened.tokenizer().encode("def work_1")


def test_facts_have_names_of_their_own() -> None:
    said = facts(random.Random(0), len(FIRST) * len(SECOND))
    assert len({what for what, _ in said}) == 100 and all(value[1:6].isdigit() for _, value in said)


def test_recall_asks_for_one_fact_and_judges_its_value(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    study = make_study(tiny_folder("qwen2"), write_data(tmp_path), ["recall"])
    with StudySubject(study, study.variants[0]) as subject:
        measure = Recall(prompts=3, length=500, facts=2, text="essays")
        cases = measure.cases(subject)
        assert len(cases) == 3
        for case in cases:
            text, value = (subject.tokenizer.decode(ids) for ids in (case.ids, case.more["follow"]))
            begun = text.rpartition("\n")[2]
            assert begun.startswith("# The access code of the ") and text.count("access code") == 3
            assert value.strip()[:5].isdigit() and begun + value in text
        ids = list(range(3, 60))
        with subject.scorer.hold(ids, None, 1) as held:
            best = int(held.logits([0])[0].argmax())
        for follow, score in ((best, 1.0), (best + 1, 0.0)):
            ((name, record),) = measure.run(subject, StudyCase("x", ids, {"follow": [follow]}), [], [EXACT], {})
            assert name == EXACT and record["score"] == score and record["tokens"] == len(ids)
