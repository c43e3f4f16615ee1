"""Sessions: conversations and texts that go on, under a name, with their K/V kept at hand.

A session is its tokens. Each turn appends to them, asks for an answer and keeps it token by token, so that the next
turn reads all of it from the cache. After a turn its K/V stays in the pool until its time to live is over, and goes to
the disk tier where there is one: then a new process finds the session by its name. Knows no pages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forerun.accounting import Account
from forerun.answers import Completion, collect
from forerun.core import SamplingParams
from forerun.engine.sequence import Event
from forerun.errors import BadRequest
from forerun.sharing.session_files import SessionFiles, State

if TYPE_CHECKING:
    from forerun.api import LLM, Messages
    from forerun.driver import Driver
    from forerun.engine.engine import Engine

DEFAULT_TTL = 600.0  # seconds
MOST_NAME = 200  # characters


class Session:
    """Made by `llm.session(name)`.

        session.append({"role": "user", "content": "Why is the sky blue?"})
        print(session.answer().text)

    Text and token ids are continued as they are; messages go through the chat template. One turn at a time.
    """

    def __init__(self, book: SessionBook, name: str, ttl: float, state: State) -> None:
        self._book, self.name, self.ttl, self._state = book, name, ttl, state
        self._busy = threading.Lock()
        self.closed = False

    @property
    def tokens(self) -> list[int]:
        """All that was said so far, as tokens; messages that wait for an answer are not among them."""
        return list(self._state.tokens)

    @property
    def messages(self) -> Messages:
        return [dict(message) for message in self._state.messages]

    @property
    def turns(self) -> int:
        """Answers so far."""
        return len(self._state.marks)

    @property
    def stats(self) -> Account:
        """How the prompt tokens of its turns were served, and what they cost."""
        return self._book.llm.stats().sessions.get(self.name, Account())

    def append(self, content: str | list[int] | dict[str, Any] | Messages) -> None:
        """Add text, token ids, a message or messages; the next answer is about them."""
        with self._alone("append to"):
            before = self._state.before_turn()
            if isinstance(content, dict) or (
                isinstance(content, (list, tuple)) and content and _is_message(content[0])
            ):
                self._append_messages([content] if isinstance(content, dict) else content)  # type: ignore[arg-type]
            else:
                self._append_text(content)  # type: ignore[arg-type]
            self._state.pending = before
            self._book.save(self)

    def _append_messages(self, messages: Messages) -> None:
        if self._state.tokens and not self._state.messages:
            raise BadRequest(
                f"session {self.name!r} is plain text, it cannot take messages", "open another session for them"
            )
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRequest(
                    f"a message must have a role, got {message!r:.80}", "pass {'role': ..., 'content': ...}"
                )
        self._state.messages += [dict(message) for message in messages]

    def _append_text(self, content: str | list[int]) -> None:
        if self._state.messages:
            raise BadRequest(
                f"session {self.name!r} is a conversation, it cannot take plain text",
                "append {'role': 'user', 'content': ...}",
            )
        llm = self._book.llm
        if isinstance(content, str) and content and self._state.tokens:  # no BOS token in the middle
            self._state.tokens += llm.tokenizer.encode(content)
        else:
            self._state.tokens += llm.encode(content)

    def answer(self, params: SamplingParams | None = None) -> Completion:
        """Run a turn to its end; the answer becomes part of the session."""
        events = list(self.stream(params))
        return collect(self._state.tokens[: self._state.prompt_end], 1, events)

    def stream(self, params: SamplingParams | None = None) -> Iterator[Event]:
        """The same as it comes. Leaving the loop cancels the turn: the session is then as if it had not been asked."""
        params = self._book.llm._checked(params)
        if params.n != 1:
            raise BadRequest(f"a session has one answer a turn, n is {params.n}", "fork it for others")
        with self._alone("answer in"):
            ids = self._prompt()
            said: list[int] = []
            text = ""
            for event in self._book.driver.stream(ids, params, self.name):
                if not event.provisional:
                    said += event.token_ids
                    text += event.text
                if event.finish_reason in ("stop", "length"):
                    self._state.end_turn(ids, said, text)
                    self._book.save(self)
                    self._book.driver.save(self._state.tokens)
                yield event

    def _prompt(self) -> list[int]:
        """What the model is asked: all tokens so far as they were, then what is new."""
        state, llm = self._state, self._book.llm
        if not state.messages:
            if not state.tokens:
                raise BadRequest(f"session {self.name!r} is empty", "append something first")
            return list(state.tokens)
        if state.pending is None:
            raise BadRequest(f"the last message of session {self.name!r} is answered", "append another first")
        full = llm.encode(state.messages)
        if not state.tokens:
            return full
        # an answer's text may have other tokens when it is encoded again: keep those that have K/V, and take from the
        # template only what follows the answer
        head, told = state.tokens[: state.prompt_end], state.tokens[state.prompt_end :]
        before = head + llm.tokenizer.encode(state.said)
        if full[: len(before)] != before:  # this template changes earlier messages: then its word counts
            return full
        tail = full[len(before) :]
        if told and tail and told[-1] == tail[0]:  # the end of the answer, said and in the template
            tail = tail[1:]
        return [*state.tokens, *tail]

    def fork(self, name: str, ttl: float | None = None) -> Session:
        """Another session that begins as this one is now; what both have in common is in the cache once."""
        with self._alone("fork"):
            return self._book.fork(self, name, self.ttl if ttl is None else ttl)

    def rewind(self, *, turns: int | None = None, tokens: int | None = None) -> None:
        """Take back the last turns (what waits for an answer counts as one), or tokens of a plain text."""
        if (turns is None) == (tokens is None):
            raise BadRequest("rewind takes turns or tokens, one of them", "say rewind(turns=1)")
        with self._alone("rewind"):
            if turns is not None:
                self._rewind_turns(turns)
            elif tokens is not None:
                self._rewind_tokens(tokens)
            self._book.save(self)

    def _rewind_turns(self, turns: int) -> None:
        starts = [*self._state.marks, *([self._state.pending] if self._state.pending is not None else [])]
        _whole("turns", turns, len(starts), self.name)
        self._state.go_back(len(starts) - turns)

    def _rewind_tokens(self, tokens: int) -> None:
        if self._state.messages:
            raise BadRequest(f"session {self.name!r} is a conversation", "rewind it by turns")
        _whole("tokens", tokens, len(self._state.tokens), self.name)
        self._state.cut(len(self._state.tokens) - tokens)

    def close(self, forget: bool = False) -> None:
        """Its K/V may go, and this object is of no more use. Where there is a disk tier the session can be opened again
        by its name, unless it is to `forget`."""
        if self.closed:
            return
        with self._alone("close"):
            self._book.close(self, forget)
            self.closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if self.closed:
            raise BadRequest(f"cannot {what} session {self.name!r}: it is closed", "open it with llm.session(name)")
        if not self._busy.acquire(blocking=False):
            raise BadRequest(
                f"cannot {what} session {self.name!r}: a turn of it is running",
                "wait for its end, or fork it before and use the fork",
            )
        try:
            yield
        finally:
            self._busy.release()


class SessionBook:
    """The sessions of one LLM by name: those that are open, and those that the disk tier has kept."""

    def __init__(self, llm: LLM, driver: Driver) -> None:
        self.llm, self.driver = llm, driver
        disk = None if llm.engine.tiers is None else llm.engine.tiers.disk
        self._files = None if disk is None else SessionFiles(disk.folder / "sessions", disk.identity)
        self._open: dict[str, Session] = {}
        self._lock = threading.RLock()

    def names(self) -> list[str]:
        with self._lock:
            return sorted({*self._open, *(self._files.names() if self._files is not None else [])})

    def open(self, name: str, ttl: float | None, create: bool) -> Session:
        _check_name(name)
        _check_ttl(ttl)
        with self._lock:
            session = self._open.get(name)
            if session is not None:
                if ttl is not None:
                    session.ttl = ttl
                    self._pin(session)
                return session
            state = None if self._files is None else self._files.load(name)
            if state is None and not create:
                known = ", ".join(map(repr, self.names()[:5])) or "none"
                raise BadRequest(f"there is no session {name!r}", f"known are: {known}")
            return self._add(name, DEFAULT_TTL if ttl is None else ttl, state or State())

    def fork(self, session: Session, name: str, ttl: float) -> Session:
        _check_name(name)
        _check_ttl(ttl)
        with self._lock:
            if name in self.names():
                raise BadRequest(f"there is a session {name!r} already", "choose another name for the fork")
            fork = self._add(name, ttl, session._state.copy())
            self.save(fork)
            return fork

    def _add(self, name: str, ttl: float, state: State) -> Session:
        session = self._open[name] = Session(self, name, ttl, state)
        self._pin(session)
        return session

    def _pin(self, session: Session) -> None:
        """From now on its K/V stays for its time to live; what of it is in the pool already, too."""

        def pin(engine: Engine) -> None:
            pins = engine.scheduler.pins
            pins.open(session.name, session.ttl)
            if engine.config.prefix_cache:
                pins.hold(session.name, engine.tree.match(session._state.tokens))

        self.driver.visit(pin)

    def save(self, session: Session) -> None:
        if self._files is not None:
            self._files.save(session.name, session._state)

    def close(self, session: Session, forget: bool) -> None:
        with self._lock:
            self._open.pop(session.name, None)
        self.driver.visit(lambda engine: engine.scheduler.pins.close(session.name))
        if self._files is not None and forget:
            self._files.remove(session.name)


def _is_message(value: object) -> bool:
    return not isinstance(value, (int, str))


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.strip() or len(name) > MOST_NAME:
        raise BadRequest(
            f"a session's name is text of 1 to {MOST_NAME} characters, got {name!r:.80}", "choose another name"
        )


def _check_ttl(ttl: float | None) -> None:
    right = ttl is None or (isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and 0 < ttl <= 1e9)
    if not right:
        raise BadRequest(f"ttl is {ttl!r}, it must be a number of seconds above 0 and up to 1e9", "leave it out")


def _whole(what: str, value: int, most: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BadRequest(f"cannot rewind {value!r} {what}: session {name!r} has {most}", f"give 1 to {most}")
