"""Request bodies as OpenAI's reference has them, with Forerun's own options under `forerun`.

Sampling, prefill and speculation options are derived from the dataclasses in `forerun.params`. Unknown fields are kept
aside (`unknown_fields`), those of the `forerun` object are refused. Knows no engine and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from forerun.errors import BadRequest
from forerun.options import check_number, field_of
from forerun.params import GRAMMAR_SAMPLING, PREFILL_MODES, Grammar, Prefill, SamplingParams, Speculation
from forerun.serve.derived import LenientModel, StrictModel, accepted, derived, described, documented
from forerun.serve.fill import FillPrompt
from forerun.serve.guided import GuidedFields, lark
from forerun.serve.tool_schema import MAX_TOOLS, NamedTool, Tool, ToolCall, ToolChoice, chosen
from forerun.serve.tools import ChatPrompt, ToolDialect, ToolUse, chat_prompt

MAX_TOKENS = field_of(SamplingParams, "max_tokens").metadata["high"]
MAX_CACHE_KEY_CHARS = 256
TEMPLATE_ROLES = {"developer": "system"}  # in chat templates


def _no_dots(name: str) -> str:
    if name in (".", ".."):  # clients resolve them in a path: the session could not be deleted
        raise ValueError(f"a session cannot be called {name}")
    return name


def _doc(options: type) -> str:
    """The first paragraph of a dataclass's docstring."""
    return " ".join((options.__doc__ or "").split("\n\n")[0].split())


SessionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^\S(.*\S)?$"), AfterValidator(_no_dots)]


PrefillMode: Any = Literal[PREFILL_MODES]
PrefillOptions: Any = derived("PrefillOptions", Prefill)
SpeculationOptions: Any = derived("SpeculationOptions", Speculation)
_ForerunFields: Any = derived(
    "_ForerunFields", SamplingParams, "cache", "top_k", "min_p", "repetition_penalty", "ignore_eos"
)
# OpenAI's names for fields of `SamplingParams`; left out, they are as the library has them
_SAMPLING = ("n", "temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
# Names that vLLM and llama.cpp have for more of them
_OWN_SAMPLING = ("top_k", "min_p", "repetition_penalty", "ignore_eos")
_SamplingFields: Any = derived(
    "_SamplingFields", SamplingParams, *_SAMPLING, *_OWN_SAMPLING, optional=True, base=LenientModel
)


class SessionOptions(StrictModel):
    """A conversation whose history the server stores."""

    name: SessionName
    ttl: float | None = Field(default=None, description="Seconds that its K/V stays in the pool after a turn.")
    create: bool = Field(default=True, description="False: an unknown name is an error.")
    allow_unsaved: bool = Field(
        default=False, description="Go on after a turn that could not be written to disk; else that is an error."
    )


class ForerunOptions(_ForerunFields):
    """Forerun's own options; all of them may be left out."""

    prefill: PrefillMode | PrefillOptions = Field(default=Prefill.mode, description=_doc(Prefill))
    speculation: str | SpeculationOptions = Field(default=Speculation.drafter, description=_doc(Speculation))
    statistics: bool | Literal["steps"] = Field(
        default=False, description="True: all counts and times; steps: of every step, and live counts in streams."
    )
    session: SessionName | SessionOptions | None = Field(default=None, description="A session's name, or its options.")
    grammar_sampling: Literal[GRAMMAR_SAMPLING] = Field(  # type: ignore[valid-type]
        default=Grammar.sampling, json_schema_extra=documented(Grammar, "sampling")
    )

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, given: Any) -> Any:
        """`speculate` is the name of `speculation` in 0.1, accepted until 0.3."""
        if not isinstance(given, dict) or "speculate" not in given or "speculation" in given:
            return given
        return {"speculation" if name == "speculate" else name: value for name, value in given.items()}

    @property
    def session_options(self) -> SessionOptions | None:
        if self.session is not None and not self.cache:
            raise BadRequest("a session is in the cache, and cache is false", "leave one of them out")
        return SessionOptions(name=self.session) if isinstance(self.session, str) else self.session

    def params(self) -> dict[str, Any]:
        prefill, speculation = self.prefill, self.speculation
        return {name: getattr(self, name) for name in _ForerunFields.model_fields} | {
            "prefill": prefill if isinstance(prefill, str) else Prefill(**prefill.model_dump()),
            "speculation": speculation if isinstance(speculation, str) else Speculation(**speculation.model_dump()),
            "timeline": self.statistics == "steps",
        }


