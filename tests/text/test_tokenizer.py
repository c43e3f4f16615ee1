"""Text to ids and back: control tokens only when asked for, streams that never split a character."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from forerun.errors import BadRequest, UnsupportedModel
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.text.tokenizer import LONG_TEXT_CHARS, Tokenizer

TEXTS = [
    "",
    " ",
    "Plain words, and 12345.6789 numbers.",
    "  leading   and trailing spaces  \t\n\n x\r\n",
    "Grüße aus Köln — déjà vu; 日本語と中文 한국어 العربية עברית हिन्दी",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 𝕳𝖊𝖑𝖑𝖔",
    "def f(x):\n    return x ** 2  # squares\n",
    "e\u0301 \u00a0 \u200b \x00 \x7f",
]


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Tokenizer:
    return open_checkpoint(smollm2).tokenizer()


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Tokenizer:
    return open_checkpoint(tiny_folder("llama")).tokenizer()


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Eight letters, a space, byte tokens, and a rule that drops one leading space, as Llama 2 has."""
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {piece: len(vocab) + i for i, piece in enumerate(["\u2581", *"abcdefgh", "ab", "\u2581ab"])}
    merges = [("a", "b"), ("\u2581", "ab")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, eos_ids=(1,))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(text: str, real: Tokenizer, folder: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (real, folder, sentencepiece):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


def test_long_texts_leave_other_threads_running(real: Tokenizer, folder: Tokenizer, sentencepiece: Tokenizer) -> None:
    """They have the tokens that they always had, and are encoded without Python's lock."""
    text = "The lamp turns é 灯 <|im_end|> " * (LONG_TEXT_CHARS // 20)
    for tokenizer in (real, folder, sentencepiece):
        for special in (False, True):
            ids = tokenizer.encode(text, add_special=special, parse_special=special)
            tokenizer.backend.encode_special_tokens = not special
            assert ids == tokenizer.backend.encode(text, add_special_tokens=special).ids
    counted, done = 0, threading.Event()

    def encode() -> None:
        real.encode(text * 20)
        done.set()

    threading.Thread(target=encode).start()
    while not done.is_set():
        counted += 1
        time.sleep(0.0001)
    assert counted > 5


def test_byte_fallback(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("ab\u00e9")
    assert [sentencepiece.token_bytes(i) for i in ids] == [b" ab", b"\xc3", b"\xa9"]
    assert sentencepiece.decode(ids[:2]) == "ab\ufffd"
    assert sentencepiece.decode([ids[0], ids[0]]) == "ab ab"  # only the first space is the tokenizer's own


def test_stream_equals_decode_on_any_ids(real: Tokenizer, folder: Tokenizer, sentencepiece: Tokenizer) -> None:
    """Random ids: broken characters, padding beyond the vocabulary, control tokens."""
    for tokenizer in (real, folder, sentencepiece):
        rng = random.Random(3)
        for _ in range(50):
            ids = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(40)]
            for skip in (True, False):
                stream = tokenizer.stream(skip)
                pieces = [stream.push(i) for i in ids]
                assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip_special=skip)
        every = list(range(tokenizer.vocab_size))
        whole = b"".join(map(tokenizer.token_bytes, every)).decode(errors="replace")
        assert tokenizer.decode(every, skip_special=False) == whole.removeprefix(" ")


def test_stream_never_splits_a_character(real: Tokenizer) -> None:
    text = "日本 👩‍👩‍👧‍👦 ok"
    stream, seen = real.stream(), ""
    ids = real.encode(text)
    assert len(ids) > len(text)  # most characters take several tokens
    for i in ids:
        seen += stream.push(i)
        assert text.startswith(seen)
    assert stream.flush() == "" and seen == text


def test_flush_replaces_what_is_incomplete(real: Tokenizer) -> None:
    stream = real.stream()
    first = real.encode("日")[0]
    assert stream.push(first) == "" and stream.flush() == "\ufffd" and stream.flush() == ""


def test_control_tokens_in_text_stay_text(real: Tokenizer) -> None:
    text = "a<|im_end|>b<|im_start|><|endoftext|>"
    ids = real.encode(text)
    assert not real.special_ids & set(ids) and real.decode(ids) == text
    trusted = real.encode(text, parse_special=True)
    assert [i for i in trusted if i in real.special_ids] == [2, 1, 0]
    assert real.decode(trusted) == "ab" and real.decode(trusted, skip_special=False) == text
    assert real.encode(text) == ids  # asking once changes nothing for others


def test_vocabulary(real: Tokenizer, folder: Tokenizer) -> None:
    assert real.vocab_size == 49152 and real.eos_ids == (2, 0) and real.bos_id == 1 and not real.add_bos
    assert folder.vocab_size == 512 and folder.eos_ids == (2,)
    assert real.token_bytes(49152) == b"" and real.token_bytes(-1) == b""
    assert real.token_bytes(real.encode(" ")[0]) == b" "


def test_adds_bos_where_the_model_wants_it(folder: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(folder.backend.to_str())
    start = ("<|endoftext|>", 0)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=[start[0], "$A"], special_tokens=[start])
    tokenizer = Tokenizer(backend, bos_id=0)
    assert tokenizer.add_bos and tokenizer.encode("ship", add_special=True) == [0, *tokenizer.encode("ship")]


@pytest.mark.parametrize("text", ["\ud800", 7, None, b"bytes"])
def test_not_text(text: object, real: Tokenizer) -> None:
    with pytest.raises(BadRequest):
        real.encode(text)  # type: ignore[arg-type]


def test_unknown_decoder() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer(backend)
