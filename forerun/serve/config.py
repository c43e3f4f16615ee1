"""Limits and settings of one server, its API keys among them; every value is checked on creation. Knows no model.

API keys are written one to a line: a name, the SHA-256 digest of the key in hex, and optionally how many answers may be
open with it at once and its weight (`weight=2`), which is its share of the engine beside the other keys'. `printf %s
"$KEY" | sha256sum` gives the digest; only digests are stored. Keys must be long and random, as digests of guessable
ones can be guessed, too.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.engine.sequence import Client
from forerun.errors import BadRequest
from forerun.options import check_number

MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"[a-z0-9_.-]+|[0-9a-f:.]*:[0-9a-f:.]*|\*")
_KEY_FORM = "write NAME SHA256, and maybe LIMIT and weight=NUMBER, one to a line"


@dataclass(frozen=True)
class ApiKey:
    name: str
    digest: bytes
    limit: int | None = None  # answers open at once; None: what the server allows
    weight: float = 1.0  # its share of the engine, of the cache and of the queue, beside the other keys'

    @property
    def client(self) -> Client:
        return Client(self.name, self.weight)


@dataclass
class ApiKeys:
    keys: Sequence[ApiKey]
    path: Path | None = None  # of the file that they are read from again

    def reload(self) -> None:
        """Read the file again; what is wrong in it raises, and the keys stay as they are."""
        if self.path is not None:
            self.keys = ApiKeys.load(self.path).keys

    def find(self, given: str) -> ApiKey | None:
        """The entry of a key. All digests are compared, so that the time taken reveals nothing."""
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    @classmethod
    def parse(cls, text: str, origin: str) -> ApiKeys:
        keys: list[ApiKey] = []
        for number, line in enumerate(re.split(r"[\n,]", text), 1):
            words = line.split("#")[0].split()
            if words:
                keys.append(_parse_key(words, f"{origin}, line {number}"))
        names = [key.name for key in keys]
        if not keys:
            raise BadRequest(f"{origin} has no API keys", _KEY_FORM)
        if len(set(names)) < len(names) or len({key.digest for key in keys}) < len(keys):
            raise BadRequest(f"{origin} has a name or a key twice", "give each holder a name and a key of their own")
        return cls(tuple(keys))

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        try:
            return cls(cls.parse(path.read_text(encoding="utf-8"), str(path)).keys, path)
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"cannot read the API keys in {path}: {error}", _KEY_FORM) from None


def _parse_key(words: list[str], where: str) -> ApiKey:
    # What is not a digest may be a key itself, pasted by mistake: the message must not repeat it
    if len(words) < 2 or not re.fullmatch(r"[0-9a-fA-F]{64}", words[1]):
        raise BadRequest(f"{where}: this is not a name and a SHA-256 digest of 64 hex digits", _KEY_FORM)
    limit, weight = None, 1.0
    for word in words[2:]:
        if word.startswith("weight="):
            weight = _weight(word.removeprefix("weight="), where)
        elif limit is not None or not word.isdecimal() or int(word) < 1:
            raise BadRequest(f"{where}: the limit is {word!r}, it must be a whole number of at least 1", _KEY_FORM)
        else:
            limit = int(word)
    return ApiKey(words[0], bytes.fromhex(words[1]), limit, weight)


def _weight(text: str, where: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) or not MIN_WEIGHT <= float(text) <= MAX_WEIGHT:
        message = f"{where}: the weight is {text!r:.40}, it must be a number of {MIN_WEIGHT} to {MAX_WEIGHT:g}"
        raise BadRequest(message, _KEY_FORM)
    return float(text)


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
    strict: bool = False  # fields of requests that are not known are errors
    log_prompts: bool = False
    show_prompts: bool = False  # the page shows how cached texts begin, those of other clients too

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str) or not self.model_name.strip():
            raise BadRequest(f"model_name is {self.model_name!r}", "give the name that clients will ask for")
        if self.max_model_len is not None:
            check_number("max_model_len", self.max_model_len, 2, whole=True)
        for name, least in (("max_body_bytes", 1024), ("max_queue", 0), ("max_sessions", 1)):
            check_number(name, getattr(self, name), least, whole=True)
        for name in ("max_header_s", "max_body_s", "max_request_s", "max_session_ttl", "drain_s"):
            check_number(name, getattr(self, name), 0, open_low=True, hint="give seconds")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                hint = "give one such as models.example.org, in small letters, without port"
                raise BadRequest(f"an allowed host cannot be {host!r:.80}", hint)
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise BadRequest(f"a CORS origin cannot be {origin!r}", "give one such as https://example.org, or *")