class StreamOptions(LenientModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False  # vLLM's: counts so far in every chunk
    include_obfuscation: bool | None = False  # padding that hides lengths from network observers: never sent


class JsonSchema(LenientModel):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None  # outputs always fit the schema


class ResponseFormat(LenientModel):
    """OpenAI's types, and `regex` and `grammar` as other servers have them; `schema` beside json_object is
    llama.cpp's."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    regex: str | None = None
    grammar_: str | None = Field(default=None, alias="grammar", description="In Lark's notation, or in GBNF.")

    def grammar(self) -> Grammar | None:
        if self.type in ("json_object", "json_schema"):
            given = self.json_schema.schema_ if self.json_schema is not None else self.schema_
            if given is None and self.type == "json_schema":
                raise BadRequest("response_format has no json_schema.schema", "give the schema, or use json_object")
            return Grammar("json_object") if given is None else Grammar("json_schema", json.dumps(given))
        if self.type == "text":
            return None
        source = self.regex if self.type == "regex" else self.grammar_
        if source is None:
            raise BadRequest(f"response_format has no {self.type}", f"give it as response_format.{self.type}")
        return Grammar("regex", source) if self.type == "regex" else Grammar("lark", lark(source))


def joined(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class TextPart(LenientModel):
    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: Any = None  # as Anthropic's clients have it: see `prompt_pins`
    annotations: Any = None


_PassedOverFields: Any = accepted("_PassedOverFields", "refusal", "thinking", "signature", "data", "cache_control")


class PassedOverPart(_PassedOverFields):
    """A part of an answer that is sent back: not part of a prompt."""

    type: Literal["refusal", "thinking", "redacted_thinking"]
    text: ClassVar[str] = ""


Content = str | list[TextPart | PassedOverPart]
_ReturnedFields: Any = accepted(
    "_ReturnedFields", "annotations", "reasoning", "reasoning_content", "thinking_blocks", "provider_specific_fields"
)


class Message(_ReturnedFields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None  # not part of any chat template
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # As `_ReturnedFields`: of responses, of this server and of others, sent back unchanged; none is part of a prompt
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    cache_control: Any = None
    images: None = None

    @property
    def text(self) -> str:
        return joined(self.content or "")

    @property
    def template_role(self) -> str:
        return TEMPLATE_ROLES.get(self.role, self.role)

    def check(self) -> None:
        """What types alone cannot express."""
        if self.content is None and self.role != "assistant":
            raise BadRequest(f"a message of role {self.role} has no content", "give it text")
        if self.tool_calls and self.role != "assistant":
            raise BadRequest(f"a message of role {self.role} has tool_calls", "only those of role assistant call tools")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise BadRequest(f"a message of role {self.role} and its tool_call_id", "only results have one, and all do")


# About accounts, storage and models that this server does not have; many clients send them
_UnusedFields: Any = accepted(
    *("_UnusedFields", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("reasoning_effort", "verbosity", "modalities"),
)


class _CompletionBody(GuidedFields, _UnusedFields, _SamplingFields):
    """What both kinds of request have."""

    model: str | None = None  # left out: the one that there is
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = described(SamplingParams, "stop")
    logit_bias: dict[str, float] | None = described(SamplingParams, "logit_bias")
    response_format: ResponseFormat | None = None
    forerun: ForerunOptions = Field(default_factory=ForerunOptions)
    stop_token_ids: list[int] | None = described(SamplingParams, "stop_token_ids")
    prompt_cache_key: Annotated[str, Field(max_length=MAX_CACHE_KEY_CHARS)] | None = Field(
        default=None, description="The prompt's K/V stays in the pool, in place of that of the last request so named."
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None  # 24h: as long as the server allows
    cache_salt: str | None = Field(
        default=None, description="vLLM's, against guesses from times: as `cache: false`, nothing is shared."
    )

    @model_validator(mode="after")
    def _unshared(self) -> Self:
        if self.cache_salt is not None:
            self.forerun.cache = False
        return self

    @property
    def constrained(self) -> bool:
        """Whether a grammar has to be compiled, tools aside."""
        return self.is_guided or (self.response_format is not None and self.response_format.type != "text")

    def grammar(self) -> Grammar | None:
        found = self.guided(self.response_format.grammar() if self.response_format else None)
        if self.forerun.grammar_sampling == Grammar.sampling:
            return found
        if found is None:
            hint = "give a response_format, or leave it out"
            raise BadRequest("forerun.grammar_sampling is about a grammar, and the request has none", hint)
        return replace(found, sampling=self.forerun.grammar_sampling)

    @property
    def choices(self) -> int:
        """Answers to each prompt. `params` refuses what is below 1."""
        return max(1, self.n or 1)

    @property
    def writes_nothing(self) -> bool:
        """Whether the prompts alone are asked for."""
        return False

    def _params(self, max_tokens: int, room: int, **more: Any) -> SamplingParams:
        """Null means left out. `room`: tokens that the context has left for the output."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is about streams, and stream is not true", "leave it out")
        given = {name: getattr(self, name) for name in (*_SAMPLING, *_OWN_SAMPLING)}
        values = {name: value for name, value in given.items() if value is not None}
        if twice := [name for name in _OWN_SAMPLING if name in values and name in self.forerun.model_fields_set]:
            raise BadRequest(f"{twice[0]} is in the request and in its forerun object", "leave one of them out")
        if values.get("top_p") == 0:  # as at OpenAI: the likeliest token alone, which top_k says, too
            values |= {"top_p": 1.0, "top_k": 1}
        values["max_tokens"] = max_tokens if max_tokens > MAX_TOKENS else min(max_tokens, room)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        bias = {_token(name): value for name, value in (self.logit_bias or {}).items()}
        ends = tuple(self.stop_token_ids or ())
        return SamplingParams(
            stop=tuple(stop), stop_token_ids=ends, logit_bias=bias, **(self.forerun.params() | values | more)
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_in_chunks(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class Prediction(LenientModel):
    type: Literal["content"]
    content: str | list[TextPart]


class ChatRequest(_CompletionBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = described(SamplingParams, "max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = described(SamplingParams, "logprobs")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's names: by default a last message of the assistant is continued
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = Field(
        default=None, description="What the answer may well be: drafted from, never more."
    )

    @property
    def has_limit(self) -> bool:
        """Whether it says how long the answer may be."""
        return self.max_tokens is not None or self.max_completion_tokens is not None

    def params(self, room: int, tools: ToolUse | None, encode: Callable[[str], list[int]]) -> SamplingParams:
        """`room`: tokens that the context has left for the answer."""
        # `SamplingParams` has other names for these: its errors would name fields that the request does not have
        for name, field in (("max_completion_tokens", "max_tokens"), ("top_logprobs", "logprobs")):
            about, value = field_of(SamplingParams, field).metadata, getattr(self, name)
            if value is not None:
                check_number(name, value, about["low"], about["high"], whole=True)
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", "set logprobs, or leave top_logprobs out")
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        longest = room if asked is None else asked
        grammar = self.grammar()
        if tools is not None and grammar is not None and grammar.kind in ("regex", "lark"):
            raise BadRequest(f"tools beside a {grammar.kind} grammar", "use a JSON schema, or leave the tools out")
        if tools is not None and grammar is not None and grammar.sampling == "conditional":
            hint = "leave forerun.grammar_sampling or the tools out"
            raise BadRequest("tools beside a grammar with sampling 'conditional'", hint)
        return self._params(
            longest,
            room,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=grammar if tools is None else tools.grammar(grammar),
            prediction=tuple(encode(joined(self.prediction.content))[: min(longest, room)]) if self.prediction else (),
        )

    def tool_use(self, dialect: ToolDialect) -> ToolUse | None:
        """None: the output is text only."""
        tools, must = chosen(self.tools, self.tool_choice)
        named = isinstance(self.tool_choice, NamedTool)  # then there is one call
        parallel = self.parallel_tool_calls is not False and not named
        return ToolUse(dialect, tuple(tools), must, parallel) if tools else None

    def session_encoder(self, dialect: ToolDialect) -> Callable[[list[dict[str, Any]]], list[int]]:
        """Encodes all messages of a session as the prompt of this request."""
        use, tokenizer = self.tool_use(dialect), dialect.tokenizer

        def encode(messages: list[dict[str, Any]]) -> list[int]:
            parsed = [Message.model_validate(message) for message in messages]
            return chat_prompt(dialect, parsed, use.tools if use else ()).encode(tokenizer)

        return encode

    def chat_prompt(self, dialect: ToolDialect, whole: bool = True) -> ChatPrompt:
        """`whole`: every result must follow its call; messages that continue a session may belong to earlier calls."""
        called: set[str] = set()
        for message in self.messages:
            message.check()
            called |= {call.id for call in message.tool_calls or ()}
            if whole and message.tool_call_id is not None and message.tool_call_id not in called:
                hint = "send the assistant's message with the call before its result"
                raise BadRequest(f"no call before it has the tool_call_id {message.tool_call_id!r:.80}", hint)
        if self.add_generation_prompt and self.continue_final_message:
            hint = "set one of them"
            raise BadRequest("add_generation_prompt begins an answer, continue_final_message continues one", hint)
        use, last = self.tool_use(dialect), self.messages[-1]
        anew = self.add_generation_prompt or self.continue_final_message is False
        alone = len(self.messages) == 1
        if whole and not anew and not alone and last.role == "assistant" and not last.tool_calls:  # to be continued
            prompt = chat_prompt(dialect, self.messages[:-1], use.tools if use else ())
            return replace(prompt, continued=last.text)
        return chat_prompt(dialect, self.messages, use.tools if use else ())


class CompletionRequest(_CompletionBody):
    # a list of ids is one prompt, as long as the context allows; of other lists the length is limited
    prompt: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str] | list[list[int]], Field(min_length=1, max_length=1024)]
    )
    logprobs: int | None = described(SamplingParams, "logprobs")
    echo: bool | None = Field(default=None, description="The answer's text begins with the prompt's.")
    best_of: Literal[1] | None = None
    suffix: str | None = Field(default=None, description="Text after the answer, for models that fill in the middle.")

    has_limit: ClassVar[bool] = True  # 16 tokens where it says nothing

    def params(self, room: int, tools: ToolUse | None, encode: Callable[[str], list[int]]) -> SamplingParams:
        longest = 16 if self.max_tokens is None else self.max_tokens
        if self.writes_nothing:
            if self.forerun.session is not None:
                raise BadRequest("max_tokens is 0 beside a session, whose turns have answers", "leave the session out")
            longest = 1  # never run
        return self._params(longest, room, logprobs=self.logprobs, grammar=self.grammar())

    @property
    def writes_nothing(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @property
    def scores_prompts(self) -> bool:
        """Whether log-probabilities of the prompts' own tokens are requested."""
        return bool(self.echo) and self.logprobs is not None

    def prompts(self) -> list[Any]:
        alone = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        found: list[Any] = [self.prompt] if alone else list(self.prompt)
        if not self.suffix:
            return found
        if not all(isinstance(prompt, str) for prompt in found) or self.forerun.session is not None:
            raise BadRequest("suffix beside token ids or a session", "give the prompt as text, without a session")
        return [FillPrompt(prompt, self.suffix) for prompt in found]


def _token(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise BadRequest(f"logit_bias maps token ids to numbers, {name!r:.40} is no token id", "use whole numbers")
    return int(name)


def forerun_names() -> list[str]:
    """All names of the `forerun` object and the objects in it."""
    models = (ForerunOptions, SessionOptions, PrefillOptions, SpeculationOptions)
    return list(dict.fromkeys(name for model in models for name in model.model_fields))
