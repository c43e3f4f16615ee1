"""The target as its own draft: blocks left out, a search that finds which, and answers of plain decoding."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.core import SamplingParams, Speculation
from forerun.decode import layer_search
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.drafters.selfdraft import SelfDrafter
from forerun.decode.layer_search import BlockSelection, GreedyReplay, block_costs, find_blocks, search, speedup
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import BadRequest
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Span
from forerun.models.formats.checkpoint import open_checkpoint
from tests.engine.common import Answer, finish, leaked, run

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8] * 6, list(range(20, 90)), [9, 9, 9, 40, 41, 42, 9, 9, 9], [300, 301]]
MOST = (0, 1, 2, 3, 6, 7)  # of four layers: the third is left out


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    return tmp_path / "layers"


@pytest.fixture(scope="module")
def make(tiny_folder: Callable[[str], Path]) -> Callable[..., Engine]:
    def engine(
        blocks: tuple[int, ...] | None = MOST, family: str = "qwen2", weights: str = "float32", **config: Any
    ) -> Engine:
        """With costs that make every guess worth checking; `blocks`: drafted with, None: searched for."""
        checkpoint = open_checkpoint(tiny_folder(family))
        decoder, _ = build_decoder(checkpoint, CPU, weights, 512)
        values = {
            "max_model_len": 512,
            "kv_cache_tokens": 2048,
            "page_size": 8,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
        } | config
        costs = Controller(CostCurve({1: 1.0, 64: 1.001}), {"self": CostCurve({1: 1e-4, 64: 1.1e-4})})
        made = Engine(decoder, checkpoint.tokenizer(), EngineConfig(**values), None, costs)
        if blocks is not None:
            made.speculator.drafter_pool._drafters["self"] = SelfDrafter(made.speculator.ctx, blocks)
        return made

    return engine


def params(drafter: str = "self", **values: Any) -> SamplingParams:
    verify = values.pop("verify", "auto")
    return SamplingParams(
        **{"max_tokens": 30, "ignore_eos": True, **values}, speculation=Speculation(drafter, verify=verify)
    )


def every(engine: Engine) -> tuple[int, ...]:
    return tuple(range(2 * engine.decoder.config.num_layers))


# -- running some blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_all_blocks_are_the_model_and_none_is_its_embedding(family: str, make: Callable[..., Engine]):
    engine = make(None, family)
    span = Span(PROMPTS[1][:30], 0, array("i", range(4)), range(30))
    whole = engine.runner.forward([span]).logits
    assert torch.equal(engine.runner.forward([span], blocks=every(engine)).logits, whole)
    decoder = engine.decoder
    none = engine.runner.forward([span], blocks=()).logits
    assert torch.equal(none, decoder.logits(decoder.embed(torch.tensor(span.ids))))
    fewer = engine.runner.forward([span], blocks=every(engine)[:-1]).logits
    assert not torch.allclose(fewer, whole, atol=1e-3)


# -- in the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, {"temperature": 0.9, "seed": 3, "top_p": 0.95}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_answers_are_those_of_plain_decoding(weights: str, values: dict[str, Any], make: Callable[..., Engine]):
    plain = run(make(weights=weights), PROMPTS, params("off", **values))
    for name in ("self", "self+suffix")[: 1 if weights == "int8" else 2]:
        engine = make(weights=weights)
        assert run(engine, PROMPTS, params(name, **values)) == plain, name
        assert engine.speculator.totals.drafters["self"].drafted > 0 and leaked(engine) == 0
        assert run(engine, PROMPTS, params("off", **values)) == plain  # from pages that drafts had written to


def test_windows_and_post_norms(make: Callable[..., Engine]):
    blocks = tuple(b for b in range(14) if b not in (4, 5, 9))
    plain = run(make(blocks, "gemma3"), PROMPTS, params("off"))
    assert run(make(blocks, "gemma3"), PROMPTS, params()) == plain


def test_with_all_blocks_every_guess_is_right(make: Callable[..., Engine]):
    engine = make(tuple(range(8)))
    answers = [Answer(engine, prompt, params(max_tokens=100)) for prompt in PROMPTS]
    finish(engine)
    totals = engine.speculator.totals
    assert totals.accepted > 2 * totals.steps
    missed = [u.steps - sum(n > 0 for n in u.lengths) for a in answers if (u := a.last.usage)]
    assert max(missed) <= 2  # the likeliest child of every node is right: only steps without a draft give one token
    assert set(totals.drafters) == {"self"}


def test_preemption_and_pages(make: Callable[..., Engine]):
    plain = run(make(), PROMPTS * 2, params("off"))
    engine = make(kv_cache_tokens=240, max_num_batched_tokens=128)
    answers = [Answer(engine, prompt, params()) for prompt in PROMPTS * 2]
    finish(engine)
    assert [a.tokens() for a in answers] == plain
    assert sum(a.last.usage.preemptions for a in answers if a.last.usage) > 0
    assert leaked(engine) == 0


def test_verifiers_that_draw(make: Callable[..., Engine]):
    engine = make()
    answers = run(engine, PROMPTS, params(temperature=0.7, seed=1, verify="rejection"))
    assert [len(answer) for answer in answers] == [30] * 4 and engine.speculator.totals.accepted > 0


def test_it_can_start_while_requests_hold_every_page(make: Callable[..., Engine], cache: Path):
    """The search and the timing of a round must not need pages of the pool."""
    engine = make(None, kv_cache_tokens=160, max_num_batched_tokens=128)
    engine.speculator.controller.drafters.clear()
    plain = run(make(), PROMPTS * 2, params("off"))
    assert run(engine, PROMPTS * 2, params()) == plain
    assert list(cache.glob("*.json")) and leaked(engine) == 0


def test_without_a_tokenizer_there_is_no_search(make: Callable[..., Engine]):
    engine = make(None)
    engine.speculator.ctx.tokenizer = None
    with pytest.raises(BadRequest, match="tokenizer"):
        Answer(engine, PROMPTS[0], params())


# -- the search --------------------------------------------------------------------------------------------------------


def replay_of(engine: Engine) -> GreedyReplay:
    assert engine.tokenizer is not None
    return GreedyReplay(engine.runner, engine.tokenizer, 512)


@pytest.mark.parametrize(("family", "weights"), [("qwen2", "float32"), ("qwen2", "int8"), ("gemma3", "float32")])
def test_all_blocks_agree_with_the_model(family: str, weights: str, make: Callable[..., Engine]):
    engine = make(None, family, weights)
    rehearsal = replay_of(engine)
    assert rehearsal.agreement(every(engine)) > 0.97  # sums in another order may turn a near tie
    assert rehearsal.agreement(()) < 0.8
    assert engine.pool.free == engine.pool.num_pages


def test_agreement_in_a_replay_is_that_of_drafting(make: Callable[..., Engine]):
    """One forward over all positions, each with exact K/V before it, against token by token as drafts run."""
    engine = make(None)
    rehearsal, runner, blocks = replay_of(engine), engine.runner, MOST
    prompt = layer_search._prompts(engine.tokenizer, 512)[0]  # type: ignore[arg-type]
    answer = run(engine, [prompt], params("off", max_tokens=layer_search.ANSWER_TOKENS))[0]
    assert rehearsal._labels[: len(answer)].tolist() == answer
    tokens, pages, found = [*prompt, *answer], array("i", range(16)), []
    for place in range(len(prompt) - 1, len(tokens) - 1):
        runner.forward([Span(tokens[:place], 0, pages, ())])
        found.append(runner.forward([Span([tokens[place]], place, pages, [0])], blocks=blocks).logits)
    logits = rehearsal._scorer.forward(rehearsal._batch, rehearsal._kv, blocks=blocks).logits
    torch.testing.assert_close(logits[: len(answer)], torch.cat(found), atol=1e-3, rtol=1e-3)


def test_the_search_is_reproducible_and_keeps_what_it_finds(make: Callable[..., Engine], cache: Path):
    engine = make(None)
    found = search(replay_of(engine), engine.decoder)
    assert found == search(replay_of(engine), engine.decoder)
    assert found.blocks and len(found.blocks) < len(every(engine)) and 0.0 < found.agreement <= 1.0
    assert engine.tokenizer is not None
    assert find_blocks(engine.runner, engine.tokenizer, 512) == found
    assert len(list(cache.iterdir())) == 1


def test_a_kept_result_is_used_for_this_model_only(
    make: Callable[..., Engine], cache: Path, monkeypatch: pytest.MonkeyPatch
):
    searched: list[int] = []

    def found(*_: Any) -> BlockSelection:
        searched.append(1)
        return BlockSelection((0, 1), 0.5)

    monkeypatch.setattr(layer_search, "search", found)
    monkeypatch.setattr(layer_search, "GreedyReplay", lambda *_: None)

    def find(engine: Engine) -> BlockSelection:
        assert engine.tokenizer is not None
        return find_blocks(engine.runner, engine.tokenizer, 512)

    engine = make(None)
    assert find(engine) == find(make(None)) == BlockSelection((0, 1), 0.5) and len(searched) == 1
    find(make(None, weights="int8"))
    find(make(None, "llama"))
    assert len(searched) == 3
    kept = next(p for p in cache.glob("*.json") if p.stem == layer_search._checksum(engine.decoder))
    for damage in ("", "{", '{"blocks": [0, 99], "agreement": 0.5}', '{"blocks": [1, 0], "agreement": 0.5}', "[]"):
        kept.write_text(damage)
        assert find(engine) == BlockSelection((0, 1), 0.5)
    assert len(searched) == 8


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, make: Callable[..., Engine]):
    (tmp_path / "layers").write_text("in the way")
    layer_search._write(tmp_path / "layers" / "x.json", BlockSelection((0,), 0.5))
    assert (tmp_path / "layers").read_text() == "in the way"


def test_what_is_maximised():
    assert speedup(1.0, 0.0) > 5 > speedup(0.9, 0.5) > speedup(0.5, 0.5)
    assert speedup(0.0, 0.5) < 1.0 < speedup(0.8, 0.1)


def test_costs_are_shares(make: Callable[..., Engine]):
    costs = block_costs(make(None).decoder)
    assert len(costs) == 9 and sum(costs) == pytest.approx(1.0) and costs[0] < costs[1]
