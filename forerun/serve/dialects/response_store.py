"""Responses that later requests continue by id: in memory, separate for each API key, the oldest dropped first.

K/V is not in here: the prefix cache has it, and finds it by the tokens. Only the event loop's thread uses it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from forerun.serve.config import ApiKey
from forerun.serve.errors import ApiError

MAX_RESPONSES = 256  # of one key
MAX_CHARS = 16_000_000  # of one key, as JSON


@dataclass(frozen=True)
class StoredResponse:
    response: dict[str, Any]
    messages: list[dict[str, Any]]  # the conversation up to its answer, which is among them
    chars: int


class ResponseStore:
    def __init__(self) -> None:
        self._by_key: dict[str, OrderedDict[str, StoredResponse]] = {}

    def add(self, key: ApiKey | None, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        mine = self._of(key)
        mine[response["id"]] = StoredResponse(response, messages, len(json.dumps([response, messages])))
        while len(mine) > MAX_RESPONSES or (len(mine) > 1 and sum(r.chars for r in mine.values()) > MAX_CHARS):
            mine.popitem(last=False)

    def get(self, key: ApiKey | None, response_id: str) -> StoredResponse:
        found = self._of(key).get(response_id)
        if found is None:
            hint = f"the last {MAX_RESPONSES} of a key are kept until the server stops, and none with store=false"
            raise ApiError(404, f"there is no response {response_id!r:.80}", hint, code="response_not_found")
        self._of(key).move_to_end(response_id)
        return found

    def delete(self, key: ApiKey | None, response_id: str) -> None:
        self.get(key, response_id)
        del self._of(key)[response_id]

    def _of(self, key: ApiKey | None) -> OrderedDict[str, StoredResponse]:
        return self._by_key.setdefault(key.name if key else "", OrderedDict())
