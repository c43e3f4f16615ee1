"""Tiers, pins and accounting inside the engine: same answers, none stuck, nothing leaked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.cache.tiers import TierConfig, Tiers
from forerun.core import SamplingParams
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.sequence import Event, Request
from forerun.models.build import build_decoder
from forerun.models.decoder import Decoder
from forerun.models.formats.checkpoint import open_checkpoint
from tests.engine.common import Answer, finish

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, speculation="off")
PROMPTS = [[(7 * i + j * j) % 500 + 3 for j in range(90)] for i in range(4)]


@pytest.fixture(scope="module")
def decoder(tiny_folder: Callable[[str], Path]) -> Decoder:
    return build_decoder(open_checkpoint(tiny_folder("qwen3")), torch.device("cpu"), "float32", 512)[0]


def make(decoder: Decoder, tiers: TierConfig | None = None, **config: int) -> Engine:
    values = {
        "max_model_len": 512,
        "kv_cache_tokens": 128,
        "page_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    } | config
    keep = None if tiers is None else lambda pool: Tiers(pool, tiers, "tiny")
    return Engine(decoder, None, EngineConfig(**values), tiers=keep)  # type: ignore[arg-type]


def ask(engine: Engine, prompt: list[int], session: str | None = None) -> Event:
    return start(engine, prompt, session, run=True)[-1]


def start(engine: Engine, prompt: list[int], session: str | None = None, run: bool = False) -> list[Event]:
    events: list[Event] = []
    engine.submit(Request(prompt, PARAMS, sink=events.append, session=session))
    if run:
        finish(engine)
    return events


def leaked(engine: Engine) -> int:
    return int(engine.pool.refs.sum()) - engine.tree.num_pages - engine.scheduler.pins.num_pages


def served(event: Event) -> dict[str, int]:
    assert event.usage is not None and sum(event.usage.served.values()) == event.usage.prompt_tokens
    return event.usage.served


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_pool_too_small_for_all_prompts_reads_them_back(decoder: Decoder, tmp_path: Path, kind: str):
    engine = make(decoder, TierConfig(host_bytes=1 << 24) if kind == "host" else TierConfig(disk=tmp_path))
    plain = make(decoder, kv_cache_tokens=2048)
    wanted = []
    for prompt in PROMPTS:
        answer = Answer(plain, prompt, PARAMS)
        finish(plain)
        wanted.append(answer.tokens())
    for _ in range(2):
        for prompt, expected in zip(PROMPTS, wanted, strict=True):
            answer = Answer(engine, prompt, PARAMS)
            finish(engine)
            assert answer.tokens() == expected
    assert served(answer.last)[kind] >= 80 and answer.last.usage.cached_tokens >= 80  # type: ignore[union-attr]
    assert leaked(engine) == 0 and engine.stats.answers == 8
    assert engine.stats.served[kind] > 200 and engine.stats.prompt_tokens == 720


def test_written_counts_what_others_can_read_now(decoder: Decoder):
    engine = make(decoder, kv_cache_tokens=2048)
    first, again = ask(engine, PROMPTS[0]), ask(engine, PROMPTS[0])
    assert first.usage is not None and again.usage is not None
    assert first.usage.written == 88 and again.usage.written == 0
    assert served(again) == {"pool": 88, "host": 0, "disk": 0, "store": 0, "approximate": 0, "computed": 2}


def test_a_request_that_is_cancelled_before_its_turn_was_served_nothing(decoder: Decoder):
    engine = make(decoder)
    events = start(engine, PROMPTS[0])
    engine.end_all()
    assert events[-1].finish_reason == "cancelled" and events[-1].usage is not None
    assert sum(events[-1].usage.served.values()) == 0 and (engine.stats.answers, engine.stats.requests) == (0, 1)


def test_pinned_pages_outlive_others(decoder: Decoder):
    engine = make(decoder, kv_cache_tokens=256)
    engine.scheduler.pins.open("s", 600.0)
    ask(engine, PROMPTS[0], "s")
    for prompt in PROMPTS[1:]:
        ask(engine, prompt)
    assert served(ask(engine, PROMPTS[0], "s"))["pool"] == 88
    engine.scheduler.pins.close("s")
    for prompt in PROMPTS[1:]:
        ask(engine, prompt)
    assert served(ask(engine, PROMPTS[0]))["pool"] == 0 and leaked(engine) == 0


def test_pins_give_way_where_nothing_could_run_otherwise(decoder: Decoder):
    engine = make(decoder)  # room for one prompt
    for name, prompt in zip("ab", PROMPTS, strict=False):
        engine.scheduler.pins.open(name, 600.0)
        assert ask(engine, prompt, name).finish_reason == "length"
    assert ask(engine, PROMPTS[2]).finish_reason == "length"
    engine.scheduler.pins.clear()
    assert leaked(engine) == 0


def test_turns_that_wait_for_each_others_pins_all_end(decoder: Decoder):
    engine = make(decoder, kv_cache_tokens=256)
    for name, prompt in zip("ab", PROMPTS, strict=False):
        engine.scheduler.pins.open(name, 600.0)
        ask(engine, prompt, name)
    longer = [[*prompt, *range(10, 80)] for prompt in PROMPTS]
    started = [start(engine, longer[2]), start(engine, longer[0], "a"), start(engine, longer[1], "b")]
    finish(engine)
    assert [events[-1].finish_reason for events in started] == ["length"] * 3
    assert served(started[1][-1])["pool"] >= 88  # its turn had begun: it was let in before the other needed its room
    engine.scheduler.pins.clear()
    assert leaked(engine) == 0


def test_a_sessions_turn_is_the_last_to_be_preempted(decoder: Decoder):
    engine = make(decoder, kv_cache_tokens=64)
    engine.scheduler.pins.open("s", 600.0)
    params = SamplingParams(max_tokens=30, ignore_eos=True, speculation="off")
    other = Answer(engine, PROMPTS[0][:10], params)
    events: list[Event] = []
    engine.submit(Request(PROMPTS[1][:10], params, sink=events.append, session="s"))
    finish(engine)
    assert other.last.usage is not None and events[-1].usage is not None
    assert other.last.usage.preemptions > 0 and events[-1].usage.preemptions == 0


def test_clearing_the_cache_clears_pins_and_host_memory(decoder: Decoder):
    engine = make(decoder, TierConfig(host_bytes=1 << 24))
    engine.scheduler.pins.open("s", 600.0)
    for prompt in PROMPTS[:2]:
        ask(engine, prompt, "s")
    engine.clear_cache()
    assert engine.pool.used == 0 and served(ask(engine, PROMPTS[0]))["computed"] == 90
