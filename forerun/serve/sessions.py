"""ServerSessions of a server: named conversations whose history the server stores, separate for each API key.

A request appends its messages to the session, or sends the whole conversation again: then only the new messages are
appended. A turn that fails or is cancelled is rolled back. Which request has a session is decided on the event loop;
what may take long runs in other threads. Knows no HTTP beyond the errors it raises.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from forerun.core import Usage
from forerun.engine.engine import Engine
from forerun.engine.sequence import Event, Request
from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.serve.config import ApiKey
from forerun.serve.errors import ApiError
from forerun.serve.schema import Message, SessionOptions
from forerun.serve.tool_parser import ToolCallParser
from forerun.sharing.session import Session, completed
from forerun.sharing.session_registry import DEFAULT_TTL_S
from forerun.text.tokenizer import Tokenizer

Encode = Callable[[list[dict[str, Any]]], list[int]]


class ServerSessions:
    """`max_open`: sessions open at once; `max_ttl`: longest time to live that requests may set, in seconds."""

    def __init__(self, llm: LLM, max_open: int, max_ttl: float) -> None:
        self.llm, self.max_open, self.max_ttl = llm, max_open, max_ttl
        self.busy: set[str] = set()
        self._used: dict[str, float] = {}  # open ones, least recently used first
        self._closed: deque[str] = deque(maxlen=256)  # the latest
        self._lock = threading.Lock()

    @staticmethod
    def name_of(name: str, key: ApiKey | None) -> str:
        """Its name in the library. Names of keys have no spaces, so that those of two keys never collide."""
        return f"{key.name if key else ''} {name}"

    def claim(self, name: str) -> None:
        """For one request at a time, of all servers that share the folder."""
        try:
            if name in self.busy:
                raise BadRequest("")
            self.llm.sessions.hold(name)
        except BadRequest:
            hint = "wait for its answer, or use another session"
            shown = name.split(" ", 1)[1]
            raise ApiError(409, f"session {shown!r} is answering another request", hint, code="session_busy") from None
        self.busy.add(name)

    def release(self, name: str) -> None:
        if name in self.busy:
            self.busy.discard(name)
            self.llm.sessions.release(name)

    async def names(self, key: ApiKey | None) -> list[str]:
        mine = self.name_of("", key)
        return [name[len(mine) :] for name in await asyncio.to_thread(self.llm.sessions.names) if name.startswith(mine)]

    async def delete(self, given: str, key: ApiKey | None) -> None:
        """Close it, and remove its file."""
        name = self.name_of(given, key)
        self.claim(name)
        try:
            await completed(asyncio.to_thread(self._delete, name))
        finally:
            self.release(name)

    def _delete(self, name: str) -> None:
        with self._lock:
            self._close(name, self._open(name, None, create=False), forget=True)

    def open(self, name: str, options: SessionOptions) -> Session:
        """Claimed by the caller; runs in a worker thread."""
        if options.ttl is not None and not 0 < options.ttl <= self.max_ttl:
            hint = f"give seconds above 0 and up to {self.max_ttl:g}"
            raise BadRequest(f"the session's ttl is {options.ttl:g}, the limit here is {self.max_ttl:g}", hint)
        with self._lock:
            self._close_expired(name)
            ttl = options.ttl or (None if name in self._used else min(DEFAULT_TTL_S, self.max_ttl))
            session = self._open(name, ttl, options.create)
        if session.pending:  # a turn of a process that was killed
            session.rewind(turns=1)
        if not session.saved and not options.allow_unsaved:
            self.llm.sessions.save(session)  # there may be room again
            if not session.saved:
                message = f"the last turn of session {options.name!r} could not be written to disk"
                hint = "free space on the server, or send allow_unsaved to go on without"
                never = {"x-should-retry": "false"}
                raise ApiError(507, message, hint, code="session_not_saved", headers=never)
        return session

    def discard(self, name: str, session: Session) -> None:
        """Delete a session whose first turn failed."""
        with self._lock:
            self._close(name, session, forget=True)

    def _open(self, name: str, ttl: float | None, create: bool) -> Session:
        try:
            session = self.llm.session(name, ttl, create=create)
        except BadRequest:
            if create:
                raise
            shown = name.split(" ", 1)[1]  # the library's message names all sessions
            raise ApiError(404, f"there is no session {shown!r:.150}", code="session_not_found") from None
        self._used.pop(name, None)
        self._used[name] = time.monotonic()
        return session

    def _close_expired(self, name: str) -> None:
        """Close expired sessions. With a disk tier they can be opened again."""
        now = time.monotonic()
        for other, used in list(self._used.items()):
            session = self.llm.session(other)
            if other != name and other not in self.busy and now - used > session.ttl and self._kept(session):
                self._close(other, session)
        if name in self._used or len(self._used) < self.max_open:
            return
        idle = next((other for other in self._used if other not in self.busy and self._stored(other)), None)
        if idle is None:
            message = f"{len(self._used)} sessions are open, the limit of this server is {self.max_open}"
            hint = "try again later, or continue one of yours"
            raise ApiError(429, message, hint, code="session_limit", headers={"Retry-After": "60"})
        self._close(idle, self.llm.session(idle))

    def _stored(self, name: str) -> bool:
        """Whether it can be opened again after it was closed: without a disk it would be lost before it expires."""
        tiers = self.llm.engine.tiers
        return tiers is not None and tiers.disk is not None and self._kept(self.llm.session(name))

    def _kept(self, session: Session) -> bool:
        """Whether its latest turn is as durable as it can be. One that could not be written is tried again: closed
        without it, the session would go on from the turn before as if there were no other."""
        if not session.saved:
            with suppress(BadRequest):  # another server of the folder goes on with it
                self.llm.sessions.hold(session.name)
                try:
                    self.llm.sessions.save(session)
                finally:
                    self.llm.sessions.release(session.name)
        return session.saved

    def _close(self, name: str, session: Session, forget: bool = False) -> None:
        session.close(forget)
        self._used.pop(name, None)
        self._closed.append(name)
        with self.llm.driver.exclusive() as engine:
            self._drop_statistics(engine)

    def _drop_statistics(self, engine: Engine) -> None:
        """The engine keeps statistics for every session name, and clients choose names without limit. A cancelled turn
        is counted one step later: so the latest closed sessions are dropped again."""
        for name in self._closed:
            if name not in self._used:
                engine.stats.sessions.pop(name, None)


@dataclass
class SessionTurn:
    """One request of a session: `async with` it, encode its prompt, stream its answer."""

    sessions: ServerSessions = field(repr=False)
    options: SessionOptions
    key: ApiKey | None
    content: Any  # text, token ids, or messages
    encode_all: Encode | None = field(repr=False, default=None)  # of all messages of the conversation
    texts: list[str] = field(repr=False, default_factory=list)  # of messages: all that is new in the prompt
    session: Session | None = field(repr=False, default=None)

    @property
    def session_name(self) -> str:
        return self.sessions.name_of(self.options.name, self.key)

    async def __aenter__(self) -> SessionTurn:
        self.sessions.claim(self.session_name)
        try:
            await completed(asyncio.to_thread(self._begin))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """A turn without an answer is rolled back."""
        try:
            if self.session is not None and self.session.pending:
                await completed(asyncio.to_thread(self._roll_back, self.session))
        finally:
            self.sessions.release(self.session_name)

    def _begin(self) -> None:
        session = self.sessions.open(self.session_name, self.options)
        self.session, session.encoder = session, self.encode_all
        if self.encode_all is None:
            session.append(self.content)
        else:
            session.append(new_messages(session.messages, self.content))

    def _roll_back(self, session: Session) -> None:
        session.rewind(turns=1)
        if not session.turns:
            self.sessions.discard(self.session_name, session)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        assert self.session is not None
        return self.session.upcoming()

    def stream(self, request: Request) -> AsyncIterator[Event]:
        assert self.session is not None
        return self.session.astream(request)

    def record(self, usage: Usage) -> dict[str, Any]:
        """The response's session object: its name and size, and where its prompt's K/V came from."""
        assert self.session is not None
        return {
            "name": self.options.name,
            "turn": self.session.turns,
            "tokens": len(self.session.tokens),
            "ttl": self.session.ttl,
            "prompt_tokens": usage.prompt_tokens,
            "served": dict(usage.served),
        } | ({} if self.session.saved else {"saved": False})


def new_messages(stored: Sequence[dict[str, Any]], sent: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of a request that the session does not have yet."""
    if stored and len(sent) > len(stored) and all(_same(*pair) for pair in zip(stored, sent, strict=False)):
        sent = sent[len(stored) :]
    elif stored and any(message.role not in ("user", "tool") for message in sent):
        problem = "the messages are neither new ones of user or tool nor the session's whole conversation with more"
        raise BadRequest(problem, "send only what is new, or the conversation word for word, or start another session")
    return [message.model_dump(include=_STORED, exclude_none=True) | {"content": message.text} for message in sent]


_STORED = {"role", "content", "tool_calls", "tool_call_id"}


def _same(stored: dict[str, Any], sent: Message) -> bool:
    """Answers are stored as the model wrote them; clients send the calls in them as calls."""
    calls = [(call.function.name, call.function.arguments) for call in sent.tool_calls or ()]
    if stored["role"] != sent.role:
        return False
    if "tool_calls" in stored:
        old = [(call["function"]["name"], call["function"]["arguments"]) for call in stored["tool_calls"]]
        return old == calls and stored["content"] == sent.text
    if not calls:
        return stored["content"] == sent.text
    parser = ToolCallParser({name for name, _ in calls})
    deltas = parser.push(stored["content"]) + parser.finish()
    return [(c.name, c.arguments) for c in parser.calls] == calls and "".join(d.content for d in deltas) == sent.text
