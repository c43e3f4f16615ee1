"""Provisional words, the timeline, the depth of the prompt and the prefix tree, as the page shows them."""

from __future__ import annotations

import threading

import pytest
from playwright.sync_api import expect

from tests.page.common import Script, Visit, drafted, plain, says

pytestmark = pytest.mark.alone

GREY, BLACK, STRUCK = ".answer .provisional", ".answer .final", ".answer .retracted"


@pytest.fixture
def can_draft(monkeypatch: pytest.MonkeyPatch, served) -> None:
    """This server offers drafted prompts; the script decides what comes of them."""
    monkeypatch.setattr(served.llm.engine.speculative_prefill, "problem", lambda settings, tokens: None)


def test_provisional_words_turn_black_or_are_struck(can_draft: None, visit: Visit, monkeypatch: pytest.MonkeyPatch):
    llm, judged, settled = visit.made.llm, threading.Event(), threading.Event()
    words = [llm.tokenizer.encode(word) for word in ("The old", " lamp")]
    Script(
        says("The old", token_ids=words[0], provisional=True),
        says(" lamp", token_ids=words[1], provisional=True),
        judged,
        says("The old", token_ids=words[0], confirmed=len(words[0]), retracted=len(words[1])),
        settled,
        says(" keeper.", token_ids=[5], finish_reason="stop"),
    ).play(llm, monkeypatch, drafted)
    visit.page.check("input[value=provisional]")
    visit.ask("Who?", done=False)
    page = visit.page
    expect(page.locator(GREY)).to_have_text("The old lamp")
    assert page.locator(BLACK).first.inner_text() == "" and page.locator(STRUCK).is_hidden()
    grey = page.locator(GREY).evaluate("node => getComputedStyle(node).color")
    judged.set()
    expect(page.locator(BLACK).first).to_have_text("The old")
    expect(page.locator(STRUCK)).to_have_text("lamp")
    assert page.locator(GREY).inner_text() == ""
    line = page.locator(STRUCK).evaluate("node => getComputedStyle(node).textDecorationLine")
    settled.set()
    visit.wait_done()
    black = page.locator(BLACK).first.evaluate("async node => { await Promise.all(node.getAnimations().map("
                                               "a => a.finished)); return getComputedStyle(node).color; }")  # fmt: skip
    assert line == "line-through" and grey != black
    assert "".join(page.locator(BLACK).all_inner_texts()) == "The old keeper."
    assert "Provisional confirmed" in visit.text("#figures")


def test_words_turn_black_piece_by_piece(can_draft: None, visit: Visit, monkeypatch: pytest.MonkeyPatch):
    llm, first, second, last = visit.made.llm, threading.Event(), threading.Event(), threading.Event()
    words = [llm.tokenizer.encode(word) for word in ("The", " old", " lamp")]
    Script(
        says("The old lamp", token_ids=[token for word in words for token in word], provisional=True),
        first,
        says("The", token_ids=words[0], confirmed=len(words[0])),
        second,
        says(" old", token_ids=words[1], confirmed=len(words[1])),
        last,
        says(" keeper.", token_ids=[5], retracted=len(words[2]), finish_reason="stop"),
    ).play(llm, monkeypatch, drafted)
    visit.page.check("input[value=provisional]")
    visit.ask("Who?", done=False)
    page = visit.page
    expect(page.locator(GREY)).to_have_text("The old lamp")
    for event, black, grey in ((first, "The", "old lamp"), (second, "The old", "lamp")):
        event.set()
        expect(page.locator(BLACK).first).to_have_text(black)
        expect(page.locator(GREY)).to_have_text(grey)
        assert page.locator(STRUCK).is_hidden()
    last.set()
    visit.wait_done()
    assert page.locator(GREY).inner_text() == "" and page.locator(STRUCK).inner_text().strip() == "lamp"
    assert "".join(page.locator(BLACK).all_inner_texts()) == "The old keeper."


def test_words_that_are_never_judged_are_struck_when_stopped(
    can_draft: None, visit: Visit, monkeypatch: pytest.MonkeyPatch
):
    never = threading.Event()
    said = Script(says("Maybe", token_ids=[3], provisional=True), never, says("", finish_reason="stop"))
    said.play(visit.made.llm, monkeypatch, drafted)
    visit.page.check("input[value=provisional]")
    visit.ask("Who?", done=False)
    expect(visit.page.locator(GREY)).to_have_text("Maybe")
    visit.page.keyboard.press("Escape")
    visit.wait_done()
    never.set()
    assert visit.page.locator(STRUCK).inner_text() == "Maybe" and visit.text("#status") == "Stopped."


