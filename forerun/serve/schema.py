"""What clients may send, as OpenAI's reference words it, with Forerun's own options under `forerun`.

Types are strict (no text for numbers) and unknown fields are refused: a field that had no effect would be a lie. Limits
of values are those of `SamplingParams`. Knows no engine and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from forerun.errors import BadRequest
from forerun.params import MAX_LOGPROBS, Grammar, Prefill, SamplingParams, Speculation
from forerun.serve.tool_schema import MOST_TOOLS, Choice, Tool, ToolCall, chosen
from forerun.serve.tools import Chat, Dialect, ToolUse, chat

MAX_TOKENS = 10_000_000
ROLES = {"developer": "system"}  # what a role is called in chat templates


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


def _from(low: float, high: float) -> Any:
    """Limits for readers of the OpenAPI document; `SamplingParams` keeps them, and says them in its own words."""
    return Field(default=None, json_schema_extra={"minimum": low, "maximum": high})


def _no_dots(name: str) -> str:
    if name in (".", ".."):  # clients take them for steps in a path: the session could not be deleted
        raise ValueError(f"a session cannot be called {name}")
    return name


SessionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^\S(.*\S)?$"), AfterValidator(_no_dots)]


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


class SessionOptions(_Model):
    """A conversation that the server keeps."""

    name: SessionName
    ttl: float | None = None  # seconds that its K/V stays in the pool after a turn
    create: bool = True  # False: an unknown name is an error


class ForerunOptions(_Model):
    """Forerun's own part of a request; clients that know nothing of it leave it out."""

    prefill: Literal["exact", "speculative", "provisional"] | PrefillOptions = "exact"
    speculate: str | SpeculateOptions = "auto"
    statistics: bool | Literal["steps"] = False  # all that was counted; with steps: each of them, and live counts
    session: SessionName | SessionOptions | None = None
    cache: bool = True  # False: reads nothing that other requests left, and leaves nothing for them
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False

    @property
    def conversation(self) -> SessionOptions | None:
        if self.session is not None and not self.cache:
            raise BadRequest("a session is in the cache, and cache is false", "leave one of them out")
        return SessionOptions(name=self.session) if isinstance(self.session, str) else self.session

    def params(self) -> dict[str, Any]:
        prefill = self.prefill.prefill() if isinstance(self.prefill, PrefillOptions) else Prefill(self.prefill)
        guess = self.speculate
        return {
            "prefill": prefill,
            "cache": self.cache,
            "timeline": self.statistics == "steps",
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
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None  # no template of ours shows it
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None
    # What answers carry: clients send them back as they came
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def template_role(self) -> str:
        return ROLES.get(self.role, self.role)

    def check(self) -> None:
        """What fits together; types alone do not say."""
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise BadRequest(f"a message of role {self.role} has no content", "give it text")
        if self.tool_calls and self.role != "assistant":
            raise BadRequest(f"a message of role {self.role} has tool_calls", "only those of role assistant call tools")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise BadRequest(f"a message of role {self.role} and its tool_call_id", "only results have one, and all do")


class _Asked(_Model):
    """What both kinds of request have."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = _from(1, 256)
    temperature: float | None = _from(0, 100)
    top_p: float | None = _from(0.01, 1)
    max_tokens: int | None = _from(1, MAX_TOKENS)
    stop: str | list[str] | None = None
    seed: int | None = _from(-(2**63), 2**64)
    presence_penalty: float | None = _from(-2, 2)
    frequency_penalty: float | None = _from(-2, 2)
    logit_bias: dict[str, float] | None = None
    forerun: ForerunOptions = Field(default_factory=ForerunOptions)
    # Accepted because many clients send them; about accounts and storage, of which there are none here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def choices(self) -> int:
        """Answers to each prompt. `params` refuses what is below 1."""
        return max(1, self.n or 1)

    def _params(self, max_tokens: int, room: int, **more: Any) -> SamplingParams:
        """`None` is as good as leaving a field out; what is left out is as the library has it."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is about streams, and stream is not true", "leave it out")
        names = ("n", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
        given = {name: getattr(self, name) for name in names}
        values = {name: value for name, value in given.items() if value is not None}
        values["max_tokens"] = min(max_tokens, room) if max_tokens <= MAX_TOKENS else max_tokens
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        bias = {_token(name): value for name, value in (self.logit_bias or {}).items()}
        return SamplingParams(stop=tuple(stop), logit_bias=bias, **values, **self.forerun.params(), **more)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Prediction(_Model):
    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Asked):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = _from(1, MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = _from(0, MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MOST_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None  # what the answer may well be; see `SamplingParams.prediction`

    def params(self, room: int, tools: ToolUse | None, encode: Callable[[str], list[int]]) -> SamplingParams:
        """`room`: tokens that the context has left for the answer."""
        # `SamplingParams` has other names for these: its errors would name fields that the request does not have
        for name, low, high in (("max_completion_tokens", 1, MAX_TOKENS), ("top_logprobs", 0, MAX_LOGPROBS)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                hint = "choose a value in that range"
                raise BadRequest(f"{name} is {value}, allowed is from {low} to {high}", hint)
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", "set logprobs, or leave top_logprobs out")
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        longest = room if asked is None else asked
        grammar = self.response_format.grammar() if self.response_format else None
        return self._params(
            longest,
            room,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=grammar if tools is None else tools.grammar(grammar),
            prediction=tuple(encode(self.prediction.text)[: min(longest, room)]) if self.prediction else (),
        )

    def tool_use(self, dialect: Dialect) -> ToolUse | None:
        """None: the answer is text."""
        tools, must = chosen(self.tools, self.tool_choice, self.parallel_tool_calls)
        return ToolUse(dialect, tuple(tools), must, self.parallel_tool_calls is not False) if tools else None

    def continued(self, dialect: Dialect) -> Callable[[list[dict[str, Any]]], list[int]]:
        """How all messages of a session become a prompt of this request."""
        use, tokenizer = self.tool_use(dialect), dialect.tokenizer

        def encode(messages: list[dict[str, Any]]) -> list[int]:
            known = [Message.model_validate(message) for message in messages]
            return chat(dialect, known, use.tools if use else ()).encode(tokenizer)

        return encode

    def conversation(self, dialect: Dialect, whole: bool = True) -> Chat:
        """`whole`: every result must follow its call; what only goes on with a conversation may answer earlier ones."""
        called: set[str] = set()
        for message in self.messages:
            message.check()
            called |= {call.id for call in message.tool_calls or ()}
            if whole and message.tool_call_id is not None and message.tool_call_id not in called:
                hint = "send the assistant's message with the call before its result"
                raise BadRequest(f"no call before it has the tool_call_id {message.tool_call_id!r:.80}", hint)
        use = self.tool_use(dialect)
        return chat(dialect, self.messages, use.tools if use else ())


class CompletionRequest(_Asked):
    # a list of ids is one prompt, as long as the context allows; of others there may be so many
    prompt: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str] | list[list[int]], Field(min_length=1, max_length=1024)]
    )
    logprobs: int | None = _from(0, MAX_LOGPROBS)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    def params(self, room: int, tools: ToolUse | None, encode: Callable[[str], list[int]]) -> SamplingParams:
        return self._params(16 if self.max_tokens is None else self.max_tokens, room, logprobs=self.logprobs)

    def prompts(self) -> list[Any]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


def _token(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise BadRequest(f"logit_bias maps token ids to numbers, {name!r:.40} is no token id", "use whole numbers")
    return int(name)
