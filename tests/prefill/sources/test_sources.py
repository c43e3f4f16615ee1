"""Sources by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.errors import BadProfile, BadRequest
from forerun.prefill.sources import make_source
from tests.prefill.sources.common import make_draft_context, make_maps, make_profile


def test_sources_are_made_by_name(tiny_folder: Callable[[str], Path]):
    ctx, maps = make_draft_context(tiny_folder("llama")), make_maps(tiny_folder("llama"), 1, (1,))
    for name in ("draft", "self"):
        source = make_source(name, ctx, make_profile(name, maps))
        assert source.name == name and source.base == 1
    with pytest.raises(BadProfile, match="'self', not for 'draft'"):
        make_source("draft", ctx, make_profile("self", maps))
    assert make_source("chunk", ctx, None).name == "chunk"
    for name in ("dream", "drop"):  # `drop` is a baseline of studies, which no request can ask for
        with pytest.raises(BadRequest, match=f"{name!r}") as error:
            make_source(name, ctx, None)
        assert "chunk" in error.value.hint and "drop" not in error.value.hint
