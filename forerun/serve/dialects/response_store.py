"""Responses that later requests continue by id: separate for each API key, the oldest dropped first.

In memory, and where there is a disk tier in files, too (`response_files`), which a thread of its own writes. K/V is not
in here: the prefix cache has it, and finds it by the tokens. Only the event loop's thread uses it.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.serve.config import ApiKey
from forerun.serve.dialects.response_files import ResponseFiles
from forerun.serve.errors import ApiError

MAX_RESPONSES = 256  # of one key
MAX_CHARS = 16_000_000  # of one key, as JSON


@dataclass(frozen=True)
class StoredResponse:
    response: dict[str, Any]
    messages: list[dict[str, Any]]  # the conversation up to its answer, which is among them


class ResponseStore:
    """`folder`: where they outlive the process; None: nowhere."""

    def __init__(self, folder: Path | None = None) -> None:
        self._by_key: dict[str, OrderedDict[str, tuple[int, StoredResponse]]] = {}  # with its characters
        self._files = None if folder is None else ResponseFiles(folder, MAX_RESPONSES, MAX_CHARS)
        self._thread = ThreadPoolExecutor(1, "forerun-responses")  # files are written in the order of the responses

    def add(self, key: ApiKey | None, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        mine, made = self._of(key), StoredResponse(response, messages)
        mine[response["id"]] = len(json.dumps([response, messages])), made
        while len(mine) > MAX_RESPONSES or (len(mine) > 1 and sum(chars for chars, _ in mine.values()) > MAX_CHARS):
            mine.popitem(last=False)
        if self._files is not None:
            self._thread.submit(self._files.write, _owner(key), response["id"], dict(vars(made)))

    async def get(self, key: ApiKey | None, response_id: str) -> StoredResponse:
        mine = self._of(key)
        if response_id in mine:
            mine.move_to_end(response_id)
            return mine[response_id][1]
        if self._files is not None:
            read, loop = self._files.read, asyncio.get_running_loop()
            found = await loop.run_in_executor(self._thread, read, _owner(key), response_id)
            if found is not None:
                return StoredResponse(**found)
        kept = "the server stops" if self._files is None else "newer ones take their place"
        hint = f"the last {MAX_RESPONSES} of a key are kept until {kept}, and none with store=false"
        raise ApiError(404, f"there is no response {response_id!r:.80}", hint, code="response_not_found")

    async def delete(self, key: ApiKey | None, response_id: str) -> None:
        await self.get(key, response_id)
        self._of(key).pop(response_id, None)
        if self._files is not None:
            remove, loop = self._files.remove, asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, remove, _owner(key), response_id)

    def _of(self, key: ApiKey | None) -> OrderedDict[str, tuple[int, StoredResponse]]:
        return self._by_key.setdefault(_owner(key), OrderedDict())


def _owner(key: ApiKey | None) -> str:
    return key.name if key else ""
