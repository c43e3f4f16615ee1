"""The draft source with a draft that is the target: its K/V must be the target's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.core import SamplingParams
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.drafters.model import ModelDrafter
from forerun.decode.sampling import Context
from forerun.errors import BadProfile, BadRequest
from forerun.models.decoder import Output
from forerun.models.execution.runner import Span
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.prefill import maps
from forerun.prefill.calibration.dense import DenseModel
from forerun.prefill.plan import length_problem
from forerun.prefill.recompute import Rows
from forerun.prefill.sources.draft import WIDE_LAYERS, DraftSource
from tests import tiny
from tests.cpu_kinds import VNNI_ANSWERS, pretend
from tests.prefill.sources.common import (
    EMPTY,
    END,
    IDS,
    PAGE,
    PAGES,
    TAIL,
    apart,
    clear,
    exact_kv,
    make_draft_context,
    make_maps,
    make_profile,
    make_state,
    put_prefix,
    read_all,
    stored,
)
from tests.prefill.test_ragged_depth import Slow

Folder = Callable[[str], Path]
_made: dict[tuple[Path, str], DraftContext] = {}


def draft_context_of(folder: Path, weights: str = "float32") -> DraftContext:
    """One for all tests, emptied."""
    if (folder, weights) not in _made:
        _made[folder, weights] = make_draft_context(folder, weights)
    clear(_made[folder, weights].pool)
    return _made[folder, weights]


def never(*_: object) -> None:
    raise AssertionError("attention was not asked for")


def source_of(ctx: DraftContext, folder: Path, base: int = 1, whole: bool = True) -> DraftSource:
    """`whole`: the maps look at the draft's last output, so that all of its layers run; else all but the last do."""
    last = ctx.runner.decoder.config.num_layers + whole
    return DraftSource(ctx, make_profile("draft", make_maps(folder, base, tuple(range(base, last)))))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("first", "known", "chunk"), [(0, 0, 100), (0, 0, 7), (19, 0, 16), (0, 21, 9), (8, 24, 1)])
def test_right_maps_give_the_targets_own_kv(
    tiny_folder: Folder, family: str, first: int, known: int, chunk: int, whole: bool
):
    ctx = draft_context_of(tiny_folder(family))
    exact = exact_kv(ctx)
    put_prefix(ctx, first)
    state, need = make_state(first, known), max(first, known)
    read_all(source_of(ctx, tiny_folder(family), whole=whole), state, chunk)
    for i, ((k, v), (true_k, true_v)) in enumerate(zip(stored(ctx.runner), exact, strict=True)):
        for mine, true in ((k, true_k), (v, true_v)):
            assert torch.allclose(mine[:first], true[:first], atol=1e-5)
            assert (mine[first:need] == EMPTY).all(), "what is known was written again"
            assert torch.allclose(mine[need:END], true[need:END], atol=2e-4), f"layer {i}"
            assert (mine[END:] == EMPTY).all(), "the tail is the engine's"
    assert state.depths.tolist() == [4] * first + [0] * (need - first) + [1] * (END - need)
    assert state.read == END


def test_a_deeper_base_is_the_targets_work(tiny_folder: Folder):
    ctx = draft_context_of(tiny_folder("qwen2"))
    exact, state = exact_kv(ctx, END), make_state()
    read_all(source_of(ctx, tiny_folder("qwen2"), base=3), state, 20)
    for mine, true in zip(stored(ctx.runner, 0, END), exact, strict=True):
        assert all(torch.allclose(a, b, atol=2e-4) for a, b in zip(mine, true, strict=True))
    assert state.depths.tolist() == [3] * END


