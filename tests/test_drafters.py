"""The public names for authors of drafters; the example in the docstring is the one that the speculation page has."""

from __future__ import annotations

import textwrap
from pathlib import Path

from forerun import drafters
from forerun.decode.drafters import base

PAGE = Path(__file__).parent.parent / "docs" / "speculation.md"


def example() -> str:
    assert drafters.__doc__ is not None
    blocks = drafters.__doc__.split("\n\n    from forerun import")[1].split("\n\nA `Draft` is")[0]
    return textwrap.dedent("    from forerun import" + blocks)


def test_the_docstrings_example_is_the_pages() -> None:
    """`test_docs` runs the page's examples."""
    assert f"```python\n{example()}\n```" in PAGE.read_text()


def test_every_public_name_exists_and_registration_can_be_undone() -> None:
    assert all(hasattr(drafters, name) for name in drafters.__all__)

    @drafters.register
    class NothingDrafter(drafters.Drafter):
        name = "nothing"

        def propose(self, requests: list[drafters.DraftRequest]) -> list[drafters.Draft]:
            return [drafters.Draft() for _ in requests]

    assert drafters.registered()["nothing"] is NothingDrafter is base.registered()["nothing"]
    drafters.unregister("nothing")
    assert "nothing" not in drafters.registered()
