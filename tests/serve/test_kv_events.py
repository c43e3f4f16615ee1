"""KV events agree with the prefix tree through any use of it, and hold exact pages only."""

from __future__ import annotations

import random

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest
from forerun.serve.kv_events import event, open_kv_events, page_hashes
from tests.cache.test_prefix import make
from tests.serve.common import Holding, Running, slowed, wait_for
from tests.serve.kv_event_reader import KvEventReader

SIZE = 4


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_knows_what_the_tree_holds(seed: int):
    draw = random.Random(seed)
    (pool, tree), reader = make(24, SIZE), KvEventReader()
    tree.on_change = lambda data, pages: reader.apply(event(data, pages, SIZE))
    texts: list[list[int]] = []
    for _ in range(300):
        chance = draw.random()
        text = draw.choice(texts)[: draw.randrange(40)] if texts and draw.random() < 0.7 else []
        text = [*text, *(draw.randrange(3) for _ in range(draw.randrange(1, 12)))]
        if chance < 0.7:
            known = tree.match(text)
            pool.retain(known)
            wanted = len(text) // SIZE - len(known)
            if wanted > pool.free and tree.evict(wanted - pool.free) < wanted - pool.free:
                pool.release(known)
                continue
            new = pool.allocate(wanted)
            tree.insert(text, [*known, *new], draw.choice(["", "ann"]))
            pool.release([*known, *new])
            texts.append(text)
        elif chance < 0.8:
            tree.count_read(text)
        elif chance < 0.9:
            tree.evict(draw.randrange(1, 6))
        elif chance < 0.98:
            tree.forget(text)
        else:
            tree.clear()
        assert len(reader.blocks) == tree.num_pages
        assert reader.held_tokens(text, SIZE) == len(tree.match(text)) * SIZE


def test_a_blocks_hash_is_of_all_tokens_up_to_its_end():
    first, second = page_hashes(b"abcd" * SIZE * 2, SIZE), page_hashes(b"abcd" * SIZE + b"abce" * SIZE, SIZE)
    assert first[0] == second[0] and first[1] != second[1] and first[0] != first[1]


def test_requests_are_reported_as_they_are_cached(llm: LLM):
    reader, tree = KvEventReader(), llm.engine.tree
    llm.clear_cache()
    tree.on_change = lambda data, pages: reader.apply(event(data, pages, 16))
    try:
        done = llm.generate("The keeper counts the ships that pass. " * 4, SamplingParams(max_tokens=20))[0]
        whole = [*done.prompt_ids, *done.token_ids]
        assert len(done.prompt_ids) // 16 * 16 <= reader.held_tokens(whole, 16) == len(tree.match(whole)) * 16
        before = dict(reader.blocks)
        list(
            llm.stream(
                "Another text that is long enough for pages. " * 3, SamplingParams(max_tokens=4, prefill="exact")
            )
        )
        assert len(reader.blocks) > len(before)
        llm.clear_cache()
        assert not reader.blocks
    finally:
        tree.on_change = None


def test_the_gauges_of_gateways(served: Running):
    text = served.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    pages = served.llm.engine.pool.num_pages
    assert float(values[f'forerun_cache_config_info{{block_size="16",num_gpu_blocks="{pages}"}}']) == 1
    assert float(values["forerun_kv_cache_usage"]) == 0  # what is only cached is free
    assert float(values["forerun_sequences_waiting"]) == float(values["forerun_sequences_running"]) == 0
    patch, _ = slowed(served.llm)
    held = Holding(served)
    wait_for(lambda: float(_value(served, "forerun_kv_cache_usage")) > 0)
    assert (
        float(_value(served, "forerun_kv_cache_usage")) <= 1 and float(_value(served, "forerun_sequences_running")) == 1
    )
    patch.undo()
    held.join()


def _value(made: Running, name: str) -> str:
    return made.get("/metrics").text.split(f"\n{name} ")[1].split()[0]


def test_replays_need_events(llm: LLM):
    with pytest.raises(BadRequest, match="there are none"), open_kv_events(llm, None, "tcp://*:1"):
        pass
    with open_kv_events(llm, None, None) as publisher:
        assert publisher is None