@pytest.mark.parametrize("chunk", [100, 7])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_long_prompts_are_read_with_a_window(tiny_folder: Folder, family: str, chunk: int):
    ctx = draft_context_of(tiny_folder(family))
    plain = DenseModel.from_checkpoint(open_checkpoint(tiny_folder(family)), torch.device("cpu"), torch.float32)
    narrow = DenseModel(plain.config.narrowed(16, WIDE_LAYERS), plain.weights)
    assert (
        narrow.config.windows == (None, None, 16, 16) and plain.config.narrowed(16, 2).narrowed(9, 0) == narrow.config
    )
    source = source_of(ctx, tiny_folder(family), whole=False)
    for window, model in ((16, narrow), (len(IDS), plain), (0, plain)):
        clear(ctx.pool)
        source.narrow(window)
        read_all(source, make_state(), chunk)
        for (_, mine), (_, true) in zip(stored(ctx.runner), model.trace(torch.tensor([IDS])).kv, strict=True):
            assert torch.allclose(mine[:END].flatten(1), true[0, :END], atol=2e-4)
    values = [model.trace(torch.tensor([IDS])).kv[3][1] for model in (plain, narrow)]
    assert not torch.allclose(*values, atol=1e-2)  # the window makes a difference


@pytest.mark.parametrize("vnni", VNNI_ANSWERS)
def test_a_rotated_stream_is_mapped_too(vnni: bool, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """Eight-bit decoders keep their hidden states rotated; the maps are turned with them."""
    pretend(monkeypatch, vnni)
    ctx = draft_context_of(tiny_folder("qwen2"), "int8")
    assert ctx.runner.decoder.basis is not None
    exact = exact_kv(ctx, END)
    read_all(source_of(ctx, tiny_folder("qwen2")), make_state(), 20)
    for i, (mine, true) in enumerate(zip(stored(ctx.runner, 0, END), exact, strict=True)):
        assert all(apart(a, b) < (0.03 if i else 1e-6) for a, b in zip(mine, true, strict=True)), f"layer {i}"


# -- the draft's own plane ---------------------------------------------------------------------------------------------


def test_the_drafts_reading_is_there_for_drafters(tiny_folder: Folder):
    ctx = draft_context_of(tiny_folder("llama"))
    exact = exact_kv(ctx)
    assert ctx.draft_runner is not None and ctx.draft_kv is not None
    read_all(source_of(ctx, tiny_folder("llama")), make_state(chooser="draft"), 13)
    for mine, true in zip(stored(ctx.draft_runner), exact, strict=True):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(mine, true, strict=True))
    whole = len(IDS) // PAGE
    assert ctx.draft_kv.filled[list(PAGES)].tolist() == [PAGE] * whole + [0] * (len(PAGES) - whole)
    assert ctx.draft_kv.full_pages(PAGES, PAGE) == whole


@pytest.mark.parametrize(("chooser", "left"), [("draft", 2), ("tail", TAIL)])
def test_a_drafter_goes_on_where_the_reading_stopped(
    chooser: str, left: int, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
):
    """The maps look at lower layers only: the rest runs when an answer is drafted, and nothing runs twice. Where the
    draft's own tail chooses nothing it is not read before."""
    ctx = draft_context_of(tiny_folder("llama"))
    exact, runner = exact_kv(ctx), ctx.draft_runner
    assert runner is not None and ctx.draft_kv is not None
    source, state = source_of(ctx, tiny_folder("llama"), whole=False), make_state(chooser=chooser)
    read_all(source, state, 13)
    source.finish(state)
    half, end = stored(runner), state.read_end
    for mine, true in (pair for i in range(3) for pair in zip(half[i], exact[i], strict=True)):
        assert torch.allclose(mine[:end], true[:end], atol=1e-4) and (mine[end:] == EMPTY).all()
    assert (half[3][0] == EMPTY).all(), "the last layer was not needed"
    assert not ctx.draft_kv.filled[list(PAGES)].any()

    ran: list[int] = []
    forward = runner.forward

    def counted(spans: list[Span], *rest: Any) -> Output:
        ran.append(len(spans[0].ids))
        return forward(spans, *rest)

    monkeypatch.setattr(runner, "forward", counted)
    drafter, tokens = ModelDrafter(ctx), [*IDS, 5]
    request = DraftRequest(state.id, Context(SamplingParams(), tokens, len(IDS), 0), 2, 2, PAGES)
    for _ in range(2):  # what was not read at all is another step
        drafter.propose([request])
    for mine, true in zip(stored(runner), exact, strict=True):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(mine, true, strict=True))
    assert ran and max(ran) <= left, "the prompt was read again"
    ctx.draft_kv.drop_partial(state.id)
    ctx.draft_states.clear()


