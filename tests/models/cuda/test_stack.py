"""How models are cut for one launch anywhere; the launch itself, against the decoder's own forward, on Hopper only."""

from array import array
from dataclasses import replace

import pytest
import torch

from forerun.bench.shapes import SHAPES, RandomCheckpoint
from forerun.cache.pool import PagePool
from forerun.engine.runner import Runner, Span
from forerun.models.build import build_decoder
from forerun.models.cuda.stack import CHUNK, SHARED_BYTES, Cut

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("shape", ["1.5b", "8b"])
def test_cut_fits_the_chip_and_keeps_it_busy(shape):
    config = SHAPES[shape]
    cut = Cut.of(config, 132)
    assert cut.shared_bytes() <= SHARED_BYTES
    assert cut.stages >= 8  # fewer would not cover memory's latency
    chunks = -(-config.intermediate_size // CHUNK)
    busiest = -(-config.hidden_size // 16 * cut.down_split // 132) * -(-chunks // cut.down_split)
    assert busiest * 132 < 1.1 * chunks * config.hidden_size / 16


def test_cut_gives_every_slice_work():
    for inner in range(256, 16_385, 256):
        cut = Cut.of(replace(SHAPES["1.5b"], intermediate_size=inner), 132)
        chunks = inner // CHUNK
        assert -(-chunks // cut.down_split) * CHUNK <= 4096, inner


if HOPPER:
    DEVICE = torch.device("cuda")
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
        pool = PagePool(decoder.config, 16 * 40, 16, torch.bfloat16, DEVICE)
        for k, v in pool.kv:
            k.normal_()
            v.normal_()
        return Runner(decoder, pool, 2048)

    def spans(seqs: int, new: int, context: int) -> list[Span]:
        draw = torch.Generator().manual_seed(seqs * 1000 + new)
        pages = torch.randperm(seqs * -(-context // 16), generator=draw).int().view(seqs, -1)
        ids = torch.randint(1024, (seqs, new), generator=draw).tolist()
        return [Span(ids[s], context - new, array("i", pages[s].tolist()), range(new)) for s in range(seqs)]

    CASES = [(1, 1, 1), (1, 1, 300), (1, 3, 65), (1, 16, 600), (2, 1, 64), (5, 1, 200), (16, 1, 500)]

    @pytest.mark.parametrize("seqs, new, context", CASES)
    def test_equals_the_forward_and_each_row_alone(runner, seqs, new, context):
        work = spans(seqs, new, context)
        batch = runner.batch(work)
        kept = [(k.clone(), v.clone()) for k, v in runner.pool.kv]
        want = runner.decoder.forward(batch.to(DEVICE), kept).logits
        got = runner.graphs.run(batch)
        assert runner.graphs.stack is not None
        assert (got.logits - want).norm() / want.norm() < 2e-2
        assert torch.equal(got.greedy.to(DEVICE), got.logits.argmax(-1))
        for pair, other in zip(runner.pool.kv, kept, strict=True):
            for ours, theirs in zip(pair, other, strict=True):
                assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 1e-2
        together = got.logits.clone()
        first = Span(work[0].ids[:1], work[0].first, work[0].pages, range(1))
        assert torch.equal(runner.graphs.run(runner.batch([first])).logits[0], together[0])
        if seqs > 1:
            assert torch.equal(runner.graphs.run(runner.batch([work[-1]])).logits[0], together[-1])

    def test_a_replay_repeats_itself(runner):
        batch = runner.batch(spans(1, 5, 400))
        first = runner.graphs.run(batch).logits.clone()
        for _ in range(20):
            assert torch.equal(runner.graphs.run(batch).logits, first)
