"""`suffix`: text is generated between two texts, by models that were trained to fill in the middle.

Such models have control tokens for that in their vocabulary. Knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import BadRequest
from forerun.text.tokenizer import Tokenizer

# Prefix, suffix, middle, then tokens that end the middle where a model goes on to another file
_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<file_sep>"),
    ("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),
)


@dataclass(frozen=True)
class FillPrompt:
    prefix: str
    suffix: str

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        before, after, middle = fill_tokens(tokenizer)[:3]
        return [before, *tokenizer.encode(self.prefix), after, *tokenizer.encode(self.suffix), middle]


def fill_tokens(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens around the two texts, then those that end what is between them."""
    for form in _FORMS:
        ids = [tokenizer.backend.token_to_id(name) for name in form]
        if None not in ids[:3]:
            return [token for token in ids if token is not None]
    hint = "leave suffix out, or use a model such as qwen2.5-coder-1.5b-instruct"
    problem = "suffix needs a model that fills in the middle, and this one's vocabulary has no tokens for it"
    raise BadRequest(problem, hint)