@pytest.mark.parametrize(("lower", "start"), [(3, 24), (0, 0)])
def test_lower_layers_need_not_be_read_again(tiny_folder: Folder, lower: int, start: int):
    ctx = draft_context_of(tiny_folder("llama"))
    assert ctx.draft_kv is not None
    ctx.draft_kv.lower[list(PAGES)[:lower]] = PAGE
    for whole in (False, True):
        state = make_state(24)
        source_of(ctx, tiny_folder("llama"), whole=whole).open(state)
        assert state.read == (0 if whole else start)


@pytest.mark.parametrize(
    ("filled", "first", "known", "start"),
    [(0, 0, 0, 0), (3, 0, 0, 0), (3, 24, 0, 24), (3, 30, 0, 24), (3, 0, 16, 16), (7, 40, 0, 40), (7, 0, END, END)],
)
def test_reading_starts_at_what_is_missing(tiny_folder: Folder, filled: int, first: int, known: int, start: int):
    ctx = draft_context_of(tiny_folder("llama"))
    assert ctx.draft_kv is not None
    ctx.draft_kv.filled[list(PAGES)[:filled]] = PAGE
    state = make_state(first, known)
    source_of(ctx, tiny_folder("llama")).open(state)
    assert state.read == start


def test_a_filled_plane_need_not_be_read_again(tiny_folder: Folder):
    """A second prompt with the same start: the draft goes on from its K/V, and the result is the same."""
    ctx = draft_context_of(tiny_folder("qwen2"))
    exact, source = exact_kv(ctx, END), source_of(ctx, tiny_folder("qwen2"))
    before = make_state(chooser="draft")
    read_all(source, before, 100)
    for cache in (cache for layer in ctx.pool.kv for cache in layer):
        cache.fill_(EMPTY)
    put_prefix(ctx, 32)
    state = make_state(32, chooser="draft")
    state.source = source
    source.open(state)
    assert state.read == 32
    while state.read < len(IDS):
        source.read(state, 6)
    for mine, true in zip(stored(ctx.runner, 0, END), exact, strict=True):
        assert all(torch.allclose(a, b, atol=2e-4) for a, b in zip(mine, true, strict=True))
    assert np.allclose(state.tail_attention.reduce(), before.tail_attention.reduce(), atol=1e-5)


# -- what the tail looks at --------------------------------------------------------------------------------------------


