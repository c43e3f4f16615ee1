"""A recorded agent, replayed: requests and tool results come turn by turn, the model writes the answers, branches leave
from earlier turns. Says how many prompt tokens were read from cache.

A trace is a file of JSON lines: first `{"system": ...}`, then one turn a line with `session`, `role` (user or tool),
`content`, and where they are needed `id`, `from` (the turn it goes on from; default: the session's last) and
`max_tokens`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun import data
from forerun.engine.stats import Stats
from forerun.errors import BadRequest
from forerun.params import SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM

SHIPPED = "traces/garden.jsonl"
_ROLES = ("user", "tool")
_KEYS = {"id", "session", "from", "role", "content", "max_tokens"}


@dataclass(frozen=True)
class TraceTurn:
    """What reaches the agent, and after which turn."""

    id: str
    session: str
    after: str | None  # a turn's id; None: the conversation's beginning
    role: str
    content: str
    max_tokens: int

    @property
    def message(self) -> dict[str, str]:
        """Not every chat template knows tools, so their results come as a user's words that say what they are."""
        text = self.content if self.role == "user" else f"[tool result]\n{self.content}"
        return {"role": "user", "content": text}


@dataclass(frozen=True)
class AgentTrace:
    name: str
    system: str
    turns: tuple[TraceTurn, ...]


@dataclass
class Replay:
    """What one pass over a trace cost."""

    turns: list[dict[str, Any]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def record(self) -> dict[str, Any]:
        return {
            "turns": len(self.turns),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_share": round(self.cached_share, 4),
            "seconds": round(self.seconds, 3),
            "stats": self.stats.record(),
        }


def read_trace(path: Path | None = None, most: int | None = None) -> AgentTrace:
    """A trace of the user's own or the shipped one; `most`: only its first turns."""
    source = SHIPPED if path is None else str(path)
    try:
        text = data.text(SHIPPED) if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read {source}: {error}", "give a UTF-8 file of JSON lines") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) < 2:
        raise BadRequest(f"{source} has no turn", 'the first line is {"system": ...}, every other one a turn')
    head = _object(lines[0], source)
    if not isinstance(head.get("system"), str) or not head["system"].strip():
        raise BadRequest(f"{source}, line {lines[0][0]}: no `system` text", 'begin with {"system": "You are ..."}')
    turns: dict[str, TraceTurn] = {}
    last: dict[str, str] = {}  # turn by session
    for line in lines[1:]:
        turn = _turn(line, source, turns, last)
        turns[turn.id] = turn
        last[turn.session] = turn.id
    return AgentTrace(str(head.get("trace", source)), head["system"], tuple(turns.values())[:most])


def replay(
    llm: LLM,
    trace: AgentTrace,
    speculate: str = "auto",
    on_progress: Callable[[str], None] = lambda text: None,
) -> Replay:
    """Every turn, one after the other, from a cold cache; greedy, so that two passes are the same conversation."""
    llm.clear_cache()
    found, talks = Replay(), dict[str | None, list[dict[str, str]]]()
    talks[None] = [{"role": "system", "content": trace.system}]
    for number, turn in enumerate(trace.turns, 1):
        on_progress(f"turn {number} of {len(trace.turns)}")
        messages = [*talks[turn.after], turn.message]
        start = time.perf_counter()
        answer = llm.chat(messages, SamplingParams(max_tokens=turn.max_tokens, speculation=speculate))[0]
        found.seconds += time.perf_counter() - start
        talks[turn.id] = [*messages, {"role": "assistant", "content": answer.text}]
        usage = answer.usage
        found.prompt_tokens += usage.prompt_tokens
        found.cached_tokens += usage.cached_tokens
        found.stats.book(turn.session, usage, finished=answer.finish_reason in ("stop", "length"))
        figures = asdict(usage)
        names = ("prompt_tokens", "cached_tokens", "completion_tokens", "ttft_s", "total_s")
        found.turns.append({"id": turn.id, "session": turn.session, **{name: figures[name] for name in names}})
    return found


def _turn(line: tuple[int, str], source: str, turns: dict[str, TraceTurn], last: dict[str, str]) -> TraceTurn:
    number, record = line[0], _object(line, source)
    where = f"{source}, line {number}"
    if unknown := sorted(set(record) - _KEYS):
        raise BadRequest(f"{where}: unknown key {unknown[0]!r}", f"a turn has {', '.join(sorted(_KEYS))}")
    session, role, content = (record.get(key) for key in ("session", "role", "content"))
    if not isinstance(session, str) or not isinstance(content, str) or not session or not content.strip():
        raise BadRequest(f"{where}: `session` and `content` must be text", "give both")
    if role not in _ROLES:
        raise BadRequest(f"{where}: role {role!r}", f"use one of {', '.join(_ROLES)}")
    name, after = str(record.get("id", number)), record.get("from", last.get(session))
    if name in turns:
        raise BadRequest(f"{where}: a turn called {name!r} came before", "give every turn an id of its own")
    if after is not None and after not in turns:
        raise BadRequest(f"{where}: it goes on from {after!r}, which did not come before", "name an earlier turn's id")
    limit = record.get("max_tokens", 32)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise BadRequest(f"{where}: max_tokens is {limit!r}", "give a whole number of at least 1")
    return TraceTurn(name, session, after, role, content, limit)


def _object(line: tuple[int, str], source: str) -> dict[str, Any]:
    try:
        record = json.loads(line[1])
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise BadRequest(f"{source}, line {line[0]}: not a JSON object", "one turn a line: {...}")
    return record
