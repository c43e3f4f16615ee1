"""Answers in batches: what the dense network writes is what the engine answers, and prompts come in all kinds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, BadRequest, SamplingParams, data
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.prefill.calibration.dense import DenseModel
from forerun.train import answers as answers_module
from forerun.train import writer as writer_module
from forerun.train.answers import without_loop, write_answers
from forerun.train.prompts import PromptMix, read_sources
from forerun.train.writer import BatchWriter
from tests.train.kinds import OPTIONS, PROMPTS, teacher

SOURCE = '''"""A module."""

import math


class Shape:
    """{prose}"""

    def area(self, scale: float) -> float:
        """The area of the shape, scaled."""
        first = math.pi
        second = first * scale
        third = second + 1.0
        fourth = third - 1.0
        return fourth
'''.replace("{prose}", "A shape has an area and a name and some more words that say what it is good for. " * 4)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_batch_is_what_the_engine_answers(target: Path, dropped: bool, monkeypatch: pytest.MonkeyPatch):
    """Prompts of different lengths; rows that have ended leave the batch early, or stay."""
    monkeypatch.setattr(writer_module, "CHECKED_EVERY", 1 if dropped else 1000)
    monkeypatch.setattr(writer_module, "KEPT_ROWS", 1.0)
    dense = teacher(target)
    with LLM(target, **OPTIONS) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True, speculation="off")
        whole = [list(answer.token_ids) for answer in llm.generate(PROMPTS, params)]
    stops = {whole[0][4], whole[2][9]}
    got = BatchWriter(dense, PROMPTS, 20).run(stops)
    assert BatchWriter(dense, PROMPTS, 20).run(set()) == [p + w for p, w in zip(PROMPTS, whole, strict=True)]
    for prompt, answer, text in zip(PROMPTS, whole, got, strict=True):
        end = next((i + 1 for i, token in enumerate(answer) if token in stops), len(answer))
        assert text == prompt + answer[:end]


def test_drawn_rows_differ_and_depend_on_the_seed_alone(target: Path):
    dense = teacher(target)

    def drawn(seed: int) -> list[list[int]]:
        return BatchWriter(dense, [[5, 6, 7]] * 6, 8).run(set(), torch.Generator().manual_seed(seed))

    assert drawn(1) == drawn(1) != drawn(2)
    assert len({tuple(row) for row in drawn(1)}) > 1


def test_more_than_the_model_sees_is_refused(target: Path):
    with pytest.raises(BadRequest, match="more than every layer of the model attends to"):
        BatchWriter(teacher(target), [[1, 2]], 1 << 20)


def test_an_answer_ends_where_it_repeats_itself():
    rng = random.Random(0)
    text, loop = rng.sample(range(1000), 90), list(range(2000, 2024))
    assert without_loop(text) == text and without_loop(text + loop + loop) == text + loop + loop
    cut = without_loop(text + loop * 6)
    assert cut == (text + loop * 6)[: len(cut)] and len(cut) == len(text) + 2 * len(loop) + answers_module.LOOP_TOKENS


def test_sources_give_heads_functions_and_prose(tmp_path: Path):
    (tmp_path / "shape.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    found = read_sources([tmp_path], random.Random(0))
    [head], [function] = found.heads, found.functions
    assert head.startswith("def area(self") and head.endswith('scaled."""\n') and "math.pi" not in head
    assert function.startswith(head) and "    return fourth" in function
    assert any(part.startswith("A shape has an area") for part in found.paragraphs)


def test_prompts_are_mixed_and_repeatable(target: Path, tmp_path: Path):
    (tmp_path / "shape.py").write_text(SOURCE * 20)
    tokenizer = open_checkpoint(target).tokenizer()

    def first(seed: int) -> list[Any]:
        mix = iter(PromptMix(tokenizer, [tmp_path], seed, max_tokens=4096))
        return [next(mix) for _ in range(80)]

    assert first(3) == first(3) != first(4)
    assert len({prompt.ids for prompt in first(3)}) > 40
    assert {prompt.message for prompt in first(3)} == ({True, False} if tokenizer.has_chat_template else {False})


def test_answers_of_batches_go_on_after_the_last_one(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("ANSWER_TOKENS", "CONTINUED_TOKENS", "QUESTION_TOKENS"):
        monkeypatch.setattr(answers_module, name, 5)
    (tmp_path / "shape.py").write_text(SOURCE * 20)
    checkpoint, path = open_checkpoint(target), tmp_path / "answers.jsonl"
    dense = DenseModel.from_checkpoint(checkpoint, torch.device("cpu"), torch.float32, quiet=True)
    write_answers(dense, checkpoint.tokenizer(), path, 5, [tmp_path], 0)
    before = path.read_text().splitlines()
    path.write_text("\n".join(before) + "\n[1, 2")  # cut off
    write_answers(dense, checkpoint.tokenizer(), path, len(before) + 4, [tmp_path], 0)
    after = path.read_text().splitlines()
    assert after[: len(before)] == before and len(after) >= len(before) + 4
    assert all(len(json.loads(line)) > 4 for line in after)


def test_the_target_asks_questions_from_given_words_on(target: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where more are asked than fit in a batch; those words are part of the question."""
    monkeypatch.setattr(answers_module, "QUESTION_TOKENS", 4)
    monkeypatch.setattr(answers_module, "OPENED_SHARE", 1.0)
    tokenizer, draw = open_checkpoint(target).tokenizer(), torch.Generator().manual_seed(0)
    openings = json.loads(data.text("training_prompts.json"))["openings"]
    firsts = [tokenizer.encode(text) for text in openings]
    found = answers_module._ask(teacher(target), tokenizer, 10, 4, random.Random(0), draw)
    heads = [answers_module._opening(tokenizer, system)[0] for system in answers_module.SYSTEMS]
    assert len(found) == 10 and all(prompt.message for prompt in found)
    for prompt in found:
        ids = list(prompt.ids)
        assert any(ids[: len(head) + len(first)] == [*head, *first] for head in heads for first in firsts)