def slow_attention(folder: Path, layers: int | None = None) -> np.ndarray:
    """[TAIL, tokens]: softmax of every layer and head, one query after the other, averaged."""
    checkpoint = open_checkpoint(folder)
    c, n = checkpoint.config, len(IDS)
    layers = c.num_layers if layers is None else layers
    slow = Slow(checkpoint, [(torch.zeros(n, c.num_kv_heads, c.head_dim),) * 2 for _ in range(c.num_layers)])
    slow.kv = [(k.clone(), v.clone()) for k, v in slow.kv]
    states = slow.run(Rows(np.array(IDS), np.arange(n), PAGES, np.full(n, c.num_layers)))
    found = np.zeros((TAIL, n))
    for i in range(layers):
        for row, entry in enumerate(range(END, n)):
            window = c.windows[i]
            lo = 0 if window is None else max(0, entry + 1 - window)
            for h, q in enumerate(slow.heads(states[entry][i], i, "q", entry)):
                keys = slow.kv[i][0][lo : entry + 1, h // (c.num_heads // c.num_kv_heads)]
                found[row, lo : entry + 1] += torch.softmax(keys @ q * c.scale, 0).numpy() / c.num_heads / layers
    return found


@pytest.mark.parametrize("chunk", [100, 7])
def test_scores_are_the_tails_attention(tiny_folder: Folder, chunk: int):
    folder = tiny_folder("mistral")
    ctx, state = draft_context_of(folder), make_state(chooser="draft")
    state.source = source = source_of(ctx, folder)
    source.open(state)
    assert source.scores(state) is None
    while state.read < len(IDS):
        source.read(state, chunk)
    expected, tail_attention = slow_attention(folder), state.tail_attention
    assert np.allclose(tail_attention.weights().numpy(), expected, atol=1e-5)
    assert np.allclose(tail_attention.weights().sum(1), 1.0, atol=1e-5)
    scores = source.scores(state)
    assert scores is not None and np.allclose(scores, expected.mean(0), atol=1e-5)
    source.finish(state)
    assert source.scores(state) is None


def test_attention_is_summed_up_only_for_the_chooser_that_asks(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    folder = tiny_folder("llama")
    ctx = draft_context_of(folder)
    source = source_of(ctx, folder)
    monkeypatch.setattr(maps, "TailAttention", never)
    for chooser in ("tail", "cross", "start", "random"):
        state = make_state(chooser=chooser)
        read_all(source, state, 20)
        assert state.read == END and state.tail_attention is None and source.scores(state) is None
        source.finish(state)
        clear(ctx.pool)
    with pytest.raises(AssertionError, match="was not asked for"):
        source.open(make_state(chooser="draft"))


# -- what cannot be drafted --------------------------------------------------------------------------------------------


def test_a_draft_that_reads_less_than_the_prompt_says_so(tiny_folder: Folder, tmp_path: Path):
    little = tiny.write_folder(tmp_path / "little", "llama", max_position_embeddings=32)
    folder = tiny_folder("llama")
    source = source_of(make_draft_context(folder, draft=little), folder)
    assert source.max_tokens == 32
    assert length_problem(source, 32) is None
    problem = length_problem(source, 33)
    assert isinstance(problem, BadRequest) and "33" in str(problem) and "32" in str(problem)
    assert "allow_exact" in problem.hint and "source=self" not in problem.hint  # which this profile does not have


def test_other_tokens_or_no_draft_are_refused(tiny_folder: Folder):
    folder = tiny_folder("llama")
    ctx = make_draft_context(folder, same_tokens=False)
    with pytest.raises(BadRequest, match="those of little are others"):
        source_of(ctx, folder)
    ctx.draft = None
    with pytest.raises(BadRequest, match="needs a draft model"):
        source_of(ctx, folder)


@pytest.mark.parametrize(
    ("base", "taps", "message"), [(1, (1, 5), "from 0 to 4"), (4, (1,), "has 4"), (1, (), "reads layers")]
)
def test_maps_that_do_not_fit_are_refused(tiny_folder: Folder, base: int, taps: tuple[int, ...], message: str):
    ctx, maps = draft_context_of(tiny_folder("llama")), make_maps(tiny_folder("llama"), 1, (1, 2))
    maps.base, maps.taps = base, taps
    with pytest.raises(BadProfile, match=message):
        DraftSource(ctx, make_profile("draft", maps))


def test_maps_of_other_widths_are_refused(tiny_folder: Folder):
    ctx, maps = draft_context_of(tiny_folder("llama")), make_maps(tiny_folder("llama"), 1, (1, 2))
    maps.up = maps.up[:-1]
    with pytest.raises(BadProfile, match="these models need 128 to 192"):
        DraftSource(ctx, make_profile("draft", maps))


def test_the_cost_counts_draft_and_maps(tiny_folder: Folder):
    ctx, folder = draft_context_of(tiny_folder("llama")), tiny_folder("llama")
    maps = make_maps(folder, 1, (1, 2, 3))
    per_layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128
    expected = 100 * (0.3 + maps.macs / (4 * per_layer))
    assert DraftSource(ctx, make_profile("draft", maps, 0.3)).cost(100) == pytest.approx(expected)
