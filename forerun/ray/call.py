"""What the front hands to a replica: one HTTP request, and what decides which replica gets it. Knows no Ray.

The replica that has a prompt's K/V is the one that answered a prompt which begins the same: requests are routed by
their text as the client sent it, before any template or tokenizer. A request of a session is routed by the session's
name alone, and one that names a stored response goes to the replica that stored it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MAX_ROUTING_CHARS = 32_768  # of a prompt: about 8,000 tokens
MIN_SHARED_CHARS = 256  # four pages of tokens: less is no reason to prefer a replica
CHARS_PER_OPEN = 1024  # of a shared prompt: about 256 tokens of prefill, worth one more open request at its replica
MAX_IMBALANCE = 8  # requests open at one replica more than at another: beyond it, load decides however much is shared
FORWARDED_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
ANSWERING_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
STORED_RESPONSES = "/v1/responses/"
SESSIONS = "/forerun/sessions/"


@dataclass
class CountedPlace:
    """The replica at which a call counts as open. Once it has ended it counts nowhere, however late it is routed."""

    replica: str = ""
    ended: bool = False


@dataclass(frozen=True)
class ReplicaCall:
    scope: dict[str, Any]  # of the request, without objects of this process
    body: bytes
    answers: int = 0  # that it asks for; 0: none
    prompt: str = ""  # as far as it decides the replica; stays here
    session: str = ""
    stored: bool = False  # it names a response that one replica has stored
    only: str = ""  # the replica that gets it, where it is still there
    counted: CountedPlace = field(default_factory=CountedPlace)  # stays here

    def again(self) -> ReplicaCall:
        """The same, to be sent once more."""
        return replace(self, counted=CountedPlace())

    def to(self, replica: str) -> ReplicaCall:
        return replace(self.again(), only=replica)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"prompt": "", "counted": CountedPlace()}


def replica_call(scope: dict[str, Any], body: bytes) -> ReplicaCall:
    """From a request that was let in. A body that is no request is forwarded as well: a replica says what is wrong."""
    own = {name: scope[name] for name in FORWARDED_SCOPE if name in scope}
    own["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    key = scope["state"]["key"]
    own["state"] = {"key": key}
    path, method, owner = scope["path"], scope["method"], key.name if key is not None else ""
    if method == "DELETE" and path.startswith(SESSIONS):
        return ReplicaCall(own, body, session=f"{owner} {path.removeprefix(SESSIONS)}")
    if path.startswith(STORED_RESPONSES):
        return ReplicaCall(own, body, stored=True)
    values = _json_object(body) if method == "POST" else {}
    session = _session_name(values)
    return ReplicaCall(
        own,
        body,
        answers=_answers(values) if method == "POST" and path in ANSWERING_PATHS else 0,
        prompt=_prompt_text(values)[:MAX_ROUTING_CHARS],
        session=f"{owner} {session}" if session else "",
        stored=isinstance(values.get("previous_response_id"), str),
    )


def get_call(path: str) -> ReplicaCall:
    """The front's own question."""
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": path}
    scope |= {"raw_path": path.encode(), "query_string": b"", "headers": [], "state": {"key": None}}
    return ReplicaCall(scope, b"")


def rank(text: str, replicas: Sequence[str]) -> list[str]:
    """Replicas by their rank for a text: where one comes or goes, only the texts that it has or had move."""
    return sorted(replicas, key=lambda name: hashlib.blake2b(f"{name} {text}".encode("utf-8", "replace")).digest())


_known: dict[str, list[str]] = {}  # names of replicas by application
_open: defaultdict[str, Counter[str]] = defaultdict(Counter)  # calls at each replica, by application
_sent: defaultdict[str, Counter[str]] = defaultdict(Counter)  # characters of prompts that each has got
_counting = threading.Lock()  # the router runs in a thread of its own


def publish_replicas(application: str, names: Sequence[str]) -> None:
    """Called by the router of this process, when replicas come or go. A new one is taken to have got as much text as
    the one that got least: it need not make up for what others got before it was there."""
    with _counting:
        sent, before = _sent[application], known_replicas(application)
        least = min((sent[name] for name in before if name in names), default=0)
        for name in set(names).difference(before):
            sent[name] = max(sent[name], least)
        for name in set(before).difference(names):
            del sent[name]
        _known[application] = sorted(names)


def known_replicas(application: str) -> list[str]:
    return _known.get(application, [])


def count_chosen(application: str, call: ReplicaCall, name: str) -> None:
    """Called by the router of this process as soon as it has chosen a replica, so that the next choice knows of it, and
    again when one has got the call: Ray may have sent it to another."""
    place = call.counted
    with _counting:
        if place.ended or place.replica == name:
            return
        if place.replica:
            _open[application][place.replica] -= 1
            _sent[application][place.replica] -= len(call.prompt)
        place.replica = name
        _open[application][name] += 1
        _sent[application][name] += len(call.prompt)


def count_ended(application: str, call: ReplicaCall) -> None:
    with _counting:
        if call.counted.replica and not call.counted.ended:
            _open[application][call.counted.replica] -= 1
        call.counted.ended = True


def replica_loads(application: str, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Open calls of each, and the characters of prompts that it has got."""
    return {name: (_open[application][name], _sent[application][name]) for name in names}


def order_replicas(loads: Mapping[str, tuple[int, int]], holders: Sequence[str], shared_chars: int) -> list[str]:
    """The least loaded first, after one that holds so much of the prompt where that is worth the load it has more.
    `loads`: open requests of each and how much text it has got."""
    by_load = sorted(loads, key=lambda name: (loads[name], name))
    best = next((name for name in by_load if shared_chars >= MIN_SHARED_CHARS and name in holders), by_load[0])
    excess = loads[best][0] - loads[by_load[0]][0]
    if excess > min(MAX_IMBALANCE, shared_chars // CHARS_PER_OPEN):
        return by_load
    return [best, *(name for name in by_load if name != best)]


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _session_name(values: dict[str, Any]) -> str:
    own = values.get("forerun")
    session = own.get("session") if isinstance(own, dict) else None
    name = session.get("name") if isinstance(session, dict) else session
    return name if isinstance(name, str) else ""


def _answers(values: dict[str, Any]) -> int:
    """As many as the replica will count; what is no number counts one, and is refused there."""
    prompt, n = values.get("prompt"), values.get("n")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    choices = n if isinstance(n, int) and n > 0 else 1
    return choices * (len(prompt) if several and isinstance(prompt, list) else 1)


def _prompt_text(values: dict[str, Any]) -> str:
    """All text of a prompt in order; token ids as text, too."""
    parts = [values.get(name) for name in ("system", "instructions", "tools", "prompt", "messages", "input")]
    return "".join(_text(part) for part in parts if part is not None)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(_text(part) for name, part in value.items() if name not in ("type", "cache_control"))
    if isinstance(value, list):
        return "".join(_text(part) for part in value)
    return f"{value} "
