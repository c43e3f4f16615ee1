"""Sessions of a server: conversations that it keeps under a name, each key's apart from those of all others.

A request that names one adds what is new to it, or sends the whole conversation again: what is known already is then
not added twice. What failed or was cancelled is taken back. Who has a session is decided on the event loop; what may
take long runs in other threads. Knows no HTTP beyond the errors it raises.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forerun.core import Usage
from forerun.engine.sequence import Event, Request
from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.serve.errors import ApiError
from forerun.serve.keys import Key
from forerun.serve.tool_calls import CallReader
from forerun.sharing.session import Session, completed
from forerun.sharing.session_registry import DEFAULT_TTL
from forerun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from forerun.engine.engine import Engine
    from forerun.serve.schema import Message, SessionOptions

Encode = Callable[[list[dict[str, Any]]], list[int]]


class Sessions:
    """`most`: open at once; `longest`: time to live that requests may ask for, in seconds."""

    def __init__(self, llm: LLM, most: int, longest: float) -> None:
        self.llm, self.most, self.longest = llm, most, longest
        self.busy: set[str] = set()
        self._used: dict[str, float] = {}  # open ones, least recently used first
        self._gone: deque[str] = deque(maxlen=256)  # closed lately
        self._lock = threading.Lock()

    @staticmethod
    def name_of(name: str, key: Key | None) -> str:
        """What the library calls it. Names of keys have no spaces, so that no key has a name of another's session."""
        return f"{key.name if key else ''} {name}"

    def claim(self, name: str) -> None:
        if name in self.busy:
            hint = "wait for its answer, or use another session"
            shown = name.split(" ", 1)[1]
            raise ApiError(409, f"session {shown!r} is answering another request", hint, code="session_busy")
        self.busy.add(name)

    async def names(self, key: Key | None) -> list[str]:
        mine = self.name_of("", key)
        return [name[len(mine) :] for name in await asyncio.to_thread(self.llm.sessions.names) if name.startswith(mine)]

    async def forget(self, asked: str, key: Key | None) -> None:
        """Close it, and remove its file."""
        name = self.name_of(asked, key)
        self.claim(name)
        try:
            await completed(asyncio.to_thread(self._forget, name))
        finally:
            self.busy.discard(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._close(name, self._open(name, None, create=False), forget=True)

    def open(self, name: str, options: SessionOptions) -> Session:
        """Claimed by the caller; not for the loop's thread."""
        if options.ttl is not None and not 0 < options.ttl <= self.longest:
            hint = f"give seconds above 0 and up to {self.longest:g}"
            raise BadRequest(f"the session's ttl is {options.ttl:g}, the limit here is {self.longest:g}", hint)
        with self._lock:
            self._sweep(name)
            ttl = options.ttl or (None if name in self._used else min(DEFAULT_TTL, self.longest))
            session = self._open(name, ttl, options.create)
        if session.pending:  # of a process that was killed before it answered
            session.rewind(turns=1)
        return session

    def drop(self, name: str, session: Session) -> None:
        """One that never came to an answer."""
        with self._lock:
            self._close(name, session, forget=True)

    def _open(self, name: str, ttl: float | None, create: bool) -> Session:
        try:
            session = self.llm.session(name, ttl, create=create)
        except BadRequest:
            if create:
                raise
            shown = name.split(" ", 1)[1]  # the library's words would name the sessions of others
            raise ApiError(404, f"there is no session {shown!r:.150}", code="session_not_found") from None
        self._used.pop(name, None)
        self._used[name] = time.monotonic()
        return session

    def _sweep(self, name: str) -> None:
        """Close what nobody came back to in time. Where there is a disk, it can be opened again."""
        now = time.monotonic()
        for other, used in list(self._used.items()):
            session = self.llm.session(other)
            if other != name and other not in self.busy and now - used > session.ttl:
                self._close(other, session)
        if name in self._used or len(self._used) < self.most:
            return
        idle = next((other for other in self._used if other not in self.busy), None)
        tiers = self.llm.engine.tiers
        if idle is None or tiers is None or tiers.disk is None:  # without a disk it would be lost before its time
            message = f"{len(self._used)} sessions are open, the limit of this server is {self.most}"
            hint = "try again later, or continue one of yours"
            raise ApiError(429, message, hint, code="session_limit", headers={"Retry-After": "60"})
        self._close(idle, self.llm.session(idle))

    def _close(self, name: str, session: Session, forget: bool = False) -> None:
        session.close(forget)
        self._used.pop(name, None)
        self._gone.append(name)
        with self.llm.driver.exclusive() as engine:
            self._drop_figures(engine)

    def _drop_figures(self, engine: Engine) -> None:
        """The library keeps those of all sessions there ever were; here names are the clients', without end. A turn
        that was cancelled is counted in the step after: so those closed lately are looked at again."""
        for name in self._gone:
            if name not in self._used:
                engine.stats.sessions.pop(name, None)


@dataclass
class Turn:
    """One request of a session: `async with` it, encode its prompt, stream its answer."""

    sessions: Sessions = field(repr=False)
    options: SessionOptions
    key: Key | None
    added: Any  # text, token ids, or messages
    encode_all: Encode | None = field(repr=False, default=None)  # of all messages of the conversation
    session: Session | None = field(repr=False, default=None)

    @property
    def session_name(self) -> str:
        return self.sessions.name_of(self.options.name, self.key)

    async def __aenter__(self) -> Turn:
        self.sessions.claim(self.session_name)
        try:
            await completed(asyncio.to_thread(self._begin))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """What was not answered is as if it had not been asked."""
        try:
            if self.session is not None and self.session.pending:
                await completed(asyncio.to_thread(self._take_back, self.session))
        finally:
            self.sessions.busy.discard(self.session_name)

    def _begin(self) -> None:
        session = self.sessions.open(self.session_name, self.options)
        self.session, session.encoder = session, self.encode_all
        if self.encode_all is None:
            session.append(self.added)
        else:
            session.append(news(session.messages, self.added))

    def _take_back(self, session: Session) -> None:
        session.rewind(turns=1)
        if not session.turns:
            self.sessions.drop(self.session_name, session)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        assert self.session is not None
        return self.session.upcoming()

    def stream(self, request: Request) -> AsyncIterator[Event]:
        assert self.session is not None
        return self.session.astream(request)

    def record(self, usage: Usage) -> dict[str, Any]:
        """What the client is told: which session it was, and where its prompt's K/V came from."""
        assert self.session is not None
        return {
            "name": self.options.name,
            "turn": self.session.turns,
            "tokens": len(self.session.tokens),
            "ttl": self.session.ttl,
            "prompt_tokens": usage.prompt_tokens,
            "served": dict(usage.served),
        }


def news(kept: Sequence[dict[str, Any]], sent: Sequence[Message]) -> list[dict[str, Any]]:
    """Of what was sent, what the session does not have yet."""
    if kept and len(sent) > len(kept) and all(_same(*pair) for pair in zip(kept, sent, strict=False)):
        sent = sent[len(kept) :]
    elif kept and any(message.role not in ("user", "tool") for message in sent):
        raise BadRequest(
            "the messages are neither new ones of user or tool nor the session's whole conversation with more",
            "send only what is new, or the conversation word for word, or start another session",
        )
    return [message.model_dump(include=_KEPT, exclude_none=True) | {"content": message.text} for message in sent]


_KEPT = {"role", "content", "tool_calls", "tool_call_id"}


def _same(kept: dict[str, Any], sent: Message) -> bool:
    """Answers are kept as the model wrote them; clients send the calls in them as calls."""
    calls = [(call.function.name, call.function.arguments) for call in sent.tool_calls or ()]
    if kept["role"] != sent.role:
        return False
    if "tool_calls" in kept:
        old = [(call["function"]["name"], call["function"]["arguments"]) for call in kept["tool_calls"]]
        return old == calls and kept["content"] == sent.text
    if not calls:
        return kept["content"] == sent.text
    reader = CallReader({name for name, _ in calls})
    pieces = reader.push(kept["content"]) + reader.finish()
    return [(c.name, c.arguments) for c in reader.calls] == calls and "".join(p.content for p in pieces) == sent.text
