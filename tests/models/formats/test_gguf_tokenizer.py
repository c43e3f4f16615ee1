"""Tokenizers built from GGUF metadata: equal to the folder's own, SentencePiece rules, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import CorruptModel, ModelNotFound, UnsupportedModel
from forerun.models.config import ModelConfig
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.gguf_tokenizer import tokenizer_from_gguf
from tests.tiny import TEXT

CONFIG = ModelConfig("llama", 300, 64, 1, 4, 4, 16, 64, 128, eos_ids=(2,), bos_id=1)


def byte_level(**keys: Any) -> dict[str, Any]:
    alphabet = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = ["<|end|>", *alphabet, "Ġ1", "12", "123", "ab", "<tool>", "[PAD]"]
    types = [3] + [1] * (len(tokens) - 3) + [4, 5]
    base = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types}
    base["merges"] = ["Ġ 1", "1 2", "12 3", "a b"]
    return {f"tokenizer.ggml.{key}": value for key, value in (base | keys).items()}


def pieces(metadata: dict[str, Any], text: str) -> list[str | None]:
    tokenizer = tokenizer_from_gguf(metadata, CONFIG, "m")
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)]


def test_equals_the_folder(tiny_folder: Callable[[str], Path], tiny_gguf: Callable[..., Path]) -> None:
    folder, file = open_checkpoint(tiny_folder("qwen3")).tokenizer(), open_checkpoint(tiny_gguf("qwen3")).tokenizer()
    messages = [{"role": "user", "content": TEXT}]
    assert file.encode(TEXT) == folder.encode(TEXT) and len(file.encode(TEXT)) < len(TEXT) / 2
    assert file.apply_chat_template(messages) == folder.apply_chat_template(messages)
    assert file.vocab_size == folder.vocab_size and file.bos_id == folder.bos_id


@pytest.mark.parametrize(
    ("pre", "want"),
    [
        ("gpt-2", ["Ġ1", "2", "3", "4"]),
        ("smollm", ["Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["Ġ", "123", "4"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4"]),
        ("tekken", ["Ġ", "1", "2", "3", "4"]),
    ],
)
def test_pre_tokenizers_split_numbers_their_way(pre: str, want: list[str]) -> None:
    assert pieces(byte_level(pre=pre), " 1234") == want


def test_case_rule_of_tekken() -> None:
    """Only tekken parts words where the case changes."""
    keys = {"tokens": [*"abAB", "AB", "bA"], "token_type": [1] * 6, "merges": ["b A", "A B"]}
    assert pieces(byte_level(pre="qwen2", **keys), "abAB") == ["a", "bA", "B"]
    assert pieces(byte_level(pre="tekken", **keys), "abAB") == ["a", "b", "AB"]


def test_smollm2_numbers_and_text(smollm2: Path) -> None:
    tokenizer = open_checkpoint(smollm2).tokenizer()
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("in 2024")] == [b"in", b" ", b"2", b"0", b"2", b"4"]
    assert tokenizer.encode("<|im_start|>", parse_special=True) == [1]


def test_special_and_user_defined_tokens() -> None:
    assert pieces(byte_level(), "ab<tool>ab") == ["ab", "<tool>", "ab"]
    assert "<|end|>" not in pieces(byte_level(), "ab<|end|>")
    assert (
        tokenizer_from_gguf(byte_level(), CONFIG, "m").token_bytes(len(byte_level()["tokenizer.ggml.tokens"]) - 1)
        == b""
    )


def sentencepiece(**keys: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "abc", "\n\n", "  "]
    scores = [0.0] * len(tokens) + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0, 0.0, 0.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 8 + [4, 4]
    base = {"model": "llama", "tokens": tokens + words, "scores": scores, "token_type": types, "bos_token_id": 1}
    return {f"tokenizer.ggml.{key}": value for key, value in (base | keys).items()}


def test_sentencepiece_merges_by_score() -> None:
    metadata = sentencepiece(add_space_prefix=False)
    assert pieces(metadata, "abc") == ["abc"]  # bc scores best, then a + bc is abc
    assert pieces(metadata, "ab b") == ["ab", "\u2581", "b"]
    assert pieces(metadata, " a\n\nb") == ["\u2581a", "\n\n", "b"]
    assert pieces(metadata, "a  b") == ["a", "  ", "b"]
    assert pieces(metadata, "é") == ["<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_prefix(prefix: bool) -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece(add_space_prefix=prefix), CONFIG, "m")
    assert tokenizer.decode(tokenizer.encode("abc é a")) == "abc é a"
    assert tokenizer.token_bytes(tokenizer.encode("c")[0]) == (b" " if prefix else b"c")
    assert tokenizer.encode("a", add_special=True)[0] == 1 and tokenizer.add_bos
    assert not {1, 2} & set(tokenizer.encode("<s></s>"))


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({}, ModelNotFound, "no tokenizer"),
        (byte_level(model="t5"), UnsupportedModel, "'t5'"),
        (byte_level(pre="martian"), UnsupportedModel, "'martian' is not supported; supported are gpt-2"),
        (byte_level(token_type=[1, 1]), CorruptModel, "2 token types for"),
        (byte_level(merges=["no such"]), CorruptModel, "inconsistent"),
        (sentencepiece(scores=[0.0]), CorruptModel, "inconsistent"),
    ],
)
def test_refusals(metadata: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(metadata, CONFIG, "m")
