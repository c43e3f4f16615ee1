"""Text to token ids and back, over the `tokenizers` library.

Control tokens come only from templates or from callers that ask (`parse_special`); the same characters in user text
stay text. Decoding is defined on bytes, so a stream of single tokens and one decode of all of them give the same
string. Does not know model files: loaders hand it a built `tokenizers.Tokenizer`.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from forerun.errors import BadRequest, CorruptModel, ModelNotFound, UnsupportedModel
from forerun.text.chat_template import ChatTemplate

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A text from so many characters on is encoded without Python's lock, as a batch of one (some 5 ms): other threads, the
# one that steps the engine above all, would wait for it
LONG_TEXT_CHARS = 1 << 14
_FOLDER_HINT = "fetch the model's tokenizer.json again, or copy it into the folder"


class Tokenizer:
    """A model's tokenizer with its chat template and the ids that end an answer."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        chat_template: str | dict[str, str] | None = None,
        template_tokens: dict[str, str] | None = None,
        source: str = "the model",
    ) -> None:
        self.backend, self.source = backend, source
        self.eos_ids, self.bos_id = tuple(eos_ids), bos_id
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._byte_level, self._strip = _decoding(backend, source)
        self._bytes: dict[int, bytes] = {}
        self._lock = threading.Lock()  # the backend's special-token switch is state shared by all callers
        specials = [self._added[i] for i in self.special_ids]
        self._chat = ChatTemplate(chat_template, template_tokens or {}, specials, source) if chat_template else None

    @cached_property
    def vocab_size(self) -> int:
        """The largest id, and one: ids may have gaps."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def from_folder(cls, folder: Path, *, eos_ids: Iterable[int] = (), bos_id: int | None = None) -> Tokenizer:
        """The tokenizer of a Hugging Face folder: tokenizer.json, and the template and token names beside it."""
        path, source = folder / "tokenizer.json", folder.resolve().name
        if not path.exists():
            raise ModelNotFound(f"{source} has no tokenizer.json", _FOLDER_HINT)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every kind of damage
            raise CorruptModel(f"{source}: tokenizer.json cannot be read ({error})", _FOLDER_HINT) from error
        backend.no_truncation()
        backend.no_padding()
        settings = _settings(folder, source)
        names = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        named = {key: text for key, text in names.items() if text}
        ends = list(eos_ids)
        declared = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
        if declared is not None and declared not in ends:
            ends.append(declared)
        if bos_id is None and "bos_token" in named:
            bos_id = backend.token_to_id(named["bos_token"])
        template = _folder_template(folder, settings)
        return cls(backend, eos_ids=ends, bos_id=bos_id, chat_template=template, template_tokens=named, source=source)

    def save(self, folder: Path) -> None:
        """What `from_folder` reads."""
        self.backend.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.eos_ids:
            settings["eos_token"] = self.backend.id_to_token(self.eos_ids[0])
        settings |= self._chat.folder_settings() if self._chat is not None else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Ids of a text. `add_special` adds what the model expects around a text (BOS); `parse_special` lets control
        tokens written in the text become control tokens, which is for trusted text only."""
        if not isinstance(text, str):
            raise BadRequest(f"text to encode must be a string, got {type(text).__name__}", "pass text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            hint = "pass valid Unicode"
            raise BadRequest(f"the text has a lone surrogate at character {error.start}", hint) from error
        with self._lock:
            self.backend.encode_special_tokens = not parse_special
            if len(text) < LONG_TEXT_CHARS:
                return self.backend.encode(text, add_special_tokens=add_special).ids
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """All at once: hundreds of thousands of ids take a fraction of what a stream of them does."""
        skipped, known = self.special_ids if skip_special else frozenset(), self.token_bytes
        text = b"".join([known(token) for token in ids if token not in skipped]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strip else text

    def stream(self, skip_special: bool = True) -> Detokenizer:
        return Detokenizer(self, skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; an id without a token (vocabulary padding) stands for none."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._compute_bytes(token)
        return known

    def _compute_bytes(self, token: int) -> bytes:
        text = self.backend.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        if self._byte_level:
            known = token not in self._added and all(char in _BYTE_OF for char in text)
            return bytes(_BYTE_OF[char] for char in text) if known else text.encode("utf-8")
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode("utf-8")

    def same_tokens(self, other: Tokenizer) -> bool:
        """Whether an id means the same text in both."""
        return self.backend.get_vocab(with_added_tokens=True) == other.backend.get_vocab(with_added_tokens=True)

    @property
    def add_bos(self) -> bool:
        """Whether the model expects its BOS token before a plain text."""
        return self.bos_id is not None and self.encode("", add_special=True)[:1] == [self.bos_id]

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    @property
    def tool_template(self) -> str:
        """The text of the chat template for conversations with tools; empty where there is none."""
        return self._chat.tool_text if self._chat is not None else ""

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a conversation in the model's own format; nothing inside a message can become a control token."""
        pieces = self._template().render(messages, tools, add_generation_prompt)
        return [i for text, trusted in pieces for i in self.encode(text, parse_special=trusted)]

    def plain_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with text as their contents; raises where the chat template has no use for one."""
        return self._template().plain(messages)

    def _template(self) -> ChatTemplate:
        if self._chat is None:
            hint = "let it continue plain text (`forerun generate --raw`, `llm.generate`), or use an instruct model"
            raise BadRequest(f"{self.source} has no chat template: it is not a chat model", hint)
        return self._chat


class NoTokenizer(Tokenizer):
    """In place of a tokenizer, for models whose tokens are not text: ids in, ids out."""

    def __init__(self, source: str, eos_ids: Iterable[int]) -> None:
        self.source, self.eos_ids, self.bos_id, self._chat = source, tuple(eos_ids), None, None
        self.special_ids, self.vocab_size = frozenset(), 0

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        raise self._error(f"text ({text!r:.40})")

    def save(self, folder: Path) -> None:
        pass  # there is nothing to write

    def token_bytes(self, token: int) -> bytes:
        return b""

    def same_tokens(self, other: Tokenizer) -> bool:
        return isinstance(other, NoTokenizer)

    def _template(self) -> ChatTemplate:
        raise self._error("a conversation")

    def _error(self, what: str) -> BadRequest:
        hint = "give a list of token ids, or open the model without skip_tokenizer_init"
        return BadRequest(f"{self.source} was opened without a tokenizer, and {what} needs one", hint)


class Detokenizer:
    """Turns a stream of ids into text: `push` returns what is certain so far, `flush` the rest."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer._strip  # a first space that the tokenizer put there itself

    def push(self, token: int) -> str:
        return "" if token in self._skip else self._first(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def flush(self) -> str:
        """The replacement of a character left incomplete, if any; the stream can go on afterwards."""
        text = self._first(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        return text

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the others for 256 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _decoding(backend: tokenizers.Tokenizer, source: str) -> tuple[bool, bool]:
    """Whether tokens are byte-level, and whether decoding drops one leading space, read off the decoder's own JSON."""
    if backend.decoder is None:
        raise UnsupportedModel(f"{source}: its tokenizer has no decoder", "use a byte-level BPE or SentencePiece model")
    rule = json.loads(backend.decoder.__getstate__())
    steps = rule["decoders"] if rule["type"] == "Sequence" else [rule]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return True, False
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        hint = "use a byte-level BPE or SentencePiece model"
        raise UnsupportedModel(f"{source}: tokenizers that decode with {' + '.join(kinds)} are not supported", hint)
    space = [step for step in steps if step["type"] == "Metaspace"]
    prefixed = bool(space) and space[0].get("prepend_scheme", "always") != "never"
    return False, prefixed or any(step["type"] == "Strip" and step["start"] > 0 for step in steps)


def _settings(folder: Path, source: str) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; either may be absent."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.exists():
            try:
                merged |= json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, TypeError) as error:
                raise CorruptModel(f"{source}: {name} is not a JSON object ({error})", _FOLDER_HINT) from error
    return merged


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _folder_template(folder: Path, settings: dict[str, Any]) -> str | dict[str, str] | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template
