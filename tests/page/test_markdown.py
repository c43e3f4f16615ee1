"""Answers as Markdown: what it makes, and that no text whatsoever makes anything else."""

from __future__ import annotations

import json
import re

import pytest

from tests.page.common import Script, Visit, plain, says

pytestmark = pytest.mark.alone

TEXT = """# A list

Some *soft* and **hard** words, `code <b>`, and a [link](https://example.org/a?b=c&d "title").
Second line of it.

- one
  - inner **two**
- three

3. third
4. fourth

> quoted _words_

```python
print("<b>&amp;</b>")  # **not bold**
```

| a | b |
|---|---|
| 1 | `2` |

---
Bare https://example.org/x. 2 * 3 * 4 and snake_case_name stay; so does \\*this\\*."""

HTML = (
    "<h3>A list</h3><p>Some <em>soft</em> and <strong>hard</strong> words, <code>code &lt;b&gt;</code>, and a "
    "<a>link</a>.\nSecond line of it.</p>"
    "<ul><li>one<ul><li>inner <strong>two</strong></li></ul></li><li>three</li></ul>"
    "<ol><li>third</li><li>fourth</li></ol><blockquote><p>quoted <em>words</em></p></blockquote>"
    '<pre><code>print("&lt;b&gt;&amp;amp;&lt;/b&gt;")  # **not bold**</code></pre>'
    "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>2</code></td></tr></table><hr>"
    "<p>Bare <a>https://example.org/x</a>. 2 * 3 * 4 and snake_case_name stay; so does *this*.</p>"
)

HOSTILE = [
    "<script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg/onload=window.hit=1>",
    "[a](javascript:window.hit=1)",
    "[a](JaVaScRiPt:window.hit=1)",
    "[a](java\tscript:window.hit=1)",
    "[a](data:text/html,<script>window.hit=1</script>)",
    "[a](vbscript:x)",
    "[a](//example.org/x)",
    "[a](/v1/models)",
    "![a](https://example.org/x.png)",
    "![a](x onerror=window.hit=1)",
    '[a](https://example.org/"onmouseover="window.hit=1)',
    "[<img src=x onerror=window.hit=1>](https://example.org/)",
    "<a href=javascript:window.hit=1>a</a>",
    '<https://example.org/"onclick=window.hit=1>',
    "```html\n<script>window.hit=1</script>\n```",
    '```x"><img/src=x/onerror=window.hit=1>\ncode\n```',
    "| <img src=x onerror=window.hit=1> | b |\n|---|---|\n| <script>window.hit=1</script> | c |",
    "# <iframe src=javascript:window.hit=1>",
    "- <style>*{display:none}</style>\n> <base href=https://example.org/>",
    "**<b id=injected>**__<form action=x>__",
    "&lt;script&gt;window.hit=1&lt;/script&gt;",
    "[a]: javascript:window.hit=1\n[a]",
    "`<img src=x onerror=window.hit=1>`",
]
ALLOWED = {
    "H3",
    "H4",
    "H5",
    "H6",
    "P",
    "EM",
    "STRONG",
    "S",
    "CODE",
    "PRE",
    "A",
    "UL",
    "OL",
    "LI",
    "BLOCKQUOTE",
    "TABLE",
}
ALLOWED |= {"TR", "TH", "TD", "HR"}
RENDER = """async (texts) => {
    const { rendered } = await import("/page/markdown.js");
    return texts.map((text) => {
        const box = document.createElement("div");
        box.append(...rendered(text));
        document.querySelector("#turns").append(box);
        const attributes = (one) => [...one.attributes].map((a) => [a.name, a.value]);
        const all = [...box.querySelectorAll("*")].map((one) => [one.tagName, attributes(one)]);
        return [box.innerHTML, box.textContent, all];
    });
}"""


def test_what_it_makes(visit: Visit):
    html, _, nodes = visit.page.evaluate(RENDER, [TEXT])[0]
    assert re.sub(r"<(a|ol|code) [^>]*>", r"<\1>", html) == HTML
    links = [dict(attributes) for tag, attributes in nodes if tag == "A"]
    assert [link["href"] for link in links] == ["https://example.org/a?b=c&d", "https://example.org/x"]
    assert all(link["rel"] == "noopener noreferrer" and link["target"] == "_blank" for link in links)
    assert ["start", "3"] in next(attributes for tag, attributes in nodes if tag == "OL")


def test_nothing_becomes_markup(visit: Visit):
    made = visit.page.evaluate(RENDER, HOSTILE + [left + right for left in HOSTILE[:9] for right in HOSTILE])
    for _, _, nodes in made:
        for tag, attributes in nodes:
            names = {name for name, _ in attributes}
            assert tag in ALLOWED and names <= {"href", "target", "rel", "title", "start", "data-language", "class"}
            assert all(value.startswith(("http://", "https://")) for name, value in attributes if name == "href")
    assert visit.page.evaluate("window.hit") is None and visit.page.locator("#injected").count() == 0
    assert visit.page.locator("#turns script, #turns img, #turns iframe, #turns style").count() == 0


def test_long_and_odd_texts_take_no_time(visit: Visit):
    odd = ["*" * 50_000, "[" * 50_000, "`" * 50_001, "_a " * 20_000, ">" * 3000 + "a", "- " * 5000, "**a*" * 10_000]
    odd += ["|" * 20_000 + "\n|-|", "http://" * 10_000, "\\" * 50_000, "  " * 500 + "- a\n" * 2000]
    spaces, words = " " * 60_000, "a" * 60_000
    odd += [
        f"# a{spaces}x",
        f"# {spaces}#{spaces}x",
        f"# {'#' * 60_000}x",
        f"```{spaces}`",
        f"```{words}`",
        f"|\n{spaces}x",
    ]
    took = visit.page.evaluate(
        """async (texts) => {
            const { rendered } = await import("/page/markdown.js");
            return texts.map((text) => {
                const start = performance.now();
                rendered(text);
                return performance.now() - start;
            });
        }""",
        odd,
    )
    assert max(took) < 3000, took
    texts = visit.page.evaluate(RENDER, ["plain text\nof two lines", "a " * 1000, "# C# ##", "# About C#", "# #"])
    assert [html for html, _, _ in texts[2:]] == ["<h3>C#</h3>", "<h3>About C#</h3>", "<h3></h3>"]
    assert texts[0][1] == "plain text\nof two lines"


def test_a_complete_answer_is_rendered_and_can_be_read_as_text(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    parts = [TEXT[at : at + 40] for at in range(0, len(TEXT), 40)]
    events = [says(part, token_ids=[1]) for part in parts]
    Script(*events, says("", finish_reason="stop")).play(visit.made.llm, monkeypatch, plain)
    visit.ask("Format it.")
    page = visit.page
    assert page.locator(".rendered h3").inner_text() == "A list" and visit.answer == TEXT
    assert not page.locator(".answer .final").last.is_visible()
    page.click(".as-text")
    assert page.locator(".answer .final").last.is_visible() and not page.locator(".rendered").is_visible()
    sent = json.loads(json.dumps(visit.answer))
    visit.ask("Again.")  # the conversation goes on from the text, not from what is rendered
    assert sent == TEXT
