"""Embeddings: those of transformers for models that were trained to embed, and a refusal by all others."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel

from forerun import LLM
from forerun.models.formats.checkpoint import open_checkpoint
from tests import tiny
from tests.serve.common import NAME, Running, error, running

TEXTS = ["The lamp turns", "The keeper counts the ships of the pier. " * 9]
MODES = {"mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}


def write_pooling(folder: Path, mode: str) -> Path:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    values = {name: key == mode for key, name in MODES.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(values))
    return folder


def expected(folder: Path, ids: list[int], mode: str) -> np.ndarray:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    vector = states[-1] if mode == "last" else states.mean(0)
    return torch.nn.functional.normalize(vector, dim=0).numpy()


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_vectors_are_those_of_transformers(tmp_path: Path, mode: str, dtype: str):
    """Also of a text of several pieces, and where weights are rotated (int8)."""
    folder = write_pooling(tiny.write_folder(tmp_path / "qwen3", "qwen3"), mode)
    with LLM(str(folder), dtype=dtype, threads=1, quiet=True, kv_cache_tokens=2048) as llm, running(llm) as made:
        free = llm.engine.pool.free
        client = made.client()
        found = client.embeddings.create(model=NAME, input=TEXTS)  # the client asks for base64
        ids = [llm.encode(text) for text in TEXTS]
        assert found.usage.prompt_tokens == sum(map(len, ids)) and max(map(len, ids)) > 100
        for index, row in enumerate(found.data):
            assert row.index == index and len(row.embedding) == llm.config.hidden_size
            likeness = float(np.dot(row.embedding, expected(folder, ids[index], mode)))
            assert likeness > (0.99999 if dtype == "float32" else 0.99)
        given = made.post("/v1/embeddings", {"input": ids[0], "dimensions": 8, "encoding_format": "float"}).json()
        short = np.array(found.data[0].embedding[:8])
        assert given["data"][0]["embedding"] == pytest.approx((short / np.linalg.norm(short)).tolist(), abs=1e-5)
        raw = made.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json()["data"][0]
        assert np.frombuffer(base64.b64decode(raw["embedding"]), "<f4") == pytest.approx(
            found.data[0].embedding, abs=1e-5
        )
        for wrong in ("", [], [[]], [10**6]):
            error(made.post("/v1/embeddings", {"input": wrong}), 400)
        error(made.post("/v1/embeddings", {"input": "x", "dimensions": 10**6}), 400)
        assert error(made.post("/v1/embeddings", {"input": [5] * 5000}), 400)["code"] == "context_length_exceeded"
        assert llm.engine.pool.free == free and not llm.engine.leases


def test_models_that_write_have_no_embeddings(served: Running):
    with pytest.raises(openai.InternalServerError, match="no embedding model"):
        served.client().with_options(max_retries=0).embeddings.create(model=NAME, input="x")


def test_what_models_say_about_themselves(tmp_path: Path, tiny_folder: Callable[[str], Path]):
    folder = tiny.write_folder(tmp_path / "qwen3", "qwen3")
    assert open_checkpoint(folder).config.pooling == ""
    assert open_checkpoint(write_pooling(folder, "last")).config.pooling == "last"
    (folder / "2_Dense").mkdir()
    assert open_checkpoint(folder).config.pooling == ""  # one more matrix, which is not read
    keys = {"pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    embeds = open_checkpoint(tiny.write_gguf(tmp_path / "embeds.gguf", tiny_folder("qwen3"), metadata=keys))
    del keys["pooling_type"]
    writes = open_checkpoint(tiny.write_gguf(tmp_path / "writes.gguf", tiny_folder("qwen3"), metadata=keys))
    assert (embeds.config.pooling, writes.config.pooling) == ("last", "")
    ids = writes.tokenizer().encode("The lamp", add_special=True)
    assert embeds.tokenizer().encode("The lamp", add_special=True) == [*ids, embeds.config.eos_ids[0]]
