"""A page in a real browser, and an engine whose events a test scripts."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect

from forerun import LLM
from forerun.core import PrefillReport, Tally, Usage
from forerun.engine.sequence import Event, Request
from tests.serve.common import Running

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
# As root there is no sandbox; the others stop the browser's own network traffic
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


def launch(playwright: Playwright) -> Browser:
    named = os.environ.get("FORERUN_BROWSER")
    path = named or next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail(f"no browser: none of {', '.join(NAMES)}. `make browser` installs one, FORERUN_BROWSER names one")
    return playwright.chromium.launch(executable_path=path, args=FLAGS)


@dataclass
class Visit:
    """One open page, with its console errors and requests."""

    page: Page
    made: Running
    complaints: list[str] = field(default_factory=list)  # errors on the console
    requests: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # what the browser itself notes of answers such as 400
    refusals: int = 0  # how many a test expects

    def open(self) -> Visit:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self.made.url + "/")
        return self

    def _console(self, message: Any) -> None:
        if message.text.startswith("Failed to load resource: the server responded with a status of"):
            self.refused.append(message.text)
        elif message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def attach(self, text: str | bytes, name: str = "notes.txt") -> None:
        data = text.encode() if isinstance(text, str) else text
        self.page.set_input_files("#file", {"name": name, "mimeType": "text/plain", "buffer": data})

    def ask(self, question: str, done: bool = True) -> None:
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")
        if done:
            self.wait_done()

    def wait_done(self) -> None:
        expect(self.page.locator("#ask")).to_be_enabled(timeout=20_000)
        expect(self.page.locator("#stop")).to_be_disabled()

    def text(self, where: str) -> str:
        return self.page.locator(where).inner_text()

    @property
    def answer(self) -> str:
        """What stands of the last answer."""
        return "".join(self.page.locator(".answer").last.locator(".final").all_text_contents())


class Script:
    """The engine's events in order, and `threading.Event`s at which it waits for the test."""

    def __init__(self, *said: Event | threading.Event) -> None:
        self.said: Sequence[Event | threading.Event] = said
        self.asked: list[tuple[list[int], Any]] = []
        self.left = threading.Event()  # the stream was closed or is complete

    def play(self, llm: LLM, patch: pytest.MonkeyPatch, usage: Callable[[int], Usage]) -> Script:
        async def astream(request: Request) -> AsyncIterator[Event]:
            self.asked.append((request.prompt_ids, request.params))
            try:
                for said in self.said:
                    if isinstance(said, threading.Event):
                        await asyncio.to_thread(said.wait, 20)
                        continue
                    if said.finish_reason is not None:
                        said.usage = usage(len(request.prompt_ids))
                    yield said
            finally:
                self.left.set()

        patch.setattr(llm, "astream", astream)
        return self


def says(text: str, **more: Any) -> Event:
    return Event(1, 0, text, **more)


def drafted(tokens: int) -> Usage:
    """Figures of an answer whose prompt was drafted."""
    exact, tail, layers = 8, 6, 4
    middle = tokens - exact - tail
    redone = middle // 4
    runs = [(layers, exact), (1, 10), (layers, redone), (2, middle - redone - 10), (layers, tail)]
    report = PrefillReport(tokens, layers, "self", "tail", depth_runs=runs, cost=0.41)
    report.exact, report.drafted, report.recomputed, report.accepted = exact, middle, redone, middle - redone
    return Usage(
        prompt_tokens=tokens, completion_tokens=7, steps=3, drafted=6, accepted=4, ttft_s=0.2, total_s=0.5,
        timeline=[(0.2, 1, 0, 0.0, 0.0), (0.3, 4, 4, 0.02, 0.05), (0.5, 2, 2, 0.03, 0.06)],
        drafters={"lookup": Tally(6, 4)}, prefill=report, provisional=4, confirmed=2, provisional_s=0.1,
        decisions={"": 1, "nothing was drafted": 1, "by lower bound": 2},
    )  # fmt: skip


def plain(tokens: int) -> Usage:
    return Usage(prompt_tokens=tokens, cached_tokens=0, completion_tokens=3, steps=3, ttft_s=0.1, total_s=0.2)
