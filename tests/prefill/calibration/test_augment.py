"""Windows that copy and recall: of the same length, with the repetition and the facts where they should be."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from forerun.models.formats.checkpoint import open_checkpoint
from forerun.prefill.calibration.windows import Augmenter
from forerun.text.tokenizer import Tokenizer
from tests import tiny

PROMPT, AHEAD = 900, 40


def rows(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    words = tiny.TEXT.split()
    texts = [" ".join(random.Random(i).choices(words, k=2000)) for i in range(count)]
    return [tokenizer.encode(text)[: PROMPT + AHEAD] for text in texts]


@pytest.fixture
def augmenter(tokenizer: Tokenizer) -> Augmenter:
    return Augmenter(tokenizer, PROMPT, AHEAD)


def test_a_copy_repeats_what_stood_before(augmenter: Augmenter, tokenizer: Tokenizer) -> None:
    for seed, row in enumerate(rows(tokenizer, 20)):
        made = augmenter.with_copy(row, random.Random(seed))
        assert made is not None and len(made) == len(row)
        answer, before = made[PROMPT:], made[: PROMPT - 16]
        starts = [i for i in range(len(before)) if made[i : i + AHEAD] == answer and i + AHEAD <= len(before)]
        assert starts, "the continuation stands in the prompt"
        at = starts[0]
        assert made[PROMPT - 16 : PROMPT] == made[at - 16 : at], "the prompt's end leads up to it"


def test_recall_asks_for_facts_that_are_there(augmenter: Augmenter, tokenizer: Tokenizer) -> None:
    for seed, row in enumerate(rows(tokenizer, 10)):
        made = augmenter.with_recall(row, random.Random(seed))
        assert made is not None and len(made) == len(row)
        prompt = tokenizer.decode(made[:PROMPT], skip_special=False)
        answer = tokenizer.decode(made[PROMPT:], skip_special=False)
        assert prompt.startswith("<|im_start|>user\n") and prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
        facts = re.findall(r"The [a-z ]+ of the [a-z ]+ is \d+\.", prompt)
        assert facts and answer.startswith("The ") and answer[:20] in " ".join(facts)
        question = prompt[prompt.rindex("What is the") :]
        for fact in facts:
            name = re.search(r"of the ([a-z ]+) is", fact)
            assert name is not None and name[1] in question


def test_a_model_without_a_chat_format(models: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "base", "llama", num_hidden_layers=1)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = open_checkpoint(folder).tokenizer()
    assert not tokenizer.has_chat_template
    made = Augmenter(tokenizer, PROMPT, AHEAD).with_recall(rows(tokenizer, 1)[0], random.Random(0))
    assert made is not None and len(made) == PROMPT + AHEAD
    assert tokenizer.decode(made[:PROMPT]).endswith("Answer in whole sentences.\nAnswer:")


def test_shares_hold_for_few_rows_and_many(augmenter: Augmenter, tokenizer: Tokenizer) -> None:
    for count in (10, 40):
        plain = rows(tokenizer, count)
        changed = list(plain)
        kinds = augmenter.augment(changed, 0.2, 0.3, random.Random(0))
        assert abs(kinds.count("copy") - 0.2 * count) <= 1 and abs(kinds.count("recall") - 0.3 * count) <= 1
        assert [new is old for new, old in zip(changed, plain, strict=True)] == [kind == "plain" for kind in kinds]


def test_windows_too_short_stay_plain(tokenizer: Tokenizer) -> None:
    short = [row[:72] for row in rows(tokenizer, 8)]
    kinds = Augmenter(tokenizer, 32, 40).augment(short, 0.5, 0.5, random.Random(0))
    assert set(kinds) == {"plain"} and all(len(row) == 72 for row in short)
