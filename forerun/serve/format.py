"""Answers as OpenAI's clients expect them: whole objects and the chunks of a stream. Knows no engine, only its events.

Beside the chunks that every client knows, a client that asked for `"prefill": "provisional"` gets chunks without
choices whose `forerun` object has an `event`:

    {"event": "provisional", "index": 0, "tokens": 3, "text": " the old keeper"}   may be shown, is no part of it yet
    {"event": "confirm", "index": 0, "tokens": 2, "text": " the old"}              this beginning of it stands
    {"event": "retract", "index": 0, "tokens": 1, "text": " keeper"}               this rest of it is taken back

Provisional text is settled from its beginning on, by any number of the one kind and then at most one of the other.

With `"statistics": "steps"` each chunk of content has one, too:

    {"event": "tokens", "index": 0, "tokens": 17}                                  tokens of the answer so far

The content that comes as usual is always the whole answer, its confirmed beginning too, each piece after the event
that confirms it: whoever shows provisional text replaces it as content comes.
"""

from __future__ import annotations

import math
import os.path
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any

from forerun.core import TokenLogprob, Usage
from forerun.engine.sequence import Event
from forerun.serve.tool_calls import Call, CallReader
from forerun.serve.tools import ToolUse
from forerun.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class Collected:
    """One answer so far."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    provisional: str = ""
    provisional_ids: list[int] = field(default_factory=list)
    stood: int = 0  # provisional tokens that were confirmed
    offset: int = 0  # characters of the tokens whose log-probabilities were told
    reader: CallReader | None = None  # of a stream that may call tools

    def settle(self, event: Event) -> None:
        """Provisional text is done with when all of it stands, or the rest was taken back."""
        self.stood += event.confirmed
        if event.retracted or self.stood >= len(self.provisional_ids) or event.finish_reason is not None:
            self.provisional, self.provisional_ids, self.stood = "", [], 0


class Format(ABC):
    """What both kinds of answer have in common; `logprobs`: whether they were asked for."""

    whole_name, chunk_name = "", ""

    def __init__(self, answer_id: str, model: str, created: int, tokenizer: Tokenizer, logprobs: bool) -> None:
        self.id, self.model, self.created = answer_id, model, created
        self.tokenizer, self.logprobs = tokenizer, logprobs

    def whole(
        self, answers: list[Collected], usage: Usage, statistics: bool, session: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        body = self._envelope(self.whole_name, choices) | {"usage": usage_object(usage)}
        own = ({"session": session} if session else {}) | ({"statistics": record(usage)} if statistics else {})
        return body | {"forerun": own} if own else body

    def chunk(self, index: int, event: Event, answer: Collected) -> dict[str, Any] | None:
        """What a client hears of an event; None where that is nothing."""
        told = self._told(event.logprobs)
        if not event.text and not told and event.finish_reason is None:
            return None
        delta = self._delta(index, event, told, answer)
        return None if delta is None else self._envelope(self.chunk_name, [delta])

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def provisional(self, index: int, event: Event, answer: Collected) -> list[dict[str, Any]]:
        """Of an event that says something provisionally, or says what becomes of it."""
        if event.provisional:
            return [self._own("provisional", index, len(event.token_ids), event.text)] if event.text else []
        if not answer.provisional_ids:
            return []
        before, stands = (self._standing(answer, count) for count in (answer.stood, answer.stood + event.confirmed))
        told = [
            ("confirm", event.confirmed, stands[len(before) :]),
            ("retract", event.retracted, answer.provisional[len(stands) :]),
        ]
        return [self._own(name, index, tokens, text) for name, tokens, text in told if tokens]

    def _standing(self, answer: Collected, count: int) -> str:
        """The text of the first provisional tokens, whole characters only."""
        decoded = self.tokenizer.decode(answer.provisional_ids[:count]) if count else ""
        return os.path.commonprefix([answer.provisional, decoded])

    def closing(
        self, usage: Usage, include_usage: bool, statistics: bool, session: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """The chunk after the last one with a choice."""
        more: dict[str, Any] = {"usage": usage_object(usage)} if include_usage else {}
        if session:
            more["forerun"] = {"event": "session", "session": session}
        if statistics:
            more["forerun"] = more.get("forerun", {}) | {"event": "statistics", "statistics": record(usage)}
        return self._envelope(self.chunk_name, []) | more if more else None

    def _own(self, name: str, index: int, tokens: int, text: str) -> dict[str, Any]:
        told = {"event": name, "index": index, "tokens": tokens, "text": text}
        return self._envelope(self.chunk_name, []) | {"forerun": told}

    def _envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _told(self, logprobs: list[TokenLogprob]) -> list[TokenLogprob]:
        """Tokens that are part of the text: what ends an answer is not."""
        return [entry for entry in logprobs if entry.token_id not in self.tokenizer.special_ids]

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    @abstractmethod
    def _choice(self, index: int, answer: Collected) -> dict[str, Any]:
        """One finished answer."""

    @abstractmethod
    def _delta(self, index: int, event: Event, told: list[TokenLogprob], answer: Collected) -> dict[str, Any] | None:
        """What one event adds to an answer; None where that is nothing yet."""


class ChatFormat(Format):
    whole_name, chunk_name = "chat.completion", "chat.completion.chunk"
    tools: ToolUse | None = None  # what the answer may call

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": None if self.tools is not None and self.tools.must else ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._envelope(self.chunk_name, [choice])

    def _choice(self, index: int, answer: Collected) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        reason = answer.finish_reason
        if self.tools is not None:
            reader = self.tools.reader()
            pieces = reader.push(answer.text) + reader.finish()
            if reader.calls:
                content = "".join(piece.content for piece in pieces)
                message |= {"content": content or None, "tool_calls": [_call(call) for call in reader.calls]}
                reason = _called(reason)
        logprobs = self._entries(self._told(answer.logprobs))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _delta(self, index: int, event: Event, told: list[TokenLogprob], answer: Collected) -> dict[str, Any] | None:
        delta: dict[str, Any] = {"content": event.text} if event.text or told else {}
        reason: str | None = event.finish_reason
        if self.tools is not None:
            delta = self._read(event, self.tools, answer)
            reason = _called(reason) if answer.reader and answer.reader.calls else reason
        logprobs = self._entries(told) if told else None
        if not delta and logprobs is None and reason is None:
            return None  # held back: it may become a call
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _read(self, event: Event, tools: ToolUse, answer: Collected) -> dict[str, Any]:
        """What an event adds where it may add to calls."""
        reader = answer.reader = answer.reader or tools.reader()
        pieces = reader.push(event.text) + (reader.finish() if event.finish_reason is not None else [])
        content, calls = "".join(piece.content for piece in pieces), dict[int, dict[str, Any]]()
        for piece in pieces:
            if piece.begun is not None:
                calls[piece.call] = {"index": piece.call} | _call(piece.begun, arguments="")
            elif piece.call >= 0:
                told = calls.setdefault(piece.call, {"index": piece.call, "function": {"arguments": ""}})
                told["function"]["arguments"] += piece.arguments
        delta: dict[str, Any] = {"content": content} if content else {}
        return delta | {"tool_calls": list(calls.values())} if calls else delta

    def _entries(self, told: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        entries = [
            self._entry(t.token_id, t.logprob) | {"top_logprobs": [self._entry(*pair) for pair in t.top]} for t in told
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        stands_for = list(self.tokenizer.token_bytes(token))
        return {"token": self._text(token), "logprob": max(logprob, LEAST_LOGPROB), "bytes": stands_for}


class CompletionFormat(Format):
    whole_name = chunk_name = "text_completion"

    def _choice(self, index: int, answer: Collected) -> dict[str, Any]:
        logprobs = self._columns(self._told(answer.logprobs), 0)
        return {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _delta(self, index: int, event: Event, told: list[TokenLogprob], answer: Collected) -> dict[str, Any]:
        logprobs = self._columns(told, answer.offset) if told else None
        answer.offset += sum(len(self._text(entry.token_id)) for entry in told)
        return {"index": index, "text": event.text, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def _columns(self, told: list[TokenLogprob], before: int) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        offsets, at = [], before
        for entry in told:
            offsets.append(at)
            at += len(self._text(entry.token_id))
        return {
            "tokens": [self._text(t.token_id) for t in told],
            "token_logprobs": [max(t.logprob, LEAST_LOGPROB) for t in told],
            "top_logprobs": [{self._text(i): max(lp, LEAST_LOGPROB) for i, lp in t.top} for t in told],
            "text_offset": offsets,
        }


def _call(call: Call, arguments: str | None = None) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _called(reason: str | None) -> str | None:
    """An answer that was cut off is not done with its calls."""
    return "tool_calls" if reason == "stop" else reason


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "served": dict(usage.served),  # tokens by where they came from: pool, host, disk, approximate, computed
            "written": usage.written,
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
    }


def record(usage: Usage) -> dict[str, Any]:
    """All that was counted, the derived figures too."""
    derived = ("tokens_per_second", "accepted_length", "other_s", "confirmed_share")
    return _finite(asdict(usage) | {name: getattr(usage, name) for name in derived})


def _finite(value: Any) -> Any:
    """JSON has neither infinities nor NaN."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
