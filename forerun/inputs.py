"""What callers may hand in: one prompt or several, one conversation or several, and how weights are held. Knows no
tokenizer and no model.
"""

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


DTYPES = {  # as others write them: our name of the mode
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "float16": "fp16",
    "half": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "int8": "int8",
}


def weights_mode(dtype: object, quantization: str | None) -> str:
    """The mode that `dtype` (a name or a torch dtype) and `quantization` ask for together."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise BadRequest(f"dtype is {dtype!r:.80}", "use auto, float32, float16, bfloat16 or int8")
    mode = DTYPES[name]
    if quantization is None:
        return mode
    if quantization != "int8":
        raise BadRequest(
            f"quantization is {quantization!r:.80}", "use int8, or None: files that are quantised are read as they are"
        )
    if mode not in ("auto", "int8"):
        raise BadRequest(f"dtype is {name!r} and quantization 'int8'", "leave one of them out")
    return "int8"


def check_counts(**given: int | None) -> None:
    """Refuse what is neither None nor a whole number of at least 1."""
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise BadRequest(
                f"{name} is {value!r:.80}, it must be a whole number of at least 1",
                f"leave {name} out to have it chosen",
            )
