"""Sessions: conversations and texts that are continued under a name, with their K/V kept in the cache.

A session is a list of tokens. Each turn appends to it, generates an answer and keeps the answer's own tokens, so that
the next turn reads all of them from the cache. After a turn its K/V stays in the pool until its time to live is over,
and is written to the disk tier where there is one: then a new process finds the session by its name. Sessions are
opened and closed by `session_registry`. Knows no pages.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from forerun.core import SamplingParams
from forerun.engine.sequence import Event, FinishReason, Request
from forerun.engine.stats import Account
from forerun.errors import BadRequest
from forerun.inputs import as_params
from forerun.outputs import Completion, collect
from forerun.params import SamplingOptions

if TYPE_CHECKING:
    from forerun.llm import Messages
    from forerun.sharing.session_registry import SessionRegistry, SessionState


class Session:
    """Made by `llm.session(name)`.

        session.append({"role": "user", "content": "Why is the sky blue?"})
        print(session.answer().text)

    Text and token ids are continued as they are; messages go through the chat template. One turn at a time.
    """

    def __init__(self, registry: SessionRegistry, name: str, ttl: float, state: SessionState) -> None:
        self._registry, self.name, self.ttl, self._state = registry, name, ttl, state
        self._busy = threading.Lock()
        self.closed = False
        self.saved = True  # False: the disk tier could not write its latest state, which is lost with the process
        self.encoder: Callable[[Messages], list[int]] | None = None  # of messages; None: the chat template

    @property
    def tokens(self) -> list[int]:
        """All tokens so far; those of messages without an answer are not among them."""
        return list(self._state.tokens)

    @property
    def messages(self) -> Messages:
        return [dict(message) for message in self._state.messages]

    @property
    def turns(self) -> int:
        """Answers so far."""
        return len(self._state.marks)

    def stats(self) -> Account:
        """Where the prompt tokens of its turns came from, and what they cost."""
        return self._registry.llm.stats().sessions.get(self.name, Account())

    def append(self, content: str | list[int] | dict[str, Any] | Messages) -> None:
        """Add text, token ids, a message or messages for the next answer."""
        with self._exclusively("append to"):
            before = self._state.before_turn()
            several = isinstance(content, (list, tuple)) and content and not isinstance(content[0], (int, str))
            if isinstance(content, dict) or several:
                self._append_messages([content] if isinstance(content, dict) else content)  # type: ignore[arg-type]
            else:
                self._append_text(content)  # type: ignore[arg-type]
            self._state.pending = before
            self._registry.save(self)

    def _append_messages(self, messages: Messages) -> None:
        if self._state.tokens and not self._state.messages:
            hint = "open another session for them"
            raise BadRequest(f"session {self.name!r} is plain text, it cannot take messages", hint)
        self._state.messages += self._registry.llm.tokenizer.plain_messages(messages)

    def _append_text(self, content: str | list[int]) -> None:
        if self._state.messages:
            hint = "append {'role': 'user', 'content': ...}"
            raise BadRequest(f"session {self.name!r} is a conversation, it cannot take plain text", hint)
        llm = self._registry.llm
        if isinstance(content, str) and content and self._state.tokens:  # no BOS token in the middle
            self._state.tokens += llm.tokenizer.encode(content)
        else:
            self._state.tokens += llm.encode(content)

    def answer(self, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]) -> Completion:
        """Run a turn to its end; the answer becomes part of the session. `options`: fields of `SamplingParams` for this
        turn, such as `max_tokens=64`."""
        turn = _Turn(self._params(params, options))
        events = list(self._stream(turn))
        return collect(turn.request, events)

    def stream(self, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]) -> Iterator[Event]:
        """`answer` event by event. Leaving the loop cancels the turn: the session is then as it was before."""
        return self._stream(_Turn(self._params(params, options)))

    async def aanswer(self, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]) -> Completion:
        """`answer` for asyncio; turns of several sessions at once share batches."""
        turn = _Turn(self._params(params, options))
        events = [event async for event in self._astream(turn)]
        return collect(turn.request, events)

    def astream(
        self, params: SamplingParams | Request | None = None, **options: Unpack[SamplingOptions]
    ) -> AsyncIterator[Event]:
        """`stream` for asyncio. A `Request` is what `llm.request` made of `upcoming()` for this session: its prompt is
        neither encoded nor checked again."""
        if not isinstance(params, Request):
            return self._astream(_Turn(self._params(params, options)))
        _check_one(params.params)
        return self._astream(_Turn(params.params, params))

    def _params(self, params: SamplingParams | None, options: SamplingOptions) -> SamplingParams:
        """Whether the engine can do as they ask is checked with the request, which may take long."""
        params = as_params(params, options)
        _check_one(params)
        return params

    def _request(self, turn: _Turn) -> Request:
        if turn.made is None:
            turn.made = self._registry.llm.request(self._prompt(), turn.params, self.name)
        return turn.made

    def _stream(self, turn: _Turn) -> Iterator[Event]:
        with self._exclusively("answer in"):
            for event in self._registry.driver.stream(self._request(turn)):
                if turn.add(event):
                    self._end(turn)
                yield event

    async def _astream(self, turn: _Turn) -> AsyncIterator[Event]:
        with self._exclusively("answer in"):
            stream = self._registry.driver.astream(turn.made or (lambda: self._request(turn)))
            async with aclosing(stream) as events:  # type: ignore[type-var]
                async for event in events:
                    if turn.add(event):
                        await completed(asyncio.to_thread(self._end, turn))  # it waits for the disk
                    yield event

    def _end(self, turn: _Turn) -> None:
        """The answer is complete: from here on it survives this process, where there is a disk tier."""
        self._state.end_turn(turn.request.prompt_ids, self._kept(turn), turn.text)
        self._registry.save(self)
        self._registry.driver.save(self._state.tokens)

    def _kept(self, turn: _Turn) -> list[int]:
        """The answer's tokens, without what a stop string cut from its text: the next prompt goes on from the text."""
        llm, tokens = self._registry.llm, turn.answer_ids
        if turn.finish_reason != "stop" or tokens[-1] in llm.config.eos_ids:
            return tokens
        kept, decode = len(tokens), llm.tokenizer.decode
        while not turn.text.startswith(decode(tokens[:kept])):
            kept -= 1
        rest = turn.text[len(decode(tokens[:kept])) :]  # of a token that the stop string begins in
        return [*tokens[:kept], *(llm.tokenizer.encode(rest) if rest else [])]

    @property
    def pending(self) -> bool:
        """Whether something was appended that has no answer yet."""
        return self._state.pending is not None

    def upcoming(self) -> list[int]:
        """The prompt of the next turn."""
        with self._exclusively("read"):
            return self._prompt()

    def _prompt(self) -> list[int]:
        """All tokens so far, unchanged, then what was appended."""
        state, llm = self._state, self._registry.llm
        if not state.messages:
            if not state.tokens:
                raise BadRequest(f"session {self.name!r} is empty", "append something first")
            return list(state.tokens)
        if state.pending is None:
            raise BadRequest(f"the last message of session {self.name!r} is answered", "append another first")
        full = (self.encoder or llm.encode)(state.messages)
        if not state.tokens:
            return full
        # an answer's text may have other tokens when it is encoded again: keep those that have K/V, and take from the
        # template only what follows the answer
        head, answer = state.tokens[: state.prompt_end], state.tokens[state.prompt_end :]
        before = head + llm.tokenizer.encode(state.answer_text)
        if full[: len(before)] != before:  # this template changes earlier messages: then all of it is used
            return full
        tail = full[len(before) :]
        if answer and tail and answer[-1] == tail[0]:  # the end of the answer, generated and in the template
            tail = tail[1:]
        return [*state.tokens, *tail]

    def fork(self, name: str, ttl: float | None = None) -> Session:
        """Another session with the same content; what both share is in the cache once."""
        with self._exclusively("fork"):
            return self._registry.fork(self, name, self.ttl if ttl is None else ttl)

    def rewind(self, *, turns: int | None = None, tokens: int | None = None) -> None:
        """Remove the last turns (one without an answer counts), or tokens of a plain text."""
        if (turns is None) == (tokens is None):
            raise BadRequest("rewind takes turns or tokens, one of them", "call rewind(turns=1)")
        with self._exclusively("rewind"):
            if turns is not None:
                self._rewind_turns(turns)
            elif tokens is not None:
                self._rewind_tokens(tokens)
            self._registry.save(self)

    def _rewind_turns(self, turns: int) -> None:
        starts = [*self._state.marks, *([self._state.pending] if self._state.pending is not None else [])]
        _check_count("turns", turns, len(starts), self.name)
        self._state.go_back(len(starts) - turns)

    def _rewind_tokens(self, tokens: int) -> None:
        if self._state.messages:
            raise BadRequest(f"session {self.name!r} is a conversation", "rewind it by turns")
        _check_count("tokens", tokens, len(self._state.tokens), self.name)
        self._state.cut(len(self._state.tokens) - tokens)

    def close(self, forget: bool = False) -> None:
        """Unpin its K/V; this object cannot be used afterwards. Where there is a disk tier the session can be opened
        again by its name, unless `forget` is set."""
        if self.closed or self._registry.driver.closed:
            self.closed = True
            return
        with self._exclusively("close", held=forget):
            self._registry.close(self, forget)
            self.closed = True

    def __repr__(self) -> str:
        kind = f"messages={len(self._state.messages)}" if self._state.messages else f"tokens={len(self._state.tokens)}"
        state = ", closed" if self.closed else ", pending" if self.pending else ""
        return f"Session({self.name!r}, turns={self.turns}, {kind}{state})"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _exclusively(self, what: str, held: bool = True) -> Iterator[None]:
        """`held`: no other process may use it meanwhile."""
        if self.closed:
            raise BadRequest(f"cannot {what} session {self.name!r}: it is closed", "open it with llm.session(name)")
        self._registry.driver.check_open()
        if not self._busy.acquire(blocking=False):
            hint = "wait for its end or close its iterator; or fork it before, and use the fork"
            raise BadRequest(f"cannot {what} session {self.name!r}: a turn of it is running", hint)
        try:
            if not held:
                yield
                return
            self._registry.hold(self.name)
            try:
                yield
            finally:
                self._registry.release(self.name)
        finally:
            self._busy.release()


@dataclass
class _Turn:
    """A request, once it is made, and its answer so far."""

    params: SamplingParams
    made: Request | None = None
    answer_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    @property
    def request(self) -> Request:
        assert self.made is not None  # nothing is emitted before
        return self.made

    def add(self, event: Event) -> bool:
        """Whether the answer is complete with this event."""
        if not event.provisional:
            self.answer_ids += event.token_ids
            self.text += event.text
        self.finish_reason = event.finish_reason
        return event.finish_reason in ("stop", "length")


def _check_one(params: SamplingParams) -> None:
    if params.n != 1:
        raise BadRequest(f"a session has one answer a turn, n is {params.n}", "fork it for others")


def _check_count(what: str, value: int, limit: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise BadRequest(f"cannot rewind {value!r} {what}: session {name!r} has {limit}", f"give 1 to {limit}")


async def completed(work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work` even where the waiting task is cancelled: its thread goes on, and uses the session meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
