"""What clients may send, as OpenAI's reference words it, with Forerun's own options under `forerun`.

Types are strict (no text for numbers) and unknown fields are refused: a field that had no effect would be a lie. Limits
of values are those of `SamplingParams`. Knows no engine and no tokenizer.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from forerun.errors import BadRequest
from forerun.params import Grammar, Prefill, SamplingParams, Speculation

ROLES = {"developer": "system"}  # what a role is called in chat templates


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class PrefillOptions(_Model):
    """`Prefill`, field by field."""

    mode: Literal["exact", "speculative", "provisional"] = "exact"
    budget: float | None = None
    quality: float | None = None
    source: str = "auto"
    chooser: str = "auto"
    allow_exact: bool = False

    def prefill(self) -> Prefill:
        return Prefill(**self.model_dump())


class SpeculateOptions(_Model):
    """`Speculation`, field by field."""

    drafter: str = "auto"
    nodes: int = 64
    depth: int = 0
    verify: str = "auto"
    bound: float = 0.0

    def speculation(self) -> Speculation:
        return Speculation(**self.model_dump())


class ForerunOptions(_Model):
    """Forerun's own part of a request; clients that know nothing of it leave it out."""

    prefill: Literal["exact", "speculative", "provisional"] | PrefillOptions = "exact"
    speculate: str | SpeculateOptions = "auto"
    statistics: bool = False  # the answer comes with all that was counted
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False

    def params(self) -> dict[str, Any]:
        prefill = self.prefill.prefill() if isinstance(self.prefill, PrefillOptions) else Prefill(self.prefill)
        guess = self.speculate
        return {
            "prefill": prefill,
            "speculate": guess.speculation() if isinstance(guess, SpeculateOptions) else Speculation(guess),
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
        }


class StreamOptions(_Model):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against readers of encrypted lengths: never sent


class JsonSchema(_Model):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None  # answers always fit the schema


class ResponseFormat(_Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema_ is None:
                raise BadRequest("response_format has no json_schema.schema", "give the schema, or use json_object")
            return Grammar("json_schema", json.dumps(self.json_schema.schema_))
        return Grammar("json_object") if self.type == "json_object" else None


class TextPart(_Model):
    type: Literal["text"]
    text: str


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None  # no template of ours shows it
    refusal: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Asked(_Model):
    """What both kinds of request have."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    forerun: ForerunOptions = Field(default_factory=ForerunOptions)
    # Accepted because many clients send them; about accounts and storage, of which there are none here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def _params(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        """`None` is as good as leaving a field out; what is left out is as OpenAI has it, temperature 1 above all."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is about streams, and stream is not true", "leave it out")
        given = {name: getattr(self, name) for name in ("n", "top_p", "seed", "presence_penalty", "frequency_penalty")}
        values = {name: value for name, value in given.items() if value is not None}
        values["temperature"] = 1.0 if self.temperature is None else self.temperature
        if max_tokens is not None:
            values["max_tokens"] = max_tokens
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        bias = {_token(name): value for name, value in (self.logit_bias or {}).items()}
        return SamplingParams(stop=tuple(stop), logit_bias=bias, **values, **self.forerun.params(), **more)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Asked):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None

    def params(self, room: int) -> SamplingParams:
        """`room`: longest answer where no length is asked for."""
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", "set logprobs, or leave top_logprobs out")
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._params(
            room if asked is None else asked,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=self.response_format.grammar() if self.response_format else None,
        )

    def conversation(self) -> list[dict[str, str]]:
        return [{"role": ROLES.get(message.role, message.role), "content": message.text} for message in self.messages]


class CompletionRequest(_Asked):
    prompt: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1, max_length=1024)]
    logprobs: int | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    def params(self, room: int) -> SamplingParams:
        return self._params(16 if self.max_tokens is None else self.max_tokens, logprobs=self.logprobs)

    def prompts(self) -> list[Any]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


def _token(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise BadRequest(f"logit_bias maps token ids to numbers, {name!r:.40} is no token id", "use whole numbers")
    return int(name)
