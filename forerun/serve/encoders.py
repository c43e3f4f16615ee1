"""Engine events as OpenAI's clients expect them: whole objects and the chunks of a stream. Knows no engine.

Beside the chunks that every client knows, a client that requested `"prefill": "provisional"` gets chunks without
choices whose `forerun` object has an `event`:

    {"event": "provisional", "index": 0, "tokens": 3, "text": " the old keeper"}   may be shown, not part of it yet
    {"event": "confirm", "index": 0, "tokens": 2, "text": " the old"}              this prefix of it is final
    {"event": "retract", "index": 0, "tokens": 1, "text": " keeper"}               the rest of it is withdrawn

Provisional text is resolved from its beginning on, by any number of confirmations and then at most one retraction.

With `"statistics": "steps"` each chunk of content has one, too:

    {"event": "tokens", "index": 0, "tokens": 17}                                  tokens of the choice so far

The content that comes as usual is always the whole text, its confirmed prefix too, each piece after the event that
confirms it: a client that shows provisional text replaces it as content comes.
"""

from __future__ import annotations

import math
import os.path
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import forerun
from forerun.core import TokenLogprob, Usage
from forerun.engine.sequence import Event
from forerun.serve.tool_parser import ToolCallParser
from forerun.serve.tool_schema import call_object
from forerun.serve.tools import ToolUse
from forerun.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class ChoiceState:
    """One choice of a response so far."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    provisional: str = ""
    provisional_ids: list[int] = field(default_factory=list)
    confirmed: int = 0  # provisional tokens that were confirmed
    offset: int = 0  # characters of the tokens whose log-probabilities were sent
    parser: ToolCallParser | None = None  # of a stream that may call tools
    stop: str | None = None  # the stop string that ended it

    def add_provisional(self, event: Event) -> None:
        self.provisional += event.text
        self.provisional_ids += event.token_ids

    def add(self, event: Event) -> None:
        """Provisional text is resolved once all of it is confirmed, or the rest is retracted."""
        self.confirmed += event.confirmed
        if event.retracted or self.confirmed >= len(self.provisional_ids) or event.finish_reason is not None:
            self.provisional, self.provisional_ids, self.confirmed = "", [], 0
        self.text += event.text
        self.tokens += len(event.token_ids)
        self.logprobs += event.logprobs
        self.finish_reason, self.stop = event.finish_reason, event.stop


class ResponseEncoder(ABC):
    """What chat and completions have in common; `logprobs`: whether they were requested."""

    object_name, chunk_name = "", ""
    pinned_tokens = 0  # of the prompts, that the request asked to keep

    def __init__(self, response_id: str, model: str, created: int, tokenizer: Tokenizer, logprobs: bool) -> None:
        self.id, self.model, self.created = response_id, model, created
        self.tokenizer, self.logprobs = tokenizer, logprobs
        self.fingerprint = f"forerun-{forerun.__version__}"

    def written_tokens(self, usage: Usage) -> int:
        return max(0, self.pinned_tokens - usage.cached_tokens)

    def response(
        self, choices: list[ChoiceState], usage: Usage, statistics: bool, session: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        encoded = [self._choice(index, choice) for index, choice in enumerate(choices)]
        body = self._envelope(self.object_name, encoded) | {"usage": usage_object(usage, self.written_tokens(usage))}
        own = ({"session": session} if session else {}) | ({"statistics": usage_record(usage)} if statistics else {})
        return body | {"forerun": own} if own else body

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, index: int, event: Event, choice: ChoiceState) -> dict[str, Any] | None:
        """The chunk of an event; None where there is nothing to send."""
        logprobs = self._visible(event.logprobs)
        if not event.text and not logprobs and event.finish_reason is None:
            return None
        delta = self._delta(index, event, logprobs, choice)
        return None if delta is None else self._envelope(self.chunk_name, [delta])

    def provisional_chunks(self, index: int, event: Event, choice: ChoiceState) -> list[dict[str, Any]]:
        """Of an event with provisional text, or one that confirms or retracts some."""
        if event.provisional:
            return [self._own("provisional", index, len(event.token_ids), event.text)] if event.text else []
        if not choice.provisional_ids:
            return []
        counts = (choice.confirmed, choice.confirmed + event.confirmed)
        before, after = (self._confirmed(choice, count) for count in counts)
        events = [
            ("confirm", event.confirmed, after[len(before) :]),
            ("retract", event.retracted, choice.provisional[len(after) :]),
        ]
        return [self._own(name, index, tokens, text) for name, tokens, text in events if tokens]

    def _confirmed(self, choice: ChoiceState, count: int) -> str:
        """The text of the first provisional tokens, whole characters only."""
        decoded = self.tokenizer.decode(choice.provisional_ids[:count]) if count else ""
        return os.path.commonprefix([choice.provisional, decoded])

    def last_chunk(
        self, usage: Usage, include_usage: bool, statistics: bool, session: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """The chunk after the last one with a choice."""
        more: dict[str, Any] = {"usage": usage_object(usage, self.written_tokens(usage))} if include_usage else {}
        if session:
            more["forerun"] = {"event": "session", "session": session}
        if statistics:
            more["forerun"] = more.get("forerun", {}) | {"event": "statistics", "statistics": usage_record(usage)}
        return self._envelope(self.chunk_name, []) | more if more else None

    def _own(self, name: str, index: int, tokens: int, text: str) -> dict[str, Any]:
        event = {"event": name, "index": index, "tokens": tokens, "text": text}
        return self._envelope(self.chunk_name, []) | {"forerun": event}

    def _envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": self.fingerprint, "choices": choices}

    def _visible(self, logprobs: list[TokenLogprob]) -> list[TokenLogprob]:
        """Of tokens that are part of the text: an end-of-sequence token is not."""
        return [entry for entry in logprobs if entry.token_id not in self.tokenizer.special_ids]

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    @abstractmethod
    def _choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        """A finished choice."""

    @abstractmethod
    def _delta(
        self, index: int, event: Event, logprobs: list[TokenLogprob], choice: ChoiceState
    ) -> dict[str, Any] | None:
        """What one event adds to a choice; None where that is nothing yet."""


class ChatEncoder(ResponseEncoder):
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"
    tools: ToolUse | None = None  # what the response may call

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": None if self.tools is not None and self.tools.must else ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._envelope(self.chunk_name, [choice])

    def _choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        reason = choice.finish_reason
        if self.tools is not None:
            parser = self.tools.parser()
            deltas = parser.push(choice.text) + parser.finish(reason == "length")
            message["content"] = "".join(delta.content for delta in deltas)
            if parser.calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = [call_object(call.id, call.name, call.arguments) for call in parser.calls]
                reason = _tool_finish_reason(reason)
        logprobs = self._entries(self._visible(choice.logprobs))
        head = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return head | {"stop_reason": choice.stop} if choice.stop is not None else head  # vLLM's name

    def _delta(
        self, index: int, event: Event, logprobs: list[TokenLogprob], choice: ChoiceState
    ) -> dict[str, Any] | None:
        delta: dict[str, Any] = {"content": event.text} if event.text or logprobs else {}
        reason: str | None = event.finish_reason
        if self.tools is not None:
            delta = self._tool_delta(event, self.tools, choice)
            reason = _tool_finish_reason(reason) if choice.parser and choice.parser.calls else reason
        entries = self._entries(logprobs) if logprobs else None
        if not delta and entries is None and reason is None:
            return None  # held back: it may become a call
        head = {"index": index, "delta": delta, "logprobs": entries, "finish_reason": reason}
        return head | {"stop_reason": event.stop} if event.stop is not None else head

    def _tool_delta(self, event: Event, tools: ToolUse, choice: ChoiceState) -> dict[str, Any]:
        """What an event adds where it may add to calls."""
        parser = choice.parser = choice.parser or tools.parser()
        parsed = parser.push(event.text) + (
            parser.finish(event.finish_reason == "length") if event.finish_reason is not None else []
        )
        content, calls = "".join(part.content for part in parsed), dict[int, dict[str, Any]]()
        for part in parsed:
            if part.begun is not None:
                calls[part.call] = {"index": part.call} | call_object(part.begun.id, part.begun.name, "")
            elif part.call >= 0:
                call = calls.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.arguments
        delta: dict[str, Any] = {"content": content} if content else {}
        return delta | {"tool_calls": list(calls.values())} if calls else delta

    def _entries(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        entries = [
            self._entry(t.token_id, t.logprob) | {"top_logprobs": [self._entry(*pair) for pair in t.top]}
            for t in logprobs
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = list(self.tokenizer.token_bytes(token))
        return {"token": self._text(token), "logprob": max(logprob, MIN_LOGPROB), "bytes": data}


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens; its first one follows nothing and has none."""

    first: int
    others: list[TokenLogprob]


