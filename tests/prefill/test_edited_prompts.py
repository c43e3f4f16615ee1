"""A long prompt met before with a line changed: its unchanged spans are found, moved and repaired, also from tiers and
after a restart, and provisional answers end as exact prefill's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import LLM, Prefill, SamplingParams
from forerun.cache import segments
from tests import tiny

CHUNK = Prefill("provisional", source="chunk")
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, count).tolist()


BODY = words(0, 1400)
OLD = [*words(1, 20), *BODY]
EDITS = {
    "top": [*words(2, 23), *BODY],
    "middle": [*OLD[:300], *words(3, 12), *OLD[312:]],
    "inserted": [*OLD[:500], *words(4, 31), *OLD[500:]],
    "removed": [*OLD[:200], *OLD[231:]],
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    folder = tiny.write_folder(tmp_path_factory.mktemp("edited"), "qwen2")

    def make(**options: Any) -> LLM:
        settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "quiet": True}
        return LLM(str(folder), **(settings | {"max_model_len": 2048, "kv_cache_tokens": 8192} | options))

    return make


def asked(llm: LLM, ids: list[int], prefill: Prefill) -> Any:
    return llm.generate(ids, SamplingParams(max_tokens=12, ignore_eos=True, prefill=prefill))[0]


@pytest.mark.parametrize("edit", EDITS)
def test_unchanged_spans_are_found_and_the_answer_is_exact_prefills(edit: str, opened: Callable[..., LLM]):
    with opened() as llm:
        exact = asked(llm, EDITS[edit], Prefill())
        llm.clear_cache()
        llm.generate(OLD, ONE)
        found = asked(llm, EDITS[edit], CHUNK)
    report = found.usage.prefill
    assert report.source == "chunk" and report.fell_back == "" and report.predicted_kl is not None
    assert report.drafted > 300 and report.recomputed < report.drafted / 2 and found.usage.provisional > 0
    assert found.token_ids == exact.token_ids


def test_spans_are_found_on_disk_after_a_restart(opened: Callable[..., LLM], tmp_path: Path):
    with opened() as llm:
        exact = asked(llm, EDITS["top"], Prefill())
    with opened(disk=tmp_path) as llm:
        llm.generate(OLD, ONE)
    with opened(disk=tmp_path) as llm:
        found = asked(llm, EDITS["top"], CHUNK)
    report = found.usage.prefill
    assert report.fell_back == "" and report.drafted > 1200 and report.recomputed < 400
    assert found.usage.provisional > 0 and found.token_ids == exact.token_ids


def test_spans_are_found_in_host_memory_once_the_pool_needs_their_pages(opened: Callable[..., LLM]):
    with opened(host_bytes=64 << 20, kv_cache_tokens=3200) as llm:
        asked(llm, OLD, Prefill("speculative", source="chunk", allow_exact=True))  # from now on prompts are indexed
        llm.generate(OLD, ONE)
        for seed in (11, 12, 13):  # other prompts take the pages
            llm.generate(words(seed, 1500), ONE)
        found = asked(llm, EDITS["top"], Prefill("speculative", source="chunk"))
    report = found.usage.prefill
    assert report.fell_back == "" and report.drafted > 1200 and report.recomputed < 400


def test_what_disk_has_lost_is_computed(opened: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pages that were there when the prompt was matched and cannot be read any more."""
    with opened() as llm:
        exact = asked(llm, EDITS["top"], Prefill())
    with opened(disk=tmp_path) as llm:
        llm.generate(OLD, ONE)
    with opened(disk=tmp_path) as llm:
        monkeypatch.setattr(segments, "zlib", _Wrong())
        found = asked(llm, EDITS["top"], CHUNK)
    assert found.usage.prefill.accepted == 0 and found.token_ids == exact.token_ids


class _Wrong:
    """Checksums that never agree."""

    @staticmethod
    def crc32(data: object) -> int:
        return -1


def test_auto_takes_what_was_met_before(opened: Callable[..., LLM]):
    """Without a profile: a new prompt is computed, the same with a line changed is drafted, a repeated one is read."""
    auto = Prefill("provisional", allow_exact=True)
    with opened() as llm:
        first = asked(llm, OLD, auto)
        assert first.usage.prefill.drafted == 0 and "needs a profile" in first.usage.prefill.fell_back
        found = asked(llm, EDITS["inserted"], auto)
        assert found.usage.prefill.source == "chunk" and found.usage.prefill.drafted > 800
        again = asked(llm, EDITS["inserted"], auto)
        assert again.usage.prefill.drafted == 0 and again.usage.cached_tokens > 1300
        llm.clear_cache()
        assert asked(llm, EDITS["inserted"], Prefill()).token_ids == found.token_ids == again.token_ids
        private = SamplingParams(max_tokens=2, prefill=auto, cache=False)
        assert llm.generate(EDITS["top"], private)[0].usage.prefill.drafted == 0
