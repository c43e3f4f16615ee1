"""Prefixes that requests ask to keep: `cache_control` of Anthropic's clients, `prompt_cache_key` of OpenAI's.

After an answer the marked part of its prompt stays in the pool for a time to live, as a session's K/V does. Bounded: in
number for each API key, in pages for all of them together, and what is least recently used goes first. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import os.path
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.cache.pins import Pins
from forerun.cache.prefix import pack
from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.serve.config import ApiKey
from forerun.serve.schema import ChatRequest, CompletionRequest, Message
from forerun.serve.tool_schema import Tool
from forerun.serve.tools import ToolDialect, chat_prompt
from forerun.sharing.session_registry import DEFAULT_TTL_S

MAX_PINS = 64  # of one API key
MAX_PINNED_SHARE = 0.5  # of the pool's pages, for all pins of prompts together
SHORT_TTL_S, LONG_TTL_S = 300.0, 3600.0  # Anthropic's 5m and 1h


@dataclass(frozen=True)
class CacheMark:
    """The prefix up to a place in a request: message number `message`, and of its text so many characters."""

    message: int
    chars: int | None  # None: all of it
    ttl: float


@dataclass(frozen=True)
class PinnedPrefix:
    tokens: int
    ttl: float
    name: str = ""  # what it replaces; "": nothing but itself


def cache_marks(messages: Sequence[Message], tools: Sequence[Tool]) -> list[CacheMark]:
    """For each time to live the last mark: it contains those before it."""
    found: dict[float, CacheMark] = {}

    def add(control: Any, message: int, chars: int | None) -> None:
        if control:
            ttl = LONG_TTL_S if isinstance(control, dict) and control.get("ttl") == "1h" else SHORT_TTL_S
            found[ttl] = CacheMark(message, chars, ttl)

    for tool in tools:  # templates put them after the system's text
        add((tool.model_extra or {}).get("cache_control"), 0, None if messages[0].template_role == "system" else 0)
    for number, message in enumerate(messages):
        chars = 0
        for part in message.content if isinstance(message.content, list) else ():
            chars += len(part.text)
            add(part.cache_control, number, chars)
        add(message.cache_control, number, None)
    return list(found.values())


def marked_prefixes(body: ChatRequest, dialect: ToolDialect, ids: list[int]) -> list[PinnedPrefix]:
    """What a chat request asks to keep of its prompt; a mark's prefix is where its tokens are those of the prompt."""
    use, found = body.tool_use(dialect), list[PinnedPrefix]()
    tools = use.tools if use else ()
    for mark in cache_marks(body.messages, tools):
        head = list(body.messages[: mark.message + 1])
        if mark.chars is not None:
            head[-1] = head[-1].model_copy(update={"content": head[-1].text[: mark.chars]})
        try:
            prompt = chat_prompt(dialect, head, tools)
            begun = dialect.tokenizer.apply_chat_template(prompt.messages, prompt.tools, False)
        except ForerunError:  # a template that refuses a conversation which ends there
            continue
        found.append(PinnedPrefix(len(os.path.commonprefix([begun, ids])), mark.ttl))
    return found


class PromptPins:
    """`max_ttl`: in seconds, whatever requests ask for."""

    def __init__(self, llm: LLM, max_ttl: float) -> None:
        self.llm, self.max_ttl, self._dialect = llm, max_ttl, ToolDialect.of(llm.tokenizer)
        self._owners: dict[str, str] = {}  # the API key's name by the pin's, least recently used first

    def wanted(self, body: ChatRequest | CompletionRequest, ids: list[int], number: int) -> list[PinnedPrefix]:
        """What a request asks to keep of its prompt number `number`."""
        if not body.forerun.cache or not self.llm.engine.config.enable_prefix_caching:
            return []
        found = marked_prefixes(body, self._dialect, ids) if isinstance(body, ChatRequest) else []
        if body.prompt_cache_key is not None:
            ttl = self.max_ttl if body.prompt_cache_retention == "24h" else min(DEFAULT_TTL_S, self.max_ttl)
            found.append(PinnedPrefix(len(ids), ttl, f"{number} {body.prompt_cache_key}"))
        return found

    def hold(self, key: ApiKey | None, ids: list[int], prefixes: Sequence[PinnedPrefix]) -> None:
        """Pin the beginnings of a prompt that was computed. May wait for a step of the engine."""
        owner = key.name if key else ""
        with self.llm.driver.exclusive() as engine:
            pins = engine.scheduler.pins
            pins.expire()
            for prefix in prefixes:
                tokens = ids[: prefix.tokens]
                # No session has such a name: those begin with a key's name or a space
                name = f"\t{owner} {prefix.name or hashlib.sha256(pack(tokens)).hexdigest()}"
                pins.open(name, min(prefix.ttl, self.max_ttl), (owner, key.weight if key else 1.0))
                pins.hold(name, engine.tree.match(tokens))
                self._owners.pop(name, None)
                self._owners[name] = owner
            self._bound(pins, int(engine.pool.num_pages * MAX_PINNED_SHARE))

    def _bound(self, pins: Pins, max_pages: int) -> None:
        sizes = {name: len(pins.pages(name)) for name in self._owners}
        for name in [name for name, size in sizes.items() if not size]:  # expired, or given up for others
            self._close(pins, name)
        while self._owners:
            counts = Counter(self._owners.values())
            largest, number = counts.most_common(1)[0]
            pages = {page for name in self._owners for page in pins.pages(name)}
            if number <= MAX_PINS and len(pages) <= max_pages:
                return
            if number <= MAX_PINS:  # then of the key with the most pages
                held = Counter[str]()
                for name, owner in self._owners.items():
                    held[owner] += sizes[name]
                largest = held.most_common(1)[0][0]
            self._close(pins, next(name for name, owner in self._owners.items() if owner == largest))

    def _close(self, pins: Pins, name: str) -> None:
        pins.close(name)
        del self._owners[name]
