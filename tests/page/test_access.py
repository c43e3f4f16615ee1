"""Accessibility: keyboard, phone, light and dark, reduced motion."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, expect

from tests.page.common import Visit
from tests.page.conftest import visiting
from tests.serve.common import Running

pytestmark = pytest.mark.alone

# The colour of every visible text and of what lies behind it, mixed down to solid colours
COLOURS = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const solid = (colours) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("noscript, option")) continue;
        const behind = [];
        for (let at = node; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
        const below = [getComputedStyle(document.body).backgroundColor, ...behind];
        const ink = solid([...below, getComputedStyle(node).color]);
        found.push([walker.currentNode.data.trim().slice(0, 40), ink, solid(below)]);
    }
    return found;
}"""


def luminance(rgb: list[int]) -> float:
    parts = [value / 255 for value in rgb]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: list[int], b: list[int]) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def used(visit: Visit) -> None:
    """A page with all its parts filled."""
    visit.page.fill("#max-tokens", "6")
    visit.attach("The tide turns at noon. " * 30)
    visit.ask("When does it turn?")
    visit.page.fill("#question", "When?")
    visit.page.click("#race")
    expect(visit.page.locator(".summary table")).to_be_visible(timeout=20_000)
    visit.wait_done()
    expect(visit.page.locator(".prompt-text")).to_be_visible()
    visit.page.evaluate("document.getElementById('problem').textContent = 'Something went wrong.'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(browser: Browser, served: Running, scheme: str):
    for visit in visiting(browser, served, color_scheme=scheme):
        used(visit)
        found = visit.page.evaluate(COLOURS)
        assert len(found) > 60
        paper = luminance(found[0][2])
        assert paper > 0.8 if scheme == "light" else paper < 0.05
        weak = [(text, round(contrast(ink, behind), 2)) for text, ink, behind in found if contrast(ink, behind) < 4.5]
        assert weak == []


def test_the_theme_can_be_chosen_and_is_kept(visit: Visit):
    page = visit.page
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    for name in ("light", "dark"):
        page.click("#theme")
        assert visit.text("#theme") == f"Theme: {name}"
    dark = page.evaluate(colour)
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    assert dark != light and page.evaluate(colour) == dark


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, served: Running):
    for visit in visiting(browser, served, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True):
        fits = "document.documentElement.scrollWidth <= 390 && document.body.scrollWidth <= 390"
        assert visit.page.evaluate(fits)
        visit.page.click("#settings summary")
        used(visit)
        visit.page.evaluate("document.querySelector('.answer').append('x'.repeat(500))")
        assert visit.page.evaluate(fits)
        size = visit.page.locator("#ask").bounding_box()
        assert size is not None and size["height"] >= 32


def test_everything_works_by_keyboard(visit: Visit):
    page = visit.page
    expect(page.locator("#about")).to_contain_text("weights")
    seen: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "document.activeElement.id || document.activeElement.className || document.activeElement.name"
        )
        outline = page.evaluate(
            "[document.activeElement, document.activeElement.nextElementSibling].filter(Boolean)"
            ".map(n => getComputedStyle(n)).some(s => s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1)"
        )
        if page.evaluate("document.activeElement === document.body"):
            break
        assert outline, f"no visible focus on {name}"
        seen.append(name)
    order = [
        name for name in seen if name in ("new", "theme", "file", "question", "ask", "race", "speculation", "refresh")
    ]
    assert order == ["new", "theme", "file", "question", "ask", "race", "speculation", "refresh"]
    page.focus("#max-tokens")
    page.keyboard.press("Control+a")
    page.keyboard.type("3")
    page.focus("#question")
    page.keyboard.type("First line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Control+Enter")
    visit.wait_done()
    assert visit.text(".asked") == "First line\nsecond line"
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type("Again")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the button
    visit.wait_done()
    assert page.locator(".turn").count() == 2 and "Answer complete" in visit.text("#status")
    for name in ("#status", "#timeline .readout", "#depth .readout"):
        assert page.locator(name).get_attribute("aria-live") == "polite"
    assert page.locator("#problem").get_attribute("role") == "alert"


def test_less_motion_means_none(browser: Browser, served: Running):
    for visit in visiting(browser, served, reduced_motion="reduce"):
        visit.page.evaluate("document.getElementById('welcome').className = 'confirmed'")
        name = visit.page.evaluate("getComputedStyle(document.getElementById('welcome')).animationName")
        assert name == "none"


def test_every_control_has_a_name(visit: Visit):
    expect(visit.page.locator("#about")).to_contain_text("weights")
    told = visit.page.locator("body").aria_snapshot()
    for line in told.splitlines():
        control = re.match(r"\s*- (button|textbox|combobox|spinbutton|radio|img)\b(.*)", line)
        assert control is None or '"' in control[2], line
