"""All sessions by name: those that are open, and those that the disk tier has kept from earlier processes.

Pins their K/V in the pool for their time to live. What a turn does is in `session`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from forerun.errors import BadRequest
from forerun.sharing.session import Session
from forerun.sharing.session_files import SessionFiles, SessionState

if TYPE_CHECKING:
    from forerun.llm import LLM
    from forerun.runtime.driver import Driver

DEFAULT_TTL_S = 600.0  # after each turn
MAX_NAME_CHARS = 200


class SessionRegistry:
    """The sessions of one LLM by name: those that are open, and those that the disk tier has kept."""

    def __init__(self, llm: LLM, driver: Driver) -> None:
        self.llm, self.driver = llm, driver
        disk = None if llm.engine.tiers is None else llm.engine.tiers.disk
        self._files = None if disk is None else SessionFiles(disk.folder / "sessions", llm.model_id)
        self._open: dict[str, Session] = {}
        self._lock = threading.RLock()

    def names(self) -> list[str]:
        with self._lock:
            return sorted({*self._open, *(self._files.names() if self._files is not None else [])})

    def open(self, name: str, ttl: float | None, create: bool) -> Session:
        _check_name(name)
        _check_ttl(ttl)
        self.driver.check_open()
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
            return self._add(name, DEFAULT_TTL_S if ttl is None else ttl, state or SessionState())

    def fork(self, session: Session, name: str, ttl: float) -> Session:
        _check_name(name)
        _check_ttl(ttl)
        with self._lock:
            if name in self.names():
                raise BadRequest(f"there is a session {name!r} already", "choose another name for the fork")
            fork = self._add(name, ttl, session._state.copy())
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
        if self._files is not None:
            self._files.save(session.name, session._state)

    def close(self, session: Session, forget: bool) -> None:
        with self._lock:
            self._open.pop(session.name, None)
        with self.driver.exclusive() as engine:
            engine.scheduler.pins.close(session.name)
        if self._files is not None and forget:
            self._files.remove(session.name)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME_CHARS:
        raise BadRequest(
            f"a session's name is text of 1 to {MAX_NAME_CHARS} characters, got {name!r:.80}", "choose another name"
        )


def _check_ttl(ttl: float | None) -> None:
    right = ttl is None or (isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and 0 < ttl <= 1e9)
    if not right:
        raise BadRequest(f"ttl is {ttl!r}, it must be a number of seconds above 0 and up to 1e9", "leave it out")
