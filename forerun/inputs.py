"""What callers may hand in: one prompt or several, one conversation or several. Knows no tokenizer and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.errors import BadRequest
from forerun.params import SamplingParams

Prompt = str | list[int]
Messages = list[dict[str, Any]]

KINDS = "a prompt is text or a list of token ids; a conversation is a list of {'role': ..., 'content': ...}"


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (isinstance(prompts, (list, tuple)) and prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, (list, tuple)):
        raise BadRequest(f"prompts cannot be a {type(prompts).__name__}: {prompts!r:.80}", KINDS)
    return list(prompts)  # type: ignore[arg-type]


def as_conversations(messages: Messages | list[Messages]) -> list[Messages]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise BadRequest(f"a conversation is a list of messages, got {messages!r:.80}", KINDS)
    if isinstance(messages[0], dict):
        return [messages]  # type: ignore[list-item]
    for conversation in messages:
        if not isinstance(conversation, (list, tuple)) or not conversation or not isinstance(conversation[0], dict):
            raise BadRequest(f"a conversation is a list of messages, got {conversation!r:.80}", KINDS)
    return list(messages)  # type: ignore[arg-type]


def as_params(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise BadRequest(f"params must be SamplingParams, got {params!r:.80}", "pass SamplingParams(max_tokens=...)")
    return params
