"""The page when things are not as usual: the server goes and comes back, other programs have the cores, files are
large; and a request that leaves the page."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from forerun import LLM
from forerun.serve import ServeConfig, create_app
from forerun.serve.listening import listen
from forerun.serve.server import Server
from tests.page.common import Script, Visit, drafted, says
from tests.page.conftest import visiting
from tests.serve.common import running

pytestmark = pytest.mark.alone


@pytest.fixture
def own(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True, kv_cache_tokens=16384) as made:
        yield made


def test_a_server_that_has_gone_is_told_and_so_is_its_return(browser: Browser, own: LLM):
    with running(own) as made:
        port = made.port
        visits = visiting(browser, made)
        visit = next(visits)
        expect(visit.page.locator("#about")).to_contain_text("tiny")
    visit.ask("Anything there?")
    gone = visit.page.locator("#gone")
    expect(gone).to_contain_text(f"The server has gone: 127.0.0.1:{port} has not responded since")
    assert visit.page.locator("#question").input_value() == "Anything there?"
    settings = ServeConfig("tiny")
    server, sock = Server(create_app(own, settings), settings), listen("127.0.0.1", port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        expect(gone).to_be_hidden()
        visit.ask("Anything there?")
        assert visit.answer and visit.text("#problem") == ""
        visit.complaints = [text for text in visit.complaints if "ERR_CONNECTION" not in text]
        with contextlib.suppress(StopIteration):
            next(visits)
    finally:
        server.should_exit = True
        thread.join(20)


def test_it_answers_while_other_programs_have_the_cores(visit: Visit):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        visit.page.fill("#max-tokens", "12")
        visit.page.fill("#question", "Who counts?")
        visit.page.press("#question", "Enter")
        expect(visit.page.locator("#ask")).to_be_enabled(timeout=120_000)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert visit.answer and visit.text("#problem") == "" and not visit.page.locator("#gone").is_visible()


def test_a_request_as_a_command_and_as_a_program(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    visit.page.fill("#max-tokens", "9")
    visit.attach("It's the keeper's log: \"lamp\" $HOME `x` \\ <b> né €\n" * 3)
    visit.ask("Who's counting?")
    visit.page.click(".reproduce summary")
    command, program = (visit.page.locator(f".reproduce .{name}").inner_text() for name in ("curl", "python"))
    lines = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60).stdout.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]) == visit.answer
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "program", "exec"), {})
    assert printed.getvalue() == visit.answer


def test_a_long_request_is_a_command_too(visit: Visit):
    """Linux takes no argument of 128 KiB or more."""
    command = visit.page.evaluate(
        """async () => {
            const { reproduceNode } = await import("/page/reproduce.js");
            const messages = [{ role: "user", content: "Who's `there` $HOME?\\n".repeat(10_000) }];
            const node = reproduceNode({ model: "tiny", messages, forerun: {} });
            document.body.append(node);
            const opened = new Promise((done) => node.addEventListener("toggle", done));
            node.open = true;
            await opened;
            return node.querySelector(".curl").textContent;
        }"""
    )
    found = subprocess.run(["sh"], input=command, capture_output=True, text=True, timeout=60)
    assert json.loads(found.stdout)["error"]["code"] == "context_length_exceeded", found.stderr


def test_a_file_that_can_never_fit_is_refused_at_once(visit: Visit):
    expect(visit.page.locator("#about")).to_contain_text("tiny")
    visit.attach("lamp and ship\n" * 360_000, "huge.txt")  # 5 MB
    expect(visit.page.locator("#problem")).to_contain_text("huge.txt has 5,040,000 characters, the context holds")
    expect(visit.page.locator("#document")).to_have_text("or drop one anywhere")
    assert not any(url.endswith(("/tokenize", "/forerun/tokens")) for url in visit.requests)


def test_a_large_file_is_counted_with_progress(visit: Visit):
    page, shown = visit.page, list[str]()

    def larger(route: Route) -> None:
        """As a model with a long context would have it."""
        about = route.fetch().json() | {"max_chars": 10_000_000, "context": 10_000_000}
        route.fulfill(json=about)

    page.route("**/forerun/about", larger)
    page.reload()
    expect(page.locator("#about")).to_contain_text("10,000,000 tokens")
    page.expose_function("shown", lambda text: shown.append(text))
    page.evaluate(
        """() => new MutationObserver(() => shown(document.querySelector("#document").textContent))
            .observe(document.querySelector("#document"), {childList: true, characterData: true, subtree: true})"""
    )
    visit.attach("lamp and ship\n" * 40_000, "large.txt")
    expect(page.locator("#problem")).to_contain_text("large.txt has", timeout=30_000)  # more than this model's
    assert len({text for text in shown if re.search(r"counting tokens… \d+%", text)}) > 2, shown


def test_decisions_are_told(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    Script(says("Nine.", token_ids=[1], finish_reason="stop")).play(visit.made.llm, monkeypatch, drafted)
    visit.ask("Who counts?")
    told = visit.text("#decisions")
    assert "The prompt was drafted by self, at 0.41 of exact's cost." in told
    assert "Drafted by lookup (4 of 6 accepted): 7 tokens in 3 passes." in told and "2 of 4 provisional tokens" in told
    why = "these drafts pay, by what is accepted at the least and what passes cost (2); nothing was drafted (1)."
    assert f"Why, pass by pass: {why}" in told and told.count("Why") == 1
    visit.page.click("#new")
    assert visit.text("#decisions") == "After an answer."