def test_the_depth_strip_tells_what_statistics_tell(can_draft: None, visit: Visit, monkeypatch: pytest.MonkeyPatch):
    llm = visit.made.llm
    said = Script(says("Yes.", token_ids=[1], finish_reason="stop")).play(llm, monkeypatch, drafted)
    visit.page.check("input[value=speculative]")
    document = "Fog came in from the west, and the bell rang. " * 8
    visit.attach(document)
    visit.ask("Did the bell ring?")
    page, ids = visit.page, said.asked[0][0]
    report = drafted(len(ids)).prefill
    assert report is not None
    expect(page.locator(".prompt-text .depth")).to_have_count(len(report.depth_runs))
    entries = page.locator("#depth .entry").evaluate_all("all => all.map(e => [e.dataset.kind, +e.dataset.tokens])")
    tail = len(ids) - report.exact - report.drafted
    told = {"exact": report.exact, "recomputed": report.recomputed, "accepted": report.accepted, "tail": tail}
    assert dict(entries) == told
    shown = page.locator(".prompt-text").evaluate("node => node.textContent")
    assert shown == llm.tokenizer.decode(ids, skip_special=False) and document in shown
    widths = page.locator("#depth rect.depth").evaluate_all("all => all.map(r => +r.getAttribute('width'))")
    assert widths == [tokens for _, tokens in report.depth_runs]
    page.focus("#depth .strip")  # by keyboard: the second run
    page.keyboard.press("ArrowRight")
    assert visit.text("#depth .readout") == "tokens 9–18 · drafted, accepted · 1 layer of 4 computed by the model"
    page.hover(".prompt-text .recomputed")
    assert visit.text("#depth .readout").startswith("tokens 19–") and "recomputed" in visit.text("#depth .readout")


def test_the_timeline_tells_of_every_pass(can_draft: None, visit: Visit, monkeypatch: pytest.MonkeyPatch):
    said = says("Yes, it did.", token_ids=[1], finish_reason="stop")
    Script(said).play(visit.made.llm, monkeypatch, drafted)
    visit.page.check("input[value=provisional]")
    visit.ask("Did it?")
    page = visit.page
    assert "3 passes of the model for 7 tokens" in visit.text("#timeline")
    assert "4 of 6 drafted tokens accepted" in visit.text("#timeline")
    assert page.locator("#timeline rect.own").count() == 3 and page.locator("#timeline rect.passed").count() == 2
    assert page.locator("#timeline rect.failed").count() == 2
    page.focus("#timeline .steps")
    page.keyboard.press("ArrowRight")
    readout = visit.text("#timeline .readout")
    assert (
        readout == "pass 2 at 300 ms · 4 tokens · 3 of 4 drafted tokens accepted · drafting 20 ms, verification 50 ms"
    )
    assert "provisional text 100 ms" in visit.text("#timeline .lane .legend")


def test_a_real_answer_has_a_timeline(visit: Visit):
    visit.page.fill("#max-tokens", "30")
    visit.ask("one two three one two three one two three")
    expect(visit.page.locator("#timeline .readout")).to_contain_text("for 30 tokens")
    passes = int(visit.text("#timeline .readout").split()[0])
    assert visit.page.locator("#timeline rect.own").count() == passes


def test_the_tree_shows_what_is_shared_and_how_often(visit: Visit):
    llm, page = visit.made.llm, visit.page
    llm.clear_cache()
    page.fill("#max-tokens", "3")
    page.locator("#speculation").select_option("off")
    document = "Seven ropes lie on the pier, and each has a name. " * 20
    for question in ("Which?", "Whose?"):
        page.click("#new")
        visit.attach(document)
        expect(page.locator("#document")).to_contain_text("tokens")
        visit.ask(question)
    stem = page.locator("#tree .tree > li")
    expect(stem).to_have_count(1)
    expect(stem.locator("> .run")).to_contain_text("read once")
    shared = llm.prefixes().runs[0]
    words = stem.locator("> .run").inner_text()
    assert f"{shared.tokens:,} tokens · read once · 2 continuations" in words and "Seven ropes" in words
    below = stem.locator("> ul > li")
    assert below.count() == 2
    assert [item.locator("q").count() for item in below.all()].count(1) == 1  # of the other text only numbers are told


def test_modes_that_a_server_has_not_are_off_and_it_says_why(visit: Visit):
    expect(visit.page.locator("#prefill-why")).to_contain_text("needs a profile of this model")
    about = visit.made.get("/forerun/about").json()
    modes = visit.page.locator("#prefill input").evaluate_all("all => all.map(box => box.value)")
    drafters = visit.page.locator("#speculation option").all_inner_texts()
    assert modes == list(about["prefill"]) and drafters == about["speculation"]
    assert visit.page.locator("input[value=provisional]").is_disabled()
    assert visit.page.locator("input[value=exact]").is_enabled() and visit.page.locator("#budget").is_disabled()


def test_an_exact_prompt_is_told_as_such(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    Script(says("Yes.", token_ids=[1], finish_reason="stop")).play(visit.made.llm, monkeypatch, plain)
    visit.ask("Is it?")
    expect(visit.page.locator("#depth .legend")).to_contain_text("computed exactly")
    assert "nothing approximate" in visit.text("#depth .readout")
