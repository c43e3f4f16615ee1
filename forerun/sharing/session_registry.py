"""All sessions by name: those that are open, and those that the disk tier has kept from earlier processes.

Pins their K/V in the pool for their time to live. A session's file is a small JSON document that is written whole or
not at all; where the folder cannot be written, that is logged once, and sessions go on without files. Processes that
share the folder take turns: one of them holds a session at a time, and the next reads what the last has written. What a
turn does is in `session`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.cache.file_lock import FileLock
from forerun.cache.segments import json_digest
from forerun.errors import BadRequest, ForerunError
from forerun.llm import LLM
from forerun.options import check_number
from forerun.runtime.driver import Driver
from forerun.sharing.session import Session

log = logging.getLogger("forerun")

DEFAULT_TTL_S = 600.0  # after each turn
MAX_NAME_CHARS = 200


@dataclass
class SessionState:
    """`marks`: where each answered turn began, as (tokens, messages, prompt_end, answer_text) before it; `pending`: the
    same of a turn that is not answered yet."""

    tokens: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)  # empty: a plain text
    marks: list[tuple[int, int, int, str]] = field(default_factory=list)
    pending: tuple[int, int, int, str] | None = None
    prompt_end: int = 0  # where the last answer begins in `tokens`
    answer_text: str = ""  # of the last turn

    def before_turn(self) -> tuple[int, int, int, str]:
        """Where the current turn began."""
        return self.pending or (len(self.tokens), len(self.messages), self.prompt_end, self.answer_text)

    def end_turn(self, prompt: list[int], answer: list[int], answer_text: str) -> None:
        self.marks.append(self.before_turn())
        self.pending, self.prompt_end, self.answer_text = None, len(prompt), answer_text
        self.tokens = [*prompt, *answer]
        if self.messages:
            self.messages.append({"role": "assistant", "content": answer_text})

    def go_back(self, turn: int) -> None:
        """To where turn number `turn` began."""
        start = self.marks[turn] if turn < len(self.marks) else self.before_turn()
        tokens, messages, self.prompt_end, self.answer_text = start
        del self.tokens[tokens:], self.messages[messages:], self.marks[turn:]
        self.pending = None

    def cut(self, length: int) -> None:
        """Keep the first tokens of a plain text."""
        del self.tokens[length:]
        self.marks = [mark for mark in self.marks if mark[0] < length]
        if self.pending is not None and self.pending[0] >= length:
            self.pending = None
        self.prompt_end = min(self.prompt_end, length)


class SessionFiles:
    def __init__(self, folder: Path, identity: str) -> None:
        """`identity`: of the model's weights, on any device; sessions of other models are not listed."""
        self._folder, self._identity = folder, identity
        self._failed = False
        self._versions: dict[str, tuple[int, ...] | None] = {}  # of the files as they were last read or written here

    def names(self) -> list[str]:
        found = []
        for path in self._folder.glob(f"{self._identity[:12]}-*.json"):
            try:
                found.append(str(_read(path)["name"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # reported when it is opened by name
        return found

    def lock(self, name: str) -> FileLock:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self._path(name).with_suffix(".lock"))

    def exists(self, name: str) -> bool:
        return self._path(name).exists()

    def changed(self, name: str) -> bool:
        """Whether another process has written or removed it."""
        try:
            return self._versions.get(name) != self.version(name)
        except OSError:  # a shared folder that does not answer
            return False

    def version(self, name: str) -> tuple[int, ...] | None:
        """Of its file; None where there is none."""
        try:
            found = self._path(name).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def load(self, name: str) -> SessionState | None:
        path = self._path(name)
        try:
            self._versions[name] = self.version(name)
            if self._versions[name] is None:
                return None
            state = _read(path)["state"]
            state["answer_text"] = state.pop("said")
            marks = [tuple(mark) for mark in state.pop("marks")]
            pending = state.pop("pending")
            return SessionState(**state, marks=marks, pending=None if pending is None else tuple(pending))
        except (OSError, ValueError, KeyError, TypeError) as error:
            hint = f"remove {path}, or choose another name"
            raise ForerunError(f"the file of session {name!r} is damaged: {error}", hint) from error

    def save(self, name: str, state: SessionState) -> bool:
        """Whether it is on disk now."""
        temporary = self._path(name).with_suffix(f".{os.getpid()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            values = asdict(state)
            values["said"] = values.pop("answer_text")  # its name in files
            body = {"name": name, "state": values}
            with open(temporary, "w", encoding="utf-8", opener=_private) as file:
                json.dump({"body": body, "digest": json_digest(body)}, file)
                file.flush()
                os.fsync(file.fileno())  # a machine that stops now must not leave an empty file under the name
            os.replace(temporary, self._path(name))
            self._versions[name] = self.version(name)
            return True
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._failed:
                self._failed = True
                log.warning("session %r will not survive this process: %s", name, error)
            return False

    def close(self, name: str, forget: bool) -> None:
        """No longer open here; `forget` removes its file."""
        self._versions.pop(name, None)
        if not forget:
            return
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("the file of session %r stays: %s", name, error)

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._identity[:12]}-{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


def _private(path: str, flags: int) -> int:
    """Conversations are private: only the owner of the process may read them."""
    return os.open(path, flags, 0o600)


def _read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["digest"] != json_digest(found["body"]):
        raise ValueError("its digest does not agree")
    return found["body"]


class SessionRegistry:
    """The sessions of one LLM by name: those that are open, and those that the disk tier has kept."""

    def __init__(self, llm: LLM, driver: Driver) -> None:
        self.llm, self.driver = llm, driver
        disk = None if llm.engine.tiers is None else llm.engine.tiers.disk
        self._files = None if disk is None else SessionFiles(disk.folder / "sessions", llm.model_id)
        self._open: dict[str, Session] = {}
        self._lock = threading.RLock()
        self._held: dict[str, tuple[FileLock, int]] = {}  # against other processes, and how often

    def hold(self, name: str) -> None:
        """Hold a session against other processes, until as many calls of `release`; it is then as they left it."""
        if self._files is None:
            return
        with self._lock:
            lock, count = self._held.get(name) or (self._files.lock(name), 0)
            try:
                if not count and not lock.acquire():
                    raise BadRequest(f"session {name!r} is in use by another process", "wait for its answer")
            except OSError:  # a folder that is full or read only: there is nothing to hold
                return
            self._refresh(name)
            self._held[name] = lock, count + 1

    def _refresh(self, name: str) -> None:
        """Read an open session again where another process has continued it."""
        session = self._open.get(name)
        if session is not None and name not in self._held and self._files is not None and self._files.changed(name):
            session._state = self._files.load(name) or SessionState()

    def release(self, name: str) -> None:
        with self._lock:
            lock, count = self._held.pop(name, (None, 0))
            if lock is not None and count > 1:
                self._held[name] = lock, count - 1
            elif lock is not None and self._files is not None and not self._files.exists(name):
                lock.remove()
            elif lock is not None:
                lock.release()

    def names(self) -> list[str]:
        with self._lock:
            return sorted({*self._open, *(self._files.names() if self._files is not None else [])})

    def open(self, name: str, ttl: float | None, create: bool) -> Session:
        _check(name, ttl)
        self.driver.check_open()
        with self._lock:
            self._refresh(name)
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
            return self._add(name, DEFAULT_TTL_S if ttl is None else ttl, state or SessionState())

    def fork(self, session: Session, name: str, ttl: float) -> Session:
        _check(name, ttl)
        with self._lock:
            if name in self.names():
                raise BadRequest(f"there is a session {name!r} already", "choose another name for the fork")
            fork = self._add(name, ttl, deepcopy(session._state))
            self.save(fork)
            return fork

    def _add(self, name: str, ttl: float, state: SessionState) -> Session:
        session = self._open[name] = Session(self, name, ttl, state)
        self._pin(session)
        return session

    def _pin(self, session: Session) -> None:
        """Pin its K/V for its time to live, from now on and as far as it is in the pool already."""
        with self.driver.exclusive() as engine:
            pins = engine.scheduler.pins
            pins.open(session.name, session.ttl)
            if engine.config.enable_prefix_caching:
                pins.hold(session.name, engine.tree.match(session._state.tokens))

    def save(self, session: Session) -> None:
        """Write it where there is a disk tier; `saved` is false afterwards where that failed."""
        if self._files is not None:
            session.saved = self._files.save(session.name, session._state)

    def close(self, session: Session, forget: bool) -> None:
        with self._lock:
            self._open.pop(session.name, None)
        with self.driver.exclusive() as engine:
            engine.scheduler.pins.close(session.name)
        if self._files is not None:
            self._files.close(session.name, forget)


def _check(name: str, ttl: float | None) -> None:
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME_CHARS:
        hint = "choose another name"
        raise BadRequest(f"a session's name is text of 1 to {MAX_NAME_CHARS} characters, got {name!r:.80}", hint)
    if ttl is not None:
        check_number("ttl", ttl, 0, 1e9, open_low=True, hint="give seconds, or leave it out")
