from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from forerun import LLM
from tests.page.common import Visit, launch
from tests.serve.common import Running, running


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    # Its event loop runs as long as this fixture: no longer than the tests of this folder, none of which is async
    with sync_playwright() as playwright:
        made = launch(playwright)
        yield made
        made.close()


@pytest.fixture(scope="package")
def served(tiny_folder: Callable[[str], Path]) -> Iterator[Running]:
    folder = str(tiny_folder("qwen3"))
    with LLM(folder, dtype="float32", threads=1, quiet=True, kv_cache_tokens=16384) as llm, running(llm) as made:
        yield made


@pytest.fixture
def visit(browser: Browser, served: Running) -> Iterator[Visit]:
    yield from visiting(browser, served)


def visiting(browser: Browser, made: Running, **context: object) -> Iterator[Visit]:
    """Whatever a test does: the console stays quiet, and nothing but this server is asked for anything."""
    opened = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | context))  # type: ignore[arg-type]
    opened.set_default_timeout(10_000)
    expect.set_options(timeout=20_000)  # 5 s is little for a new browser's first page
    visit = Visit(opened.new_page(), made)
    yield visit.open()
    opened.close()
    assert visit.complaints == [] and len(visit.refused) == visit.refusals, visit.refused
    hosts = {urlsplit(url).netloc for url in visit.requests}
    assert hosts == {urlsplit(made.url).netloc}