class CompletionEncoder(ResponseEncoder):
    object_name = chunk_name = "text_completion"
    echoed: tuple[str, ...] = ()  # the texts of the prompts, where they come before the answers
    per_prompt = 1  # answers
    prompt_scores: list[PromptScores] | None = None

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        text = self._echo(index)
        choice = {"index": index, "text": text, "logprobs": self._prompt_columns(index), "finish_reason": None}
        return self._envelope(self.chunk_name, [choice]) if text else None

    def _echo(self, index: int) -> str:
        return self.echoed[index // self.per_prompt] if self.echoed else ""

    def _choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        prompt = self._prompt_columns(index)
        logprobs = self._columns(self._visible(choice.logprobs), len(self._echo(index)))
        if prompt is not None and logprobs is not None:
            logprobs = {name: values + logprobs[name] for name, values in prompt.items()}
        text = self._echo(index) + choice.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _delta(self, index: int, event: Event, logprobs: list[TokenLogprob], choice: ChoiceState) -> dict[str, Any]:
        columns = self._columns(logprobs, len(self._echo(index)) + choice.offset) if logprobs else None
        choice.offset += sum(len(self._text(entry.token_id)) for entry in logprobs)
        return {"index": index, "text": event.text, "logprobs": columns, "finish_reason": event.finish_reason}

    def _prompt_columns(self, index: int) -> dict[str, Any] | None:
        if self.prompt_scores is None:
            return None
        scores = self.prompt_scores[index // self.per_prompt]
        columns = self._columns([TokenLogprob(scores.first, 0.0, []), *scores.others], 0)
        if columns is not None:
            columns["token_logprobs"][0] = columns["top_logprobs"][0] = None
        return columns

    def _columns(self, logprobs: list[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        offsets = []
        for entry in logprobs:
            offsets.append(offset)
            offset += len(self._text(entry.token_id))
        return {
            "tokens": [self._text(t.token_id) for t in logprobs],
            "token_logprobs": [max(t.logprob, MIN_LOGPROB) for t in logprobs],
            "top_logprobs": [self._by_text([*t.top, (t.token_id, t.logprob)]) for t in logprobs],
            "text_offset": offsets,
        }

    def _by_text(self, top: list[tuple[int, float]]) -> dict[str, float]:
        """Of tokens with the same text, parts of characters, the likeliest counts: it comes first. The token itself
        comes last: as OpenAI has it, there is one entry more where it is not among the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in top:
            found.setdefault(self._text(token), max(logprob, MIN_LOGPROB))
        return found


def _tool_finish_reason(reason: str | None) -> str | None:
    """A response that was cut off is not done with its calls."""
    return "tool_calls" if reason == "stop" else reason


def usage_object(usage: Usage, written_tokens: int) -> dict[str, Any]:
    """`written_tokens`: computed ones of a prefix that the request asked to keep."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": written_tokens,
            "served": dict(usage.served),  # tokens by where they came from: pool, host, disk, approximate, computed
            "written": usage.written,
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
    }


def usage_record(usage: Usage) -> dict[str, Any]:
    """All counts and times, with the derived figures."""
    return _finite(usage.record())


def _finite(value: Any) -> Any:
    """JSON has neither infinities nor NaN."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
