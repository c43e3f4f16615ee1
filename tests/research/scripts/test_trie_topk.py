"""The study of tries beside transformers: both sides score the same items."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun import LLM, BadRequest
from forerun.decode.trie import TokenTrie
from forerun_research.scripts.trie_topk import other_model, transformers_beams

PROMPT = [41, 42, 43]


def test_masked_beams_of_transformers_find_the_items_of_the_search(
    tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_folder("llama")
    trie = TokenTrie.build([list(ids) for ids in itertools.product(range(30, 36), repeat=3)])
    with LLM(folder, dtype="float32", max_model_len=256, quiet=True) as llm:
        ours = [ranked.item for ranked in llm.topk(PROMPT, trie, 4).items]
    transformers_beams(other_model(str(folder), 1), PROMPT, trie, ours, 1.0, 1)
    assert "4 of 4 the same" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(BadRequest, match="several lengths"):
        other_model(str(folder), 2)
