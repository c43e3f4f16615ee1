"""Traces: which requests arrive when, how long they are and what they share. Knows no engine and no clock.

A trace is a list of `TraceRequest`s. Generators make the usual kinds; a file has one request to a line, as JSON. Texts
are cut from the shipped documents, so that the same trace is the same text everywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forerun.errors import BadRequest
from forerun_research.bench.common import long_text
from forerun_research.bench.load_targets import Messages

CHARS_PER_TOKEN = 4.0  # of the shipped documents, SmolLM2's tokenizer; what a prompt really had is in its usage
CHAT_TOKENS = 24  # of a short question
MAX_TOKENS = 10_000_000  # of one prompt or answer in a file: texts are made in memory
MAX_ARRIVAL_S = 1_000_000  # in a file: a replay waits for it, eleven days at most
PROMPT_AT_S = 1.0  # when long prompts arrive beside chats that stream


@dataclass(frozen=True)
class TraceRequest:
    """One request. Requests of one session are its turns, each sent once the one before is answered, and not before its
    arrival; requests of one document begin with the same text."""

    arrival_s: float  # since the trace began
    prompt_tokens: int
    max_tokens: int
    document: str | None = None  # whose text the prompt begins with; None: a question of its own
    session: str | None = None
    key: str | None = None  # the name of an API key
    kind: str = "chat"  # figures are reported by kind
    question_tokens: int = CHAT_TOKENS  # of the prompt, after its document: what no other request has


def chats_beside_prompts(
    chats: int = 4,
    tokens: int = 256,
    prompts: int = 1,
    prompt_tokens: int = 6000,
    later: int = 2,
    prompt_at: float = 2.0,
) -> list[TraceRequest]:
    """Short chats that stream, long prompts that arrive beside them, and short questions after those."""
    trace = [TraceRequest(0.0, CHAT_TOKENS, tokens) for _ in range(chats)]
    trace += [TraceRequest(prompt_at + i, prompt_tokens, 16, document=f"long {i}", kind="long") for i in range(prompts)]
    trace += [TraceRequest(prompt_at + 2.0 + 2.0 * i, CHAT_TOKENS, 16, kind="question") for i in range(later)]
    return trace


def poisson(
    rate: float,
    seconds: float,
    documents: int = 4,
    document_tokens: int = 2000,
    max_tokens: int = 64,
    turns: int = 2,
    think_s: float = 5.0,
    seed: int = 1,
) -> list[TraceRequest]:
    """Users who arrive at random, `rate` a second; each asks `turns` questions about one document, with a pause in
    between. A few documents are asked about often, as in Zipf's law."""
    rng, trace, at, user = random.Random(seed), list[TraceRequest](), 0.0, 0
    weights = [1.0 / (rank + 1) for rank in range(documents)]
    while (at := at + rng.expovariate(rate)) < seconds:
        user += 1
        document = f"document {rng.choices(range(documents), weights)[0]}" if documents else None
        arrival = at
        for turn in range(turns):
            tokens = CHAT_TOKENS + (document_tokens if document and turn == 0 else 0)
            first = document if turn == 0 else None
            trace.append(
                TraceRequest(arrival, tokens, max_tokens, first, f"user {user}", kind="first" if turn == 0 else "next")
            )
            arrival += rng.expovariate(1.0 / think_s) if think_s else 0.0
    return sorted(trace, key=lambda request: request.arrival_s)


SHIPPED: dict[str, Callable[[], list[TraceRequest]]] = {
    # 50 users who ask three questions each about one of eight documents of 2,000 tokens
    "users": lambda: sessions(50, 2.0, 8, 2000, 48, 3, 8.0),
    # one question each about one of twenty documents of 1,500 tokens, as a search adds them
    "documents": lambda: poisson(1.0, 60.0, 20, 1500, 64, 1, 0.0, seed=2),
    # short conversations without documents
    "chats": lambda: poisson(1.0, 60.0, 0, 0, 96, 3, 4.0, seed=3),
}


def sessions(
    users: int, every_s: float, documents: int, document_tokens: int, max_tokens: int, turns: int, think_s: float
) -> list[TraceRequest]:
    """So many users, on average one every `every_s` seconds, with `turns` questions each."""
    trace = poisson(1 / every_s, 10 * users * every_s, documents, document_tokens, max_tokens, turns, think_s)
    first = dict.fromkeys(request.session for request in trace)
    kept = set(list(first)[:users])
    return [request for request in trace if request.session in kept]


