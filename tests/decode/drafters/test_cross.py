"""A draft model with another tokenizer: text there and back, drafts on free pages only, answers of plain decoding."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.core import Draft, SamplingParams, Speculation, Verdict
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.draft_context import DraftModel
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.drafters.cross import CrossDrafter, _CrossDraft, _State
from forerun.decode.drafters.retoken import Transcript
from forerun.decode.sampling import Context
from forerun.decode.speculator import SpeculationState
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import BadRequest
from forerun.models.build import build_decoder
from forerun.models.decoder import Output
from forerun.models.execution.runner import Span
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.text.tokenizer import Tokenizer
from tests import tiny
from tests.decode.drafters.common import STORY, other_tokenizer, train
from tests.engine.common import Answer, finish, leaked, run

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8] * 6, list(range(20, 90)), [9, 9, 9, 40, 41, 42, 9, 9, 9], [300, 301]]


@pytest.fixture(scope="module")
def target(tiny_folder: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder("qwen2"))


@pytest.fixture(scope="module")
def other() -> Tokenizer:
    return other_tokenizer()


def generous() -> Controller:
    """Costs that make every guess worth checking."""
    return Controller(CostCurve({1: 1.0, 64: 1.001}), {"cross": CostCurve({1: 1e-4, 64: 1.1e-4})})


def engine_of(target: Path, draft: Path, weights: str = "float32", **config: Any) -> Engine:
    opened, drafting = open_checkpoint(target), open_checkpoint(draft)
    decoder, _ = build_decoder(opened, CPU, weights, 512)
    drafter, _ = build_decoder(drafting, CPU, weights, 512)
    tokenizer, theirs = opened.tokenizer(), drafting.tokenizer()
    model = DraftModel(drafter, theirs, tokenizer.same_tokens(theirs), "draft")
    values = {
        "max_model_len": 512,
        "kv_cache_tokens": 2048,
        "page_size": 8,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    } | config
    return Engine(decoder, tokenizer, EngineConfig(**values), model, generous())


def params(drafter: str, **values: Any) -> SamplingParams:
    verify = values.pop("verify", "auto")
    return SamplingParams(
        **{"max_tokens": 30, "ignore_eos": True, **values}, speculation=Speculation(drafter, verify=verify)
    )


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, other: Tokenizer) -> Path:
    """Another model with another tokenizer."""
    folder = tiny.write_folder(tmp_path_factory.mktemp("stranger"), "llama", seed=9, num_hidden_layers=2)
    other.backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def spellers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that only ever says printable ASCII, byte by byte, and the same model with its vocabulary shuffled."""
    folder, twin = (tmp_path_factory.mktemp(name) for name in ("speller", "twin"))
    backend = train("", 258)
    plain = [i for i in range(258) if (name := backend.id_to_token(i)) and len(name) == 1 and " " < name < "\x7f"]
    draw = torch.Generator().manual_seed(1)
    order = torch.randperm(258, generator=draw).tolist()  # id here -> id there
    for place in (folder, twin):
        tiny.write_folder(place, "qwen2", vocab_size=258, bos_token_id=None, pad_token_id=None, eos_token_id=0)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    for i in set(range(258)) - set(plain):  # never the likeliest: half of what some other one gets
        head[i] = 0.5 * head[plain[i % len(plain)]]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    back = torch.tensor(order).argsort()
    shuffled = {k: v[back].contiguous() if v.shape[0] == 258 else v for k, v in weights.items()}
    save_file(shuffled, twin / "model.safetensors", {"format": "pt"})
    stored = json.loads(backend.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    stored["model"]["vocab"] = {name: order[i] for name, i in stored["model"]["vocab"].items()}
    for added in stored["added_tokens"]:
        added["id"] = order[added["id"]]
    (twin / "tokenizer.json").write_text(json.dumps(stored))
    return folder, twin


@pytest.mark.parametrize("values", [{}, {"temperature": 0.9, "seed": 3, "top_p": 0.95}, {"repetition_penalty": 1.3}])
def test_answers_are_those_of_plain_decoding(
    values: dict[str, Any], tiny_folder: Callable[[str], Path], stranger: Path
):
    plain = run(engine_of(tiny_folder("qwen2"), stranger), PROMPTS, params("off", **values))
    engine = engine_of(tiny_folder("qwen2"), stranger)
    assert run(engine, PROMPTS, params("cross", **values)) == plain  # together
    assert engine.speculator.totals.drafted > 0 and leaked(engine) == 0
    assert [run(engine, [prompt], params("auto", **values))[0] for prompt in PROMPTS] == plain  # one by one
    assert leaked(engine) == 0


@pytest.mark.parametrize("choices", [1, 3])
def test_the_same_model_under_other_ids_is_nearly_always_right(
    choices: int, spellers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forerun.decode.drafters.cross.TOP_TOKENS", choices)
    prompts = [list(range(40 + i, 70 + i)) for i in range(0, 16, 4)]
    plain = run(engine_of(*spellers), prompts, params("off", max_tokens=100))
    engine = engine_of(*spellers)
    assert run(engine, prompts, params("cross", max_tokens=100)) == plain
    totals = engine.speculator.totals
    assert totals.accepted > 2 * totals.steps and leaked(engine) == 0
    if choices == 1:
        assert totals.accepted > 0.95 * totals.drafted


def test_side_branches_hold_what_the_likeliest_token_misses(spellers: tuple[Path, Path]):
    """With sampling the second and third likeliest often come; each is one more token of the same tree."""
    engine = engine_of(*spellers)
    prompts = [list(range(40 + i, 70 + i)) for i in range(0, 16, 4)]
    seeded = params("cross", temperature=0.7, seed=4)
    drafts: list[Draft] = []
    original = engine.speculator.record_outcome

    def settle(spec_state: SpeculationState, draft: Draft, verdict: Verdict, emitted: list[int]) -> None:
        drafts.append(draft)
        original(spec_state, draft, verdict, emitted)

    engine.speculator.record_outcome = settle  # type: ignore[method-assign]
    assert run(engine, prompts, seeded) == run(engine_of(*spellers), prompts, params("off", temperature=0.7, seed=4))
    assert any(draft.parents != list(range(-1, len(draft) - 1)) for draft in drafts)
    assert all(draft.problem(258) is None for draft in drafts)


def test_the_end_of_an_answer_is_drafted_too(spellers: tuple[Path, Path]):
    engine = engine_of(*spellers)
    drafter = engine.speculator.drafter_pool["cross"]
    assert isinstance(drafter, CrossDrafter)
    context = Context(SamplingParams(), list(range(40, 60)), 20, 0)
    chain = _CrossDraft(
        DraftRequest(0, context, 4, 8, array("i")), _State(0, Transcript(drafter._target, drafter._draft)), 4
    )
    chain.state.transcript.follow(context.tokens)
    word, end = drafter._draft.encode("ab"), drafter._draft.encode("<|im_end|>", parse_special=True)[0]
    drafter._extend(chain, word[0], 0.5)
    drafter._extend(chain, word[1], 0.25)
    drafter._extend(chain, end, 0.9)
    chain.others = [(0, word[1], 0.3), (2, end, 0.9), (1, end, 0.1)]
    draft = drafter._finished(chain)
    a, b = drafter._target.encode("ab")
    stop = drafter._target.encode("<|im_end|>", parse_special=True)[0]
    assert chain.ended and draft.tokens == [a, b, b, stop, stop] and draft.parents == [-1, 0, -1, 1, 0]
    assert draft.probs == pytest.approx([0.5, 0.25, 0.3, 0.9, 0.1])


def test_drafts_that_came_true_are_not_run_again(spellers: tuple[Path, Path]):
    engine = engine_of(*spellers)
    drafter = engine.speculator.drafter_pool["cross"]
    assert isinstance(drafter, CrossDrafter)
    ran: list[int] = []
    original = drafter._runner.forward

    def forward(spans: list[Span]) -> Output:
        ran.append(sum(len(span.ids) for span in spans))
        return original(spans)

    drafter._runner.forward = forward  # type: ignore[assignment,method-assign]
    run(engine, [list(range(10, 70))], params("cross", max_tokens=60))
    assert max(ran) == 61 and sum(ran) < 61 + 90, ran  # the prompt once, and little more than the answer
    assert drafter._states == {}


def test_a_long_prompt_is_read_in_parts(spellers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forerun.decode.drafters.cross.MAX_CATCH_UP_TOKENS", 50)
    prompt = [40 + i % 50 for i in range(180)]
    plain = run(engine_of(*spellers), [prompt], params("off"))
    engine = engine_of(*spellers)
    with all_drafts_verified(engine):  # the made costs of `generous` and measured seconds do not compare
        assert run(engine, [prompt], params("cross")) == plain
    assert engine.speculator.totals.accepted > 10


@pytest.mark.parametrize("values", [{}, {"temperature": 0.8, "seed": 5}])
def test_drafts_evict_nothing(values: dict[str, Any], tiny_folder: Callable[[str], Path], stranger: Path):
    def figures(drafter: str) -> tuple[list[list[int]], list[int], int]:
        engine = engine_of(tiny_folder("qwen2"), stranger, kv_cache_tokens=240, max_num_batched_tokens=128)
        answers = [Answer(engine, prompt, params(drafter, **values)) for prompt in PROMPTS * 2]
        finish(engine)
        usages = [a.last.usage for a in answers if a.last.usage]
        return [a.tokens() for a in answers], [u.preemptions for u in usages], leaked(engine)

    plain, preempted, _ = figures("off")
    tokens, also, left = figures("cross")
    assert tokens == plain and left == 0
    assert sum(also) <= sum(preempted) + 2 and sum(preempted) > 0  # drafts shift who is where, they hold no page


@pytest.mark.parametrize("text", ["🌊🌊 naïve 漢字 👩‍🚀", STORY])
def test_text_beyond_ascii(text: str, tiny_folder: Callable[[str], Path], stranger: Path, target: Tokenizer):
    tokens = target.encode(text)
    prompts = [tokens[:cut] for cut in range(len(tokens) - 4, len(tokens) + 1)]  # some end inside a character
    plain = run(engine_of(tiny_folder("qwen2"), stranger), prompts, params("off"))
    assert run(engine_of(tiny_folder("qwen2"), stranger), prompts, params("cross")) == plain


def test_verifiers_that_draw_take_its_drafts(tiny_folder: Callable[[str], Path], stranger: Path):
    engine = engine_of(tiny_folder("qwen2"), stranger)
    answers = run(engine, PROMPTS, params("cross", temperature=0.7, seed=1, verify="rejection"))
    assert [len(answer) for answer in answers] == [30] * 4 and engine.speculator.totals.drafted > 0


def test_where_it_does_not_apply(tiny_folder: Callable[[str], Path], stranger: Path):
    same = engine_of(tiny_folder("qwen2"), tiny_folder("qwen2"))
    with pytest.raises(BadRequest, match="target's own") as error:
        Answer(same, PROMPTS[0], params("cross"))
    assert "model" in (error.value.hint or "")
    engine = engine_of(tiny_folder("qwen2"), stranger)
    with pytest.raises(BadRequest, match="target's tokens"):  # ids of two vocabularies are never taken for each other
        Answer(engine, PROMPTS[0], params("model"))
    engine.speculator.ctx.draft = None
    with pytest.raises(BadRequest, match="needs a draft model"):
        Answer(engine, PROMPTS[0], params("cross"))
