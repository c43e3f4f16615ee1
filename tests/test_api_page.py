"""The API page: made from the docstrings, and not older than they are."""

from __future__ import annotations

import forerun
from forerun_research.scripts.api_page import MODULES, PAGE, PARTS, page


def test_the_page_is_what_the_docstrings_say() -> None:
    made = page()
    assert PAGE.read_text(encoding="utf-8") == made, "run: python -m forerun_research.scripts.api_page"


def test_the_page_has_every_public_name() -> None:
    listed = {name for names in PARTS.values() for name in names}
    assert listed == set(forerun.__all__) - {"__version__"}
    made = page()
    for module in MODULES:
        for name in getattr(forerun, module).__all__:
            assert f"### `{name}`" in made


def test_the_page_shows_what_may_be_given() -> None:
    made = page()
    assert "| `temperature` | `float` | `0.0` | 0: greedy;" in made and "(from 0.0 to 100.0) |" in made
    assert "| `speculation` | `Speculation \\| str` | `Speculation()` |" in made
    assert "`memory_stats`" in made and "`LLM.memory`" not in made and "Converted" not in made
