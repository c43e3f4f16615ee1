"""Builds a tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece-style BPE ("llama").

The file names its pre-tokenizer; one that is not known here is an error, because a wrong split changes every answer
without saying so. Does not know weights or architectures.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from forerun.errors import CorruptModel, ForerunError, ModelNotFound, UnsupportedModel
from forerun.models.config import ModelConfig
from forerun.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types
_KEY = "tokenizer.ggml."

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = ""  # the byte-level pre-tokenizer's own rule
_DIGITS = "digits"  # single digits first, then that rule

_SPLITS = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "mistral": _TEKKEN,
}
_WHOLE_WORDS = (_LLAMA3, _TEKKEN)  # a word that is a token is taken whole, whatever the merges say


def tokenizer_from_gguf(metadata: dict[str, Any], config: ModelConfig, source: str) -> Tokenizer:
    """The tokenizer a file's metadata describes, with its chat template."""
    tokens: list[str] = metadata.get(_KEY + "tokens") or []
    kind = metadata.get(_KEY + "model")
    if not tokens or kind is None:
        raise ModelNotFound(f"{source} has no tokenizer in its metadata", "use a GGUF file that was made with one")
    if kind not in ("gpt2", "llama"):
        hint = "choose another model"
        raise UnsupportedModel(f"{source}: tokenizer {kind!r} is not supported; supported are gpt2 and llama", hint)
    types: list[int] = metadata.get(_KEY + "token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CorruptModel(f"{source}: {len(types)} token types for {len(tokens)} tokens", "convert the model again")
    try:
        build = _byte_level if kind == "gpt2" else _sentencepiece
        backend = build(metadata, tokens, types, config, source)
    except ForerunError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception for a merge without its tokens
        raise CorruptModel(f"{source}: its tokenizer is inconsistent ({error})", "convert the model again") from error
    _add_tokens(backend, tokens, types)
    _add_ends(backend, metadata, tokens, kind, pooled=bool(config.pooling))
    return Tokenizer(
        backend,
        eos_ids=config.eos_ids,
        bos_id=config.bos_id,
        chat_template=_templates(metadata),
        template_tokens=_template_tokens(metadata, tokens),
        source=source,
    )


def _split(metadata: dict[str, Any], family: str, source: str) -> str:
    name = metadata.get(_KEY + "pre", "default")
    if name not in _SPLITS:
        problem = f"{source}: pre-tokenizer {name!r} is not supported; supported are {', '.join(_SPLITS)}"
        raise UnsupportedModel(problem, "use the model's safetensors folder, which carries its own tokenizer.json")
    return _QWEN2 if name == "default" and family.startswith("qwen") else _SPLITS[name]


def _byte_level(
    metadata: dict[str, Any], tokens: list[str], types: list[int], config: ModelConfig, source: str
) -> tokenizers.Tokenizer:
    split = _split(metadata, config.family, source)
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(_KEY + "merges", [])]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=split in _WHOLE_WORDS))
    if split == _QWEN2:
        backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in (_GPT2, _DIGITS))
    if split == _GPT2:
        backend.pre_tokenizer = byte_level
    else:
        first = pre_tokenizers.Digits(True) if split == _DIGITS else pre_tokenizers.Split(Regex(split), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    metadata: dict[str, Any], tokens: list[str], types: list[int], config: ModelConfig, source: str
) -> tokenizers.Tokenizer:
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    unknown = tokens[metadata.get(_KEY + "unknown_token_id", 0)]
    merges = _merges_by_score(vocab, metadata[_KEY + "scores"], types)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get(_KEY + "add_space_prefix", True))
    spaces = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges_by_score(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: as BPE merges, every way to split a token into two
    tokens, the best-scored token's first."""
    ranked = sorted((-scores[i], i, token) for token, i in vocab.items() if types[i] == 1 and len(token) > 1)
    return [
        (token[:cut], token[cut:])
        for _, _, token in ranked
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens (special) and user-defined ones (matched in any text) are found before anything is split."""
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
    )


def _add_ends(
    backend: tokenizers.Tokenizer, metadata: dict[str, Any], tokens: list[str], kind: str, pooled: bool
) -> None:
    bos = metadata.get(_KEY + "bos_token_id")
    by_default = kind == "llama" or metadata.get(_KEY + "pre") in ("llama-bpe", "tekken")
    before = [bos] if bos is not None and metadata.get(_KEY + "add_bos_token", by_default) else []
    eos = metadata.get(_KEY + "eos_token_id")
    # Only where texts are embedded: a prompt that ends with it would be answered by nothing
    after = [eos] if pooled and eos is not None and metadata.get(_KEY + "add_eos_token") else []
    if before or after:
        single = [*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)]
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(tokens[i], i) for i in {*before, *after}]
        )


def _templates(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    template = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates") or []
    if not names:
        return template
    named = {name: metadata[f"tokenizer.chat_template.{name}"] for name in names}
    return named | ({"default": template} if template else {})


def _template_tokens(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    """The names a template may use: bos_token, eos_token, unk_token, pad_token."""
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {key: metadata.get(f"{_KEY}{name}_token_id") for key, name in ids.items()}
    return {key: tokens[i] for key, i in found.items() if i is not None and i < len(tokens)}
