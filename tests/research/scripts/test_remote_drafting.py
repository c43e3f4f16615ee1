"""The bench of remote drafting: what is made of its lines, and a run on tiny models."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forerun import LLM
from forerun_research.scripts import remote_drafting
from tests.serve.test_draft_server import running


def line(plain: float, local: float, remote: float) -> dict[str, Any]:
    def run(seconds: float, accepted: int = 0, moved: int = 0) -> dict[str, Any]:
        return {"token_s": seconds, "steps": 10, "accepted": accepted, "own_accepted": accepted, "bytes": moved}

    settings = {"plain": [run(plain)], "local": [run(local)], "remote 0 ms": [run(remote, 5, 400), run(9.0, 3, 400)]}
    settings["remote 0 ms"].append(run(remote))
    return {"kind": "code", "prompt": 0, "equal": True, "settings": settings}


def test_prompts_count_by_their_medians_and_bytes_by_the_drafters_own_tokens() -> None:
    found = remote_drafting.summarise([line(1.0, 0.8, 0.5), line(3.0, 1.2, 1.5)])
    assert found["equal_answers"] == "2 of 2"
    remote = found["settings"]["remote 0 ms"]
    assert remote["against_plain"] == 2.0 and remote["single_prompts"] == [2.0, 2.0]
    assert remote["against_local"][0] == 1.0 and remote["bytes_per_accepted_token"] == 100.0
    assert found["settings"]["local"]["single_prompts"] == [1.25, 2.5]


@pytest.mark.parametrize("named", [False, True])
def test_a_run_on_tiny_models(named: bool, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = str(tiny_folder("llama"))
    options = argparse.Namespace(
        kind="code", every=2, prompts=2, skip=1, tokens=6, repeats=1, rtt=[0], local=True, named=named
    )
    options.temperature, options.out = 0.0, tmp_path / "lines.jsonl"
    opened = {"quiet": True, "max_model_len": 1024, "threads": 1}
    with LLM(folder, **opened) as small, running(small) as (_, port), LLM(folder, draft_model=folder, **opened) as llm:
        server = cast(remote_drafting.DraftServerProcess, SimpleNamespace(port=port))
        found = remote_drafting.speed(llm, server, options)
        again = remote_drafting.speed(llm, server, options)
        assert llm.engine.speculator.ctx.draft is not None  # it was hidden from other settings only
    assert found["equal_answers"] == "2 of 2" and again["equal_answers"] == "4 of 4"
    assert ("free drafters" in found["settings"]) != named
    assert found["settings"]["local"]["prompts"] == 2 and again["settings"]["remote 0 ms"]["prompts"] == 4
