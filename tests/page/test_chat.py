"""Chat with a document: drop it, ask, watch the answer come, stop it; errors in words."""

from __future__ import annotations

import hashlib
import re
import threading
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from forerun import LLM, SamplingParams
from forerun.serve.config import ApiKeys
from tests.page.common import Script, Visit, plain, says
from tests.page.conftest import visiting
from tests.serve.common import NAME, Running, running

pytestmark = pytest.mark.alone

END = says("", finish_reason="stop")
DOCUMENT = "The keeper counts the ships every evening. " * 12

DROP = """([text, name]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name, {type: "text/plain"}));
    for (const kind of ["dragenter", "dragover", "drop"])
        document.body.dispatchEvent(new DragEvent(kind, {bubbles: true, cancelable: true, dataTransfer: data}));
}"""


def test_a_document_is_dropped_asked_about_and_remembered(visit: Visit):
    page, llm = visit.page, visit.made.llm
    expect(page.locator("#about")).to_contain_text(f"{NAME} · float32 weights")
    page.evaluate(DROP, [DOCUMENT, "log.txt"])
    expect(page.locator("#document")).to_contain_text("log.txt · ")
    page.fill("#max-tokens", "9")
    first = [{"role": "user", "content": f"{DOCUMENT}\n\nWho counts?"}]
    counted = f"{len(llm.encode([{'role': 'user', 'content': DOCUMENT}])):,} of"
    expect(page.locator("#document")).to_contain_text(counted)  # after "counting tokens"
    visit.ask("Who counts?")
    said = llm.chat(first, SamplingParams(max_tokens=9))[0].text
    assert visit.answer == said and visit.text("#document") == "or drop one anywhere"
    assert "log.txt" in visit.text(".with") and visit.text(".asked") == "Who counts?"
    visit.ask("And when?")  # goes on from there, and reads the document from the cache
    more = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "And when?"}]
    assert visit.answer == llm.chat(more, SamplingParams(max_tokens=9))[0].text
    figures = visit.text("#figures")
    read = re.search(r"(\d+) of (\d+)", figures)
    assert read is not None and int(read[1]) > 64 and int(read[2]) == len(llm.encode(more))
    expect(page.locator("#status")).to_contain_text("Answer complete: 9 tokens")


def test_words_appear_as_they_come_and_stop_frees_the_request(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    resume, never = threading.Event(), threading.Event()
    said = Script(
        says("One ", token_ids=[1]), resume, says("two", token_ids=[2]), never, says("", finish_reason="stop")
    )
    said.play(visit.made.llm, monkeypatch, plain)
    visit.ask("Count.", done=False)
    expect(visit.page.locator(".answer")).to_have_text("One")
    assert visit.page.locator("#ask").is_disabled() and visit.page.locator("#stop").is_enabled()
    resume.set()
    expect(visit.page.locator(".answer")).to_have_text("One two")
    visit.page.click("#stop")
    visit.wait_done()
    never.set()
    assert said.left.wait(60)
    assert visit.text("#status") == "Stopped." and visit.answer == "One two"


def test_a_new_conversation_knows_nothing_of_an_answer_it_cut_off(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    never, page = threading.Event(), visit.page
    said = Script(says("One ", token_ids=[1]), never, says("", finish_reason="stop"))
    said.play(visit.made.llm, monkeypatch, plain)
    visit.ask("Count", done=False)
    expect(page.locator(".answer")).to_contain_text("One")
    page.click("#new")
    visit.wait_done()
    never.set()
    assert page.locator(".turn").count() == 0 and "–" in page.locator("#figures dd").first.inner_text()
    visit.ask("Hello")
    assert said.asked[1][0] == visit.made.llm.encode([{"role": "user", "content": "Hello"}])


def test_errors_are_told_in_words_and_the_question_stays(visit: Visit):
    visit.page.fill("#temperature", "-3")
    visit.ask("Why?")
    assert "temperature" in visit.text("#problem").lower() and "-3" in visit.text("#problem")
    assert visit.page.input_value("#question") == "Why?" and visit.page.locator(".turn").count() == 0
    visit.page.fill("#temperature", "0")
    visit.page.fill("#max-tokens", "2")
    visit.ask("Why?")
    assert visit.text("#problem") == "" and visit.page.locator(".turn").count() == 1
    visit.refusals = 1


def test_an_answer_that_breaks_off_is_an_error_too(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    Script(says("Half an ", token_ids=[1]), says("", finish_reason="cancelled")).play(
        visit.made.llm, monkeypatch, plain
    )
    visit.ask("Tell me all.")
    assert "shut down before the answer was complete" in visit.text("#problem") and visit.answer == "Half an "


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe\x00broken", "not a text file"), (b"  \n", "is empty"), (b"a\x00b", "not a text file")],
)
def test_files_that_are_no_documents(visit: Visit, content: bytes, words: str):
    visit.attach(content, "thing.bin")
    expect(visit.page.locator("#problem")).to_contain_text(words)
    assert visit.text("#document") == "or drop one anywhere"


def test_a_document_that_does_not_fit_is_an_error_before_the_question(visit: Visit):
    visit.attach("tide " * 4500, "long.txt")
    expect(visit.page.locator("#problem")).to_contain_text("the context holds")
    visit.page.click("#remove")
    assert visit.text("#document") == "or drop one anywhere"


def test_a_question_is_needed(visit: Visit):
    visit.page.click("#ask")
    assert visit.text("#problem") == "There is no question yet."


def test_a_server_with_keys_is_asked_with_one(browser: Browser, served: Running):
    keys = ApiKeys.parse(f"ann {hashlib.sha256(b'right').hexdigest()}", "test")
    with running(served.llm, keys=keys) as made:
        for visit in visiting(browser, made):
            page = visit.page
            expect(page.locator("#key-form")).to_be_visible()
            page.fill("#key", "wrong")
            page.press("#key", "Enter")
            expect(page.locator("#problem")).to_contain_text("key is missing or wrong")
            page.fill("#key", "right")
            page.press("#key", "Enter")
            expect(page.locator("#about")).to_contain_text(NAME)
            assert page.locator("#key-form").is_hidden() and visit.text("#problem") == ""
            page.fill("#max-tokens", "2")
            visit.ask("Hello?")
            assert "Answer complete" in visit.text("#status")
            visit.refusals = 2


def test_the_default_model_answers_on_the_page(browser: Browser, smollm2: Path):
    with LLM(smollm2, threads=1, quiet=True, kv_cache_tokens=4096) as llm, running(llm) as made:
        for visit in visiting(browser, made):
            visit.page.fill("#max-tokens", "12")
            visit.attach("The harbour master is called Odalys Brandt.", "harbour.txt")
            visit.ask("What is the harbour master called?")
            asked = "The harbour master is called Odalys Brandt.\n\nWhat is the harbour master called?"
            exact = llm.chat([{"role": "user", "content": asked}], SamplingParams(max_tokens=12))[0].text
            assert visit.answer == exact and "Brandt" in exact, visit.text("body")


def test_a_question_before_the_server_has_said_what_it_is_waits(visit: Visit):
    held: list[Route] = []
    visit.page.route("**/forerun/about", lambda route: held.append(route))
    visit.page.reload(wait_until="commit")
    visit.page.wait_for_function("() => document.readyState === 'complete'")
    visit.page.fill("#max-tokens", "6")
    visit.ask("Who comes?", done=False)
    expect(visit.page.locator("#stop")).to_be_enabled()
    assert held and not any("completions" in url for url in visit.requests)
    held[0].continue_()
    visit.wait_done()
    assert visit.answer and not visit.refused