def named_trace(name: str) -> list[TraceRequest]:
    """A shipped trace, or one in a file."""
    return SHIPPED[name]() if name in SHIPPED else read_trace(Path(name))


def read_trace(path: Path) -> list[TraceRequest]:
    """One JSON object to a line, with the fields of `TraceRequest`."""
    trace = []
    for number, line in enumerate(_lines(path), 1):
        try:
            request = _request(json.loads(line))
        except (ValueError, RecursionError) as error:
            names = ", ".join(field.name for field in fields(TraceRequest)[3:])
            hint = f"a line is an object with arrival_s, prompt_tokens, max_tokens, and maybe {names}"
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise BadRequest(f"{path}, line {number}: {why}", hint) from None
        trace.append(request)
    if not trace:
        raise BadRequest(f"{path} has no requests", "write one JSON object to a line")
    return sorted(trace, key=lambda request: request.arrival_s)


def _request(values: Any) -> TraceRequest:
    """From a line of a file; raises `ValueError`."""
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    if unknown := sorted(set(values) - {field.name for field in fields(TraceRequest)}):
        raise ValueError(f"unknown: {', '.join(unknown)}")
    if missing := [name for name in ("arrival_s", "prompt_tokens", "max_tokens") if name not in values]:
        raise ValueError(f"{', '.join(missing)} is missing")
    request = TraceRequest(**values)
    at = request.arrival_s
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at <= MAX_ARRIVAL_S:
        raise ValueError(f"arrival_s is {at!r:.40}, it must be a number from 0 to {MAX_ARRIVAL_S}")
    for name in ("prompt_tokens", "max_tokens", "question_tokens"):
        count = getattr(request, name)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_TOKENS:
            raise ValueError(f"{name} is {count!r:.40}, it must be a whole number from 1 to {MAX_TOKENS}")
    for name in ("document", "session", "key", "kind"):
        given = getattr(request, name)
        if not isinstance(given, str) and (name == "kind" or given is not None):
            raise ValueError(f"{name} is {given!r:.40}, it must be a text")
    return request


def write_trace(path: Path, trace: list[TraceRequest]) -> None:
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in trace), encoding="utf-8")


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        hint = f"name a file of JSON lines, or one of {', '.join(SHIPPED)}"
        raise BadRequest(f"cannot read the trace {path}: {error}", hint) from None


class TraceTexts:
    """The text of each request of a trace: a document's words, then a question that no other request has."""

    def __init__(self, chars_per_token: float = CHARS_PER_TOKEN) -> None:
        self._words = long_text().split()
        self._chars_per_token = chars_per_token
        self._starts: dict[str, int] = {}

    def user_message(self, number: int, request: TraceRequest) -> dict[str, Any]:
        """What request `number` of the trace asks; earlier turns of its session are not part of it."""
        question = f"({number}) Write a long story about a lighthouse keeper, the sea and ship number {number}."
        if request.document is not None:
            tokens = request.prompt_tokens - len(question) / self._chars_per_token
            question = f"{self._document(request.document, tokens)}\n\n{question}"
        return {"role": "user", "content": question}

    def _document(self, name: str, tokens: float) -> str:
        start = self._starts.setdefault(name, 101 * len(self._starts))
        text, at = f"{name}.", start
        while len(text) < tokens * self._chars_per_token:
            piece = self._words[at % len(self._words) :][:400]
            text += " " + " ".join(piece)
            at += len(piece)
        return text[: max(0, int(tokens * self._chars_per_token))]


def turn_tokens(
    trace: Sequence[TraceRequest], texts: TraceTexts, encode: Callable[[Messages], list[int]]
) -> list[list[int]]:
    """The tokens that each request really adds to its session, template included; a later turn's are those that come
    after the answer before it."""
    begun: dict[str, Messages] = {}
    found = []
    for number, request in enumerate(trace):
        asked, session = texts.user_message(number, request), request.session or f"\0{number}"
        if session in begun:
            before = begun[session]
            answered = [*before, {"role": "assistant", "content": "A"}]
            found.append(encode([*answered, asked])[len(encode(before)) + 1 :])
            continue
        begun[session] = [asked]
        found.append(encode([asked]))
    return found
