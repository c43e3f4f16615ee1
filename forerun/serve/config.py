"""Limits and settings of one server; every value is checked on creation. Knows no model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from forerun.errors import BadRequest
from forerun.serve.api_keys import ApiKeys

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"[a-z0-9_.-]+|[0-9a-f:.]*:[0-9a-f:.]*|\*")


@dataclass(frozen=True)
class ServeConfig:
    """What a server allows. The defaults are for one machine and its own user: no API keys, no other origins."""

    model_name: str  # what clients call the model
    max_body_bytes: int = 8 * 2**20
    max_model_len: int | None = None  # None: the model's
    max_queue: int = 256  # answers that may wait, beside those that run
    max_header_s: float = 10.0  # for a connection's first line and headers
    max_body_s: float = 30.0  # for a body to arrive
    max_request_s: float = 600.0  # for an answer, waiting included
    max_sessions: int = 256  # open at once; with a disk tier, more are stored there
    max_session_ttl: float = 3600.0  # longest time to live of a session's K/V in the pool, in seconds
    drafters: tuple[str, ...] = ()  # that requests may name, beside those of `auto`
    drain_s: float = 30.0  # for open answers to end after SIGTERM
    keys: ApiKeys | None = None  # None: requests need no key
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = LOCAL_HOSTS  # `Host` headers that are accepted; "*": any
    log_prompts: bool = False
    show_prompts: bool = False  # the page shows how cached texts begin, those of other clients too

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str) or not self.model_name.strip():
            raise BadRequest(f"model_name is {self.model_name!r}", "give the name that clients will ask for")
        if self.max_model_len is not None:
            _whole("max_model_len", self.max_model_len, 2)
        _whole("max_body_bytes", self.max_body_bytes, 1024)
        _whole("max_queue", self.max_queue, 0)
        _whole("max_sessions", self.max_sessions, 1)
        for name in ("max_header_s", "max_body_s", "max_request_s", "max_session_ttl", "drain_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise BadRequest(f"{name} is {value!r}, it must be a number above 0", "give seconds")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                hint = "give one such as models.example.org, in small letters, without port"
                raise BadRequest(f"an allowed host cannot be {host!r:.80}", hint)
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise BadRequest(f"a CORS origin cannot be {origin!r}", "give one such as https://example.org, or *")


def _whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadRequest(f"{name} is {value!r}, it must be a whole number of at least {least}", f"raise {name}")
