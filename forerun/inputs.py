"""What callers may hand in: one prompt or several, one conversation or several, and how weights are held. Knows no
tokenizer and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from forerun.errors import BadRequest
from forerun.models.cpu.importance import WeightGoal
from forerun.options import check_number, parse_bytes
from forerun.params import Prefill, SamplingParams
from forerun.renamed import SAMPLING_ARGUMENTS, with_new_names

if TYPE_CHECKING:
    import torch

Prompt = str | list[int]
Messages = list[dict[str, Any]]
Asked = Sequence[Prompt] | Sequence[Messages]
OneOrMore = SamplingParams | Sequence[SamplingParams] | None

KINDS = "a prompt is text or a list of token ids; a conversation, for chat, is a list of {'role': ..., 'content': ...}"
ELSEWHERE = {  # what is no field of `SamplingParams` here: where it is instead
    "sampling_params": "pass it as params",
    "use_tqdm": "call it progress",
    "stream": "call llm.stream or llm.astream",
    "min_tokens": "use ignore_eos with max_tokens, or logit_bias against the end token",
    "guided_decoding": "use grammar: Grammar.json(schema), Grammar.regex(pattern)",
    "structured_outputs": "use grammar: Grammar.json(schema), Grammar.regex(pattern)",
    "response_format": "use grammar: Grammar.json(schema)",
    "max_completion_tokens": "call it max_tokens",
} | {entry.name: f"pass prefill=Prefill('speculative', {entry.name}=...)" for entry in fields(Prefill)}


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (isinstance(prompts, (list, tuple)) and prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, (list, tuple)):
        raise BadRequest(f"prompts cannot be a {type(prompts).__name__}: {prompts!r:.80}", KINDS)
    return list(prompts)  # type: ignore[arg-type]


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise BadRequest(f"a conversation is a list of messages, got {messages!r:.80}", KINDS)
    if isinstance(messages[0], dict):
        return [messages]  # type: ignore[list-item]
    for conversation in messages:
        if not isinstance(conversation, (list, tuple)) or not conversation or not isinstance(conversation[0], dict):
            raise BadRequest(f"a conversation is a list of messages, got {conversation!r:.80}", KINDS)
    return list(messages)  # type: ignore[arg-type]


def as_token_ids(prompt: object) -> list[int]:
    """A prompt that is given as token ids; whether a vocabulary has them is checked with the request."""
    if not isinstance(prompt, (list, tuple)):
        raise BadRequest(f"a prompt cannot be a {type(prompt).__name__}: {prompt!r:.80}", KINDS)
    if list(map(type, prompt)).count(int) < len(prompt):  # bool is an int to Python, but no token id
        token = next(token for token in prompt if type(token) is not int)
        raise BadRequest(f"a token id cannot be a {type(token).__name__}: {token!r:.80}", KINDS)
    return list(prompt)


def as_params(params: SamplingParams | None, options: Mapping[str, Any] | None = None) -> SamplingParams:
    """`params`, or the defaults, with the fields that `options` name replaced."""
    if params is None:
        params = SamplingParams()
    if not isinstance(params, SamplingParams):
        raise BadRequest(f"params must be SamplingParams, got {params!r:.80}", "pass SamplingParams(max_tokens=...)")
    if not options:
        return params
    options, known = with_new_names(options, SAMPLING_ARGUMENTS), [entry.name for entry in fields(SamplingParams)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise BadRequest(f"no sampling parameter is called {name!r}", ELSEWHERE.get(name, hint))
    return replace(params, **options)


def params_for_each(params: OneOrMore, count: int, options: Mapping[str, Any]) -> list[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts."""
    if isinstance(params, (list, tuple)):
        if len(params) != count:
            raise BadRequest(f"there are {count} prompts and {len(params)} params", "give one for all, or one for each")
        return [as_params(each, options) for each in params]
    return [as_params(params, options)] * count  # type: ignore[arg-type]


_SPELLINGS = {"float32": ("float", "fp32"), "fp16": ("float16", "half"), "bf16": ("bfloat16",), "auto": (), "int8": ()}
DTYPES = {name: mode for mode, others in _SPELLINGS.items() for name in (mode, *others)}  # as others write them


def weights_mode(dtype: object, quantization: str | None) -> str:
    """The mode that `dtype` (a name or a torch dtype) and `quantization` ask for together."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise BadRequest(f"dtype is {dtype!r:.80}", "use auto, float32, float16, bfloat16 or int8")
    mode = DTYPES[name]
    if quantization in (None, "auto"):
        return mode
    if quantization not in ("int8", "file", "fp16", "float32"):
        hint = "use file (a GGUF file's own blocks), int8, fp16, float32, or auto: what is faster here"
        raise BadRequest(f"quantization is {quantization!r:.80}", hint)
    if mode not in ("auto", quantization):
        raise BadRequest(f"dtype is {name!r} and quantization {quantization!r}", "leave one of them out")
    return quantization


def weight_goal(
    memory: str | int | None, quality: float | None, weights: str, device: torch.device
) -> WeightGoal | None:
    """What bits of layers are to be chosen for; None: they are not. `weights`: what `weights_mode` found."""
    if memory is None and quality is None:
        return None
    if memory is not None and quality is not None:
        problem = f"memory is {memory!r:.40} and quality {quality!r:.40}: either decides the bits of all layers"
        raise BadRequest(problem, "leave one of them out")
    name = "quality" if memory is None else "memory"
    if device.type != "cpu":
        raise BadRequest(f"{name} chooses bits of layers for a CPU, and the device is {device.type}", "use device=cpu")
    if weights != "auto":
        raise BadRequest(f"{name} chooses the bits of layers, and they are given: {weights}", "leave one of them out")
    if quality is not None:
        hint = "it is a KL divergence from the float weights: use 0.01, for instance; smaller is better"
        check_number("quality", quality, 0, 10, open_low=True, hint=hint)
        return WeightGoal(quality=float(quality))
    size = parse_bytes("memory", memory) if isinstance(memory, str) else memory
    check_number("memory", size, 1, whole=True, hint="give a size such as 500M, 1.2G or a number of bytes")
    return WeightGoal(memory=size)


def check_counts(**given: int | None) -> None:
    """Refuse what is neither None nor a whole number of at least 1."""
    for name, value in given.items():
        if value is not None:
            check_number(name, value, 1, whole=True, hint=f"leave {name} out for the default")


def check_switches(**given: bool) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise BadRequest(f"{name} is {value!r:.80}, it must be True or False", "leave it out")
