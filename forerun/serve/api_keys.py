"""API keys: only their SHA-256 digests are stored, and comparison takes constant time.

Written one to a line: a name, the digest in hex, and optionally how many answers may be open with it at once.
`printf %s "$KEY" | sha256sum` gives the digest. Keys must be long and random, as digests of guessable ones can be
guessed, too. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import BadRequest

_FORM = "write NAME SHA256 or NAME SHA256 LIMIT, one to a line"


@dataclass(frozen=True)
class ApiKey:
    name: str
    digest: bytes
    limit: int | None = None  # answers open at once; None: what the server allows


@dataclass(frozen=True)
class ApiKeys:
    keys: Sequence[ApiKey]

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
                keys.append(_parse(words, f"{origin}, line {number}"))
        names = [key.name for key in keys]
        if not keys:
            raise BadRequest(f"{origin} has no API keys", _FORM)
        if len(set(names)) < len(names) or len({key.digest for key in keys}) < len(keys):
            raise BadRequest(f"{origin} has a name or a key twice", "give each holder a name and a key of their own")
        return cls(tuple(keys))

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        try:
            return cls.parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"cannot read the API keys in {path}: {error}", _FORM) from None


def _parse(words: list[str], where: str) -> ApiKey:
    # What is not a digest may be a key itself, pasted by mistake: the message must not repeat it
    if len(words) not in (2, 3) or not re.fullmatch(r"[0-9a-fA-F]{64}", words[1]):
        raise BadRequest(f"{where}: this is not a name and a SHA-256 digest of 64 hex digits", _FORM)
    if len(words) == 3 and (not words[2].isdecimal() or int(words[2]) < 1):
        raise BadRequest(f"{where}: the limit is {words[2]!r}, it must be a whole number of at least 1", _FORM)
    return ApiKey(words[0], bytes.fromhex(words[1]), int(words[2]) if len(words) == 3 else None)
