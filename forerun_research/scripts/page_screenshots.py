"""Pictures of the page for the documents: a provisional answer while it is provisional, and the race.

    python -m forerun_research.scripts.page_screenshots

A real server, a real browser (any Chromium; `make browser` installs one), and the model as it is: nothing is staged but
the moment. Needs a profile, as provisional answers do: the default model has one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from forerun import LLM, data
from forerun.llm import DEFAULT_MODEL
from forerun.params import PREFILL_MODES
from forerun.serve import ServeConfig, create_app
from forerun.serve.listening import listen
from forerun.serve.server import Server

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ANSWER_TIMEOUT_MS = 300_000  # milliseconds for an answer
FIRST = ("handbook.txt", "From the handbook above: how is the weather log kept, and where?")
SECOND = ("depot.py", "What does the code above do, in a few sentences?")
RACE = ("handbook.txt", "From the handbook above: what is the oldest bird ever caught?")


@contextmanager
def server(model: str, profile: str | None, threads: int | None) -> Iterator[str]:
    with LLM(model, prefill_profile=profile, threads=threads) as llm:
        config = ServeConfig(Path(model).stem)
        running, sock = Server(create_app(llm, config), config), listen("127.0.0.1", 0)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
        finally:
            running.should_exit = True
            thread.join()


def ask(page: Page, document: str, question: str, button: str = "#ask") -> None:
    text = data.text(f"documents/{document}")
    page.set_input_files("#file", {"name": document, "mimeType": "text/plain", "buffer": text.encode()})
    expect(page.locator("#document")).to_contain_text("tokens", timeout=ANSWER_TIMEOUT_MS)
    page.fill("#question", question)
    page.click(button)


def done(page: Page) -> None:
    expect(page.locator("#ask")).to_be_enabled(timeout=ANSWER_TIMEOUT_MS)


def picture(page: Page, out: Path) -> None:
    """With 256 colours, of which the page has fewer, a picture takes a third of the bytes."""
    page.screenshot(path=out)
    Image.open(out).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)


def provisional(page: Page, out: Path) -> None:
    """One answer that took words back, and below it the next one while its words are grey."""
    page.check("input[value=provisional]")
    page.fill("#max-tokens", "48")
    ask(page, *FIRST)
    done(page)
    page.click("#settings summary")
    ask(page, *SECOND)
    grey = page.locator(".answer").last.locator(".provisional")
    end = time.monotonic() + ANSWER_TIMEOUT_MS / 1000
    while len(grey.inner_text().split()) < 8 and time.monotonic() < end and page.locator("#ask").is_disabled():
        page.wait_for_timeout(50)
    picture(page, out)
    print(out, "struck:", page.locator(".answer .retracted").first.inner_text()[:60], "| grey:", grey.inner_text()[:60])
    page.keyboard.press("Escape")
    done(page)


def race(page: Page, out: Path, prefill: str) -> None:
    page.click("#new")
    page.click("#remove")
    page.click("#settings summary")
    page.check(f"input[value={prefill}]")
    page.click("#settings summary")
    ask(page, *RACE, button="#race")
    done(page)
    expect(page.locator(".summary table")).to_be_visible(timeout=ANSWER_TIMEOUT_MS)
    page.wait_for_timeout(1000)  # the panels ask the server once more
    picture(page, out)
    print(out, page.locator(".summary").inner_text().replace("\n", " | "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--profile")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--race", default="speculative", choices=PREFILL_MODES, help="prefill of the second side")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    asked = parser.parse_args()
    browser = os.environ.get("FORERUN_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    asked.out.mkdir(parents=True, exist_ok=True)
    with server(asked.model, asked.profile, asked.threads) as url, sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=FLAGS)
        page = opened.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=1.5)
        page.goto(url)
        provisional(page, asked.out / "page-provisional.png")
        race(page, asked.out / "page-race.png", asked.race)
        opened.close()


if __name__ == "__main__":
    main()
