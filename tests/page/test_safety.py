"""A hostile document, a hostile answer, and the policy that would stop what slips through."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.page.common import Script, Visit, drafted, says

pytestmark = pytest.mark.alone

HOSTILE = (
    '<img src=x onerror="window.hit=1"><script>window.hit=2</script><b id=injected>bold</b> &lt;i&gt; </textarea> '
)


def test_text_is_never_markup(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    llm, page = visit.made.llm, visit.page
    monkeypatch.setattr(llm.engine.speculative_prefill, "problem", lambda settings, tokens: None)
    Script(
        says(HOSTILE, token_ids=[1], provisional=True),
        says(HOSTILE, token_ids=[2, 3], retracted=1, finish_reason="stop"),
    ).play(llm, monkeypatch, drafted)
    page.reload()
    page.check("input[value=provisional]")
    visit.attach(HOSTILE * 6, "<b id=injected>.txt")
    expect(page.locator("#document")).to_contain_text("<b id=injected>.txt")
    visit.ask(HOSTILE)
    expect(page.locator(".prompt-text")).to_be_visible()
    assert page.locator("#injected").count() == 0 and page.locator("main img, main script").count() == 0
    assert page.evaluate("window.hit") is None
    assert visit.answer == HOSTILE and HOSTILE in page.locator(".prompt-text").text_content()
    page.fill("#question", HOSTILE)
    page.click("#race")
    visit.wait_done()
    assert page.locator("#injected").count() == 0 and page.evaluate("window.hit") is None


def test_the_policy_forbids_what_the_page_does_not_need(visit: Visit):
    response = visit.made.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    blocked = visit.page.evaluate(
        """async () => {
            const seen = [];
            document.addEventListener("securitypolicyviolation", (event) => seen.push(event.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.hit = 1";
            document.head.append(script);
            await fetch("https://example.org/").catch(() => {});
            for (let frames = 0; seen.length < 2 && frames < 600; frames++) await new Promise(requestAnimationFrame);
            return [seen, window.hit ?? null];
        }"""
    )
    assert blocked == [["script-src-elem", "connect-src"], None]
    assert len(visit.complaints) >= 2 and all("Content Security Policy" in text for text in visit.complaints)
    visit.complaints.clear()
    visit.requests[:] = [url for url in visit.requests if url != "https://example.org/"]


def test_only_files_of_the_page_are_served(visit: Visit):
    made = visit.made
    assert made.get("/page/app.js").headers["content-type"].startswith("text/javascript")
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page/app.py", "/page/"):
        assert made.get(path).status_code == 404
    tag = made.get("/page/style.css").headers["etag"]
    assert made.get("/page/style.css", headers={"if-none-match": tag}).status_code == 304
