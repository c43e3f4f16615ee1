"""How models are cut for one launch anywhere; launches, graphs and chains, against the reference, on Hopper only."""

import itertools
import math
import random
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.core import ROOT
from forerun.models.attention import SdpaAttention
from forerun.models.build import build_decoder
from forerun.models.cuda.stack import CHUNK_WEIGHTS, SHARED_BYTES, Cut, taps_mask
from forerun.models.decoder import Taps
from forerun.models.execution.runner import Runner, Span
from forerun_research.bench.shapes import SHAPES, RandomCheckpoint

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("shape", ["0.5b", "1.5b", "8b"])
def test_cut_fits_the_chip_and_keeps_it_busy(shape):
    config = SHAPES[shape]
    cut = Cut.of(config, 132)
    assert cut.shared_bytes() <= SHARED_BYTES
    assert cut.stages >= 8  # fewer would not cover memory's latency
    chunks = -(-config.intermediate_size // CHUNK_WEIGHTS)
    busiest = -(-config.hidden_size // 16 * cut.down_split // 132) * -(-chunks // cut.down_split)
    assert busiest * 132 < 1.3 * chunks * config.hidden_size / 16


@pytest.mark.parametrize("shape", ["0.5b", "1.5b"])
def test_more_rows_are_cut_the_same_way(shape):
    few, many = (Cut.of(SHAPES[shape], 132, rows) for rows in (16, 32))
    assert many.shared_bytes() <= SHARED_BYTES and many.stages > 0
    assert (few.down_split, few.lanes) == (many.down_split, many.lanes)  # else a row's bits would differ


def test_depths_are_bits_in_their_order():
    assert taps_mask((0, 2, 63)) == 1 | 1 << 2 | 1 << 63
    with pytest.raises(AssertionError):
        taps_mask((3, 2))


def test_cut_gives_every_slice_work():
    for inner in range(256, 16_385, 256):
        cut = Cut.of(replace(SHAPES["1.5b"], intermediate_size=inner), 132)
        chunks = inner // CHUNK_WEIGHTS
        assert -(-chunks // cut.down_split) * CHUNK_WEIGHTS <= 4096, inner


if HOPPER:
    from forerun.models.cuda.stack import ChainRunner, can_chain

    DEVICE = torch.device("cuda")
    PAGES = 40 * 40
    SHAPES["stack-test"] = replace(
        SHAPES["1.5b"],
        vocab_size=1024,
        hidden_size=448,
        num_layers=3,
        num_heads=14,
        head_dim=64,
        intermediate_size=1216,
    )

    @pytest.fixture(scope="module")
    def runner():
        decoder, _ = build_decoder(RandomCheckpoint("stack-test", DEVICE), DEVICE, "bf16", 2048, quiet=True)
        pool = PagePool(decoder.config, PAGES, 16, torch.bfloat16, DEVICE)
        for cache in itertools.chain(*pool.kv):
            cache.normal_()
        return Runner(decoder, pool, 2048)

    def spans(sequences) -> list[Span]:
        """Sequences as (entries before, new tokens, whether all but the first are a tree), on pages of their own."""
        draw = random.Random(str(sequences))
        sizes = [-(-(before + new + 16) // 16) for before, new, _ in sequences]
        pages = draw.sample(range(PAGES), sum(sizes))
        made = []
        for (before, new, tree), size in zip(sequences, sizes, strict=True):
            own = array("i", [pages.pop() for _ in range(size)])
            parents = [draw.randrange(ROOT, node) if node else ROOT for node in range(new - 1)] if tree else []
            ids = [draw.randrange(1024) for _ in range(new)]
            made.append(Span(ids, before, own, range(new), before + 1 if tree else 0, parents))
        return made

    def same_caches(one, other) -> bool:
        return all(torch.equal(a, b) for a, b in zip(itertools.chain(*one), itertools.chain(*other), strict=True))

    CASES = [
        [(0, 1, False)],
        [(299, 1, False)],
        [(62, 3, False)],
        [(584, 16, False)],
        [(63, 1, False)] * 2,
        [(484, 1, False)] * 16,
        [(30, 5, False), (600, 1, False), (77, 3, False)],
        [(511, 8, True)],
        [(60, 16, True)],
        [(15, 9, True), (250, 1, False), (63, 4, True)],
        [(300, 32, True)],
        [(63, 4, False), (64, 4, True)] * 4,
        [(199, 1, False)] * 40,
        [(33, 48, True)],
        [(900, 3, True), (12, 1, False), (64, 9, True)] * 3,
        [(100, 64, True)],
    ]

    @pytest.mark.parametrize("sequences", CASES, ids=str)
    def test_equals_the_reference_and_each_row_alone(runner, sequences):
        work = spans(sequences)
        batch = runner.batch(work)
        kept = [(k.clone(), v.clone()) for k, v in runner.kv]
        attention = SdpaAttention(runner.decoder.config, DEVICE, 2048, same_bits=False)
        want = replace(runner.decoder, attention=attention).forward(batch.to(DEVICE), kept).logits
        got = runner.graphs.run(batch)
        assert (got.logits - want).norm() / want.norm() < 2e-2
        assert torch.equal(got.greedy.to(DEVICE), got.logits.argmax(-1))
        slots = torch.from_numpy(batch.slot_mapping).to(DEVICE)
        for ours, theirs in zip(itertools.chain(*runner.kv), itertools.chain(*kept), strict=True):
            assert (ours[slots] - theirs[slots]).float().norm() / theirs[slots].float().norm() < 2e-2
        if len(batch.tokens) > 32:
            return
        together = got.logits.clone()
        for i in {0, len(work) - 1}:
            first = Span(work[i].ids[:1], work[i].first, work[i].pages, range(1))
            assert torch.equal(runner.graphs.run(runner.batch([first])).logits[0], together[batch.cu_seqlens[i]])

    DEPTHS = (0, 2, 3)  # embeddings, in between, the last layer's output

    @pytest.fixture(scope="module")
    def tapped(runner):
        made = Runner(runner.decoder, runner.pool, 2048)
        made.graphs.leave_states(Taps(hidden=frozenset(DEPTHS)))
        return made

    @pytest.mark.parametrize("sequences", [CASES[i] for i in (0, 3, 5, 9, 10, 12, 15)], ids=str)
    def test_hidden_states_are_left_and_change_no_bit(runner, tapped, sequences):
        """One launch of 16 and of 32 rows, and graphs."""
        batch = runner.batch(spans(sequences))
        kept = [(k.clone(), v.clone()) for k, v in runner.kv]
        attention = SdpaAttention(runner.decoder.config, DEVICE, 2048, same_bits=False)
        want = replace(runner.decoder, attention=attention).forward(batch.to(DEVICE), kept, tapped.graphs.taps)
        plain = runner.graphs.run(batch).logits.clone()
        got = tapped.graphs.run(batch)
        assert torch.equal(got.logits, plain) and sorted(got.hidden) == list(DEPTHS)
        for depth in DEPTHS:
            theirs = want.hidden[depth].float()
            assert got.hidden[depth].shape == theirs.shape == (len(batch.tokens), 448)
            assert (got.hidden[depth].float() - theirs).norm() / theirs.norm() < 2e-2

    def test_prompts_leave_hidden_states_too(runner, tapped):
        batch = runner.batch(spans([(0, 200, False), (0, 90, False)]))
        want = runner.decoder.forward(batch.to(DEVICE), runner.kv, tapped.graphs.taps)
        batch.prompt, batch.logits_indices = True, [199, 289]
        got = tapped.graphs.run(batch)
        for depth in DEPTHS:
            theirs = want.hidden[depth].float()
            assert (got.hidden[depth].float() - theirs).norm() / theirs.norm() < 2e-2

    @pytest.mark.parametrize("count", [31, 32, 33, 48, 64, 65])
    def test_all_rows_of_a_text_are_scored(runner, count):
        """A recording has a head of some rows; a text of more or fewer must have all of its own."""
        ids = [random.Random(count).randrange(1024) for _ in range(count)]
        got = runner.score(ids, 512)
        (work,) = spans([(0, count, False)])
        want = runner.decoder.forward(runner.batch([replace(work, ids=ids)]).to(DEVICE), runner.kv).logits
        assert got.shape == want.shape == (count, 1024)
        assert (got - want).norm() / want.norm() < 2e-2

    def test_a_launch_ahead_leaves_hidden_states(runner, tapped):
        work = spans([(63, 1, False)] * 5)
        tokens, entries = (np.array(values) for values in ([s.ids[0] for s in work], [s.first for s in work]))
        pages = [np.array(s.pages, dtype=np.int32) for s in work]
        want = tapped.graphs.run(tapped.batch(work)).hidden
        want = {depth: state.clone() for depth, state in want.items()}
        pending = tapped.launch(tokens, entries, pages)
        assert pending is not None and len(pending.read()) == 5
        assert all(torch.equal(tapped.graphs.states[depth][:5], want[depth]) for depth in DEPTHS)

    def test_a_straight_tree_is_the_same_bits_as_a_chain(runner):
        work = spans([(70, 6, False)])
        batch = runner.batch(work)
        chain = runner.graphs.run(batch).logits.clone()
        batch.tree_start, batch.bits = [71], [0, *((1 << node) - 1 for node in range(1, 6))]
        batch.kv_lens[:] = 71
        assert torch.equal(runner.graphs.run(batch).logits, chain)

    def test_wider_trees_and_more_rows_are_left_to_others(runner):
        assert runner.graphs.run(runner.batch(spans([(100, 66, True)]))) is None
        assert runner.graphs.run(runner.batch(spans([(100, 65, False)]))) is None

    def test_a_replay_repeats_itself(runner):
        batch = runner.batch(spans([(395, 5, False)]))
        first = runner.graphs.run(batch).logits.clone()
        for _ in range(20):
            assert torch.equal(runner.graphs.run(batch).logits, first)

    @pytest.mark.parametrize("sequences", [[(5, 1, False)], [(62, 4, False), (200, 1, False)], [(30, 1, False)] * 16])
    def test_a_chain_is_its_steps_one_by_one(runner, sequences):
        assert can_chain(runner.decoder, 16)
        work = spans(sequences)
        before = [(k.clone(), v.clone()) for k, v in runner.kv]
        got = ChainRunner(runner.decoder, runner.kv, 2048, 16).run(runner.batch(work), 5)
        after = [(k.clone(), v.clone()) for k, v in runner.kv]
        for now, then in zip(itertools.chain(*runner.kv), itertools.chain(*before), strict=True):
            now.copy_(then)
        step = work
        for depth in range(5):
            output = runner.forward([replace(span, logits_indices=[len(span.ids) - 1]) for span in step])
            tokens = output.greedy.tolist()
            assert tokens == [row[depth] for row in got.tokens]
            probs = output.logits.softmax(-1).amax(-1).tolist()
            assert probs == pytest.approx([row[depth] for row in got.probs], rel=1e-4)
            step = [Span([t], s.first + len(s.ids), s.pages, [0]) for t, s in zip(tokens, step, strict=True)]
        assert same_caches(runner.kv, after)

    def test_a_chain_without_room_writes_nothing_past_its_pages(runner):
        (work,) = spans([(30, 2, False)])
        work.pages = work.pages[:2]  # 32 entries: full
        kept = [(k.clone(), v.clone()) for k, v in runner.kv]
        chains = ChainRunner(runner.decoder, runner.kv, 2048, 16)
        first = chains.run(runner.batch([work]), 1)
        assert chains.run(runner.batch([work]), 4).tokens[0][:1] == first.tokens[0]
        slots = runner.batch([work]).slot_mapping
        for now, then in zip(itertools.chain(*runner.kv), itertools.chain(*kept), strict=True):
            then[slots] = now[slots]
        assert same_caches(runner.kv, kept)

    def test_a_chain_stops_where_no_path_is_likely_enough(runner):
        chains = ChainRunner(runner.decoder, runner.kv, 2048, 16)
        batch = runner.batch(spans([(40, 3, False), (100, 1, False)]))
        whole = chains.run(batch, 8)
        for steps in range(1, 8):
            paths = [math.prod(row[:steps]) for row in whole.probs]
            never = chains.run(batch, 8, [0.0] * (steps - 1) + [max(paths) * 1.01])
            assert never.tokens == [row[:steps] for row in whole.tokens]
            assert never.probs == [row[:steps] for row in whole.probs]
            assert chains.run(batch, 8, [0.0] * (steps - 1) + [max(paths) * 0.99]) == whole

    def test_chains_with_part_of_the_head_guess_only_from_it(runner):
        chains = ChainRunner(runner.decoder, runner.kv, 2048, 16, head_rows=64)
        got = chains.run(runner.batch(spans([(40, 3, False)] * 4)), 6)
        assert all(token < 64 for row in got.tokens for token in row)

    def test_chain_refusals(runner):
        chains = ChainRunner(runner.decoder, runner.kv, 2048, 16)
        with pytest.raises(ValueError, match="not 17"):
            chains.run(runner.batch(spans([(40, 3, False)])), 17)
        with pytest.raises(ValueError, match="17 rows"):
            chains.run(runner.batch(spans([(40, 17, False)])), 2)

    @pytest.mark.parametrize("count", [1, 5, 64, 150])
    def test_move_copies_all_layers(runner, count):
        source = sorted(random.Random(count).sample(range(300, 1000), count))
        target = list(range(300, 300 + count))  # some are sources too
        want = [(k.clone(), v.clone()) for k, v in runner.kv]
        for cache in itertools.chain(*want):
            cache[target] = cache[source]
        runner.graphs.move(source, target)
        assert same_caches(runner.kv, want)
