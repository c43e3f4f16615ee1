"""The race: the same request plain and with Forerun's settings, one after the other, and neither on a warm cache."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.page.common import Script, Visit, plain, says

pytestmark = pytest.mark.alone

TEXT = "Nine lanterns hang over the quay. "


def test_both_sides_run_cold_and_a_summary_compares_them(visit: Visit):
    llm, page = visit.made.llm, visit.page
    page.fill("#max-tokens", "16")
    visit.attach(TEXT * 20)
    visit.ask("How many?")  # the cache is warm for this text now
    before = llm.stats()
    visit.attach(TEXT * 20)
    page.click("#new")
    page.fill("#question", "How many?")
    page.click("#race")
    expect(page.locator(".summary table")).to_be_visible(timeout=20_000)
    visit.wait_done()
    after = llm.stats()
    assert after.answers - before.answers == 2
    assert after.served["pool"] == before.served["pool"] and after.written == before.written
    plain, own = page.locator(".lane-of-race .answer").all_inner_texts()
    assert plain == own != ""
    assert "Both answers are the same" in visit.text(".summary")
    note = visit.text(".race > .note")
    assert "One after the other" in note and "Plain first" in note and "cold cache" in note
    rows = page.locator(".summary tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows[1:]] == [
        "First token on the page", "First confirmed token", "Tokens per second after it", "Whole answer"
    ]  # fmt: skip
    assert "The race is over" in visit.text("#status")
    page.click("#race")  # the other way round
    expect(page.locator(".summary table")).to_have_count(2, timeout=20_000)
    assert "Forerun first" in page.locator(".race").last.locator("> .note").inner_text()


def test_each_side_asks_for_what_it_stands_for(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    said = Script(says("Nine.", token_ids=[1], finish_reason="stop")).play(visit.made.llm, monkeypatch, plain)
    visit.page.locator("#speculation").select_option("lookup")
    visit.page.fill("#question", "How many?")
    visit.page.click("#race")
    visit.wait_done()
    (ids, first), (again, second) = said.asked
    assert ids == again and not first.cache and not second.cache
    assert first.speculation.off and first.prefill.mode == "exact"
    assert second.speculation.drafter == "lookup"


def test_differences_are_told(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    script = Script(says("Nine.", token_ids=[1], finish_reason="stop"))
    script.play(visit.made.llm, monkeypatch, plain)
    other = Script(says("Nigh.", token_ids=[1], finish_reason="stop"))

    def first(tokens: int):
        other.play(visit.made.llm, monkeypatch, plain)
        return plain(tokens)

    script.play(visit.made.llm, monkeypatch, first)
    visit.page.fill("#question", "How many?")
    visit.page.click("#race")
    visit.wait_done()
    assert "The answers differ from character 3 on" in visit.text(".summary")


def test_a_race_against_oneself_is_refused(visit: Visit):
    visit.page.locator("#speculation").select_option("off")
    visit.page.fill("#question", "How many?")
    visit.page.click("#race")
    assert "Both sides would be the same" in visit.text("#problem") and visit.page.locator(".race").count() == 0
