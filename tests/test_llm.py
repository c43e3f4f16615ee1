"""The public face, on a tiny model: every way to ask gives the same answer, and leaving early is clean."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest, ForerunError, OutOfPages
from forerun.inputs import weights_mode
from forerun.params import SamplingOptions
from forerun.sharing import score_continuations

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = ["The lamp turns", "A keeper counts the ships", "def turn(lamp):", "twelve times"]
MESSAGES = [{"role": "user", "content": "Who counts the ships?"}]


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True) as made:
        yield made


def test_generate_keeps_order_and_repeats_itself(llm: LLM):
    together = llm.generate(PROMPTS, PARAMS)  # type: ignore[arg-type]
    alone = [llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert all(c.text == llm.tokenizer.decode(c.token_ids) for c in together)
    assert all(c.finish_reason == "length" and c.usage.completion_tokens == 16 for c in together)


def test_streaming_gives_the_same_text_in_pieces(llm: LLM):
    events = list(llm.stream(PROMPTS[0], replace(PARAMS, speculation="off")))  # one token at a time
    assert "".join(e.text for e in events) == llm.generate(PROMPTS[0], PARAMS)[0].text
    assert [e.finish_reason for e in events] == [None] * 15 + ["length"]
    assert events[-1].usage is not None and events[0].usage is None


def test_messages_go_through_the_chat_template(llm: LLM):
    completion = llm.chat(MESSAGES, PARAMS)[0]
    text = "<|im_start|>user\nWho counts the ships?<|im_end|>\n<|im_start|>assistant\n"
    assert completion.prompt_ids == llm.tokenizer.encode(text, parse_special=True)
    assert [c.text for c in llm.chat([MESSAGES, MESSAGES], PARAMS)] == [completion.text] * 2
    assert "".join(e.text for e in llm.stream(MESSAGES, PARAMS)) == completion.text


def test_async_answers_equal_sync_ones(llm: LLM):
    async def ask() -> list[str]:
        many = asyncio.gather(*(llm.agenerate(prompt, PARAMS) for prompt in PROMPTS))
        chat = llm.achat(MESSAGES, PARAMS)
        streamed = "".join([event.text async for event in llm.astream(PROMPTS[1], PARAMS)])
        together = [c.text for c in await llm.agenerate(PROMPTS, PARAMS)]
        alone = [c.text for (c,) in await many]
        assert together == alone
        return [*alone, (await chat)[0].text, streamed]

    expected = [c.text for c in llm.generate(PROMPTS, PARAMS)]  # type: ignore[arg-type]
    assert asyncio.run(ask()) == [*expected, llm.chat(MESSAGES, PARAMS)[0].text, expected[1]]


def test_several_threads_may_ask_at_once(llm: LLM):
    expected = [llm.generate(prompt, PARAMS)[0].text for prompt in PROMPTS]
    got: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i, p=p: got.__setitem__(i, llm.generate(p, PARAMS)[0].text))  # type: ignore[misc]
        for i, p in enumerate(PROMPTS * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [got[i] for i in range(12)] == expected * 3


def test_leaving_a_stream_early_frees_its_pages(llm: LLM):
    llm.clear_cache()
    for event in llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)):
        if event.token_ids:
            break
    assert llm.engine.idle
    llm.clear_cache()
    assert llm.engine.pool.used == 0


def test_an_interrupted_batch_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    original, calls = llm.engine.step, iter(range(100))

    def step() -> bool:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return original()

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)  # type: ignore[arg-type]
    assert llm.engine.idle


def test_one_bad_prompt_stops_its_call_and_no_other(llm: LLM):
    with pytest.raises(BadRequest, match="empty"):
        llm.generate(["fine", ""], PARAMS)
    with pytest.raises(BadRequest, match="99999"):
        llm.generate([5, 99999], PARAMS)
    assert llm.engine.idle and llm.generate("fine", PARAMS)[0].text


def test_n_answers_come_as_choices(llm: LLM):
    params = SamplingParams(max_tokens=8, temperature=1.2, seed=4, n=3, ignore_eos=True)
    completion = llm.generate(PROMPTS[0], params)[0]
    assert len({tuple(c.token_ids) for c in completion.choices}) == 3
    assert completion.usage.completion_tokens == 24


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"device": "tpu"}, "tpu"),
        ({"max_model_len": 10**9}, "max_model_len is 1000000000"),
        ({"kv_cache_tokens": 3}, "kv_cache_tokens is 3"),
        ({"threads": -1}, "threads is -1"),
        ({"threads": "2"}, "threads is '2'"),
        ({"batch_invariant": "no"}, "batch_invariant is 'no'"),
        ({"batch_invariant": 0}, "batch_invariant is 0"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": "x"}, "max_model_len is 'x'"),
    ],
)
def test_bad_settings_are_named(tiny_folder: Callable[[str], Path], values: dict, says: str):
    with pytest.raises(BadRequest, match=says):
        LLM(str(tiny_folder("qwen3")), quiet=True, **values)


@pytest.mark.parametrize(
    "prompt", [None, b"abc", 1.5, [1.5], [[1.5]], [True], [None], {"role": "user"}, [b"x"], "", [""]]
)
def test_prompts_of_the_wrong_kind_are_refused(llm: LLM, prompt: Any):
    with pytest.raises(BadRequest):
        llm.generate(prompt, PARAMS)
    with pytest.raises(BadRequest):
        next(llm.stream(prompt, PARAMS))


@pytest.mark.parametrize("messages", [None, "hi", ["hi"], [], [[]], {"role": "user"}, [{"content": "x"}], [None]])
def test_conversations_of_the_wrong_kind_are_refused(llm: LLM, messages: Any):
    with pytest.raises(BadRequest):
        llm.chat(messages, PARAMS)


def test_parameters_and_models_of_the_wrong_kind_are_refused(llm: LLM):
    with pytest.raises(BadRequest, match="SamplingParams"):
        llm.generate("hi", {"max_tokens": 1})  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="NoneType"):
        LLM(None)  # type: ignore[arg-type]


def test_a_closed_model_says_so(tiny_folder: Callable[[str], Path]):
    closed = LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True)

    async def close_while_running() -> str | None:
        task = asyncio.create_task(closed.agenerate("fog", SamplingParams(max_tokens=900, ignore_eos=True)))
        await asyncio.sleep(0.05)
        closed.close()
        return (await asyncio.wait_for(task, 10))[0].finish_reason

    assert asyncio.run(close_while_running()) == "cancelled"
    with pytest.raises(ForerunError, match="closed"):
        closed.generate("fog", PARAMS)
    with pytest.raises(ForerunError, match="closed"):
        next(closed.stream("fog", PARAMS))
    with pytest.raises(ForerunError, match="closed"):
        asyncio.run(asyncio.wait_for(closed.agenerate("fog", PARAMS), 10))
    assert closed.engine.idle


def test_an_error_in_the_background_reaches_those_who_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def fail(work: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "forward", fail)
        with pytest.raises(RuntimeError, match="boom"):
            asyncio.run(asyncio.wait_for(llm.agenerate("fog", PARAMS), 10))
        with pytest.raises(RuntimeError, match="boom"):
            llm.generate("fog", PARAMS)
    assert llm.engine.idle
    assert asyncio.run(llm.agenerate("fog", PARAMS))[0].text == llm.generate("fog", PARAMS)[0].text


def test_a_pool_larger_than_memory_is_refused(tiny_folder: Callable[[str], Path]):
    with pytest.raises(OutOfPages, match="kv_cache_tokens is 1000000000000"):
        LLM(str(tiny_folder("qwen3")), quiet=True, threads=1, kv_cache_tokens=10**12)


BRANCHES = SamplingParams(max_tokens=6, temperature=1.2, seed=4, n=4, ignore_eos=True, speculation="off", logprobs=1)


def test_branches_may_attend_together_where_bits_may_differ(tiny_folder: Callable[[str], Path]):
    """int8 keeps its bits unless told otherwise; then answers are the same to rounding, and attention is shared."""
    said, groups = [], []
    for options in ({}, {"batch_invariant": False}, {"batch_invariant": False, "enable_prefix_caching": False}):
        with LLM(str(tiny_folder("qwen3")), dtype="int8", threads=1, quiet=True, **options) as made:
            attention: Any = made.decoder.attention
            shapes = _watch(attention)
            said.append(made.generate([5 + i % 300 for i in range(400)], BRANCHES)[0].choices)
            groups.append(4 in shapes)
    assert groups == [False, True, False]  # branches without a shared cache have pages of their own
    for others in said[1:]:
        for mine, theirs in zip(said[0], others, strict=True):
            ours, other = mine.logprobs[0].logprob, theirs.logprobs[0].logprob
            assert mine.token_ids[0] == theirs.token_ids[0] and other == pytest.approx(ours, abs=0.05)


def _watch(attention: Any) -> list[int]:
    """After each plan: how many tokens of the batch attend in groups."""
    seen, plan = [0], attention.plan

    def watched(batch: Any) -> None:
        plan(batch)
        seen.append(sum(len(group.tokens) for group in attention._groups))

    attention.plan = watched
    return seen


@pytest.mark.parametrize(("weights", "strict"), [("int8", True), ("float32", False)])
def test_the_promise_of_bits_is_about_int8(tiny_folder: Callable[[str], Path], weights: str, strict: bool):
    found = []
    for wanted in (True, False):
        with LLM(str(tiny_folder("qwen3")), dtype=weights, threads=1, quiet=True, batch_invariant=wanted) as made:
            found.append(made.decoder.attention.same_bits)  # type: ignore[attr-defined]
    assert found == [strict, False]


def test_a_model_with_one_other_neuron_reads_no_kv_of_the_first(tiny_folder: Callable[[str], Path], tmp_path: Path):
    """An edit between the rows that a sampled fingerprint reads."""
    edited = Path(shutil.copytree(tiny_folder("qwen3"), tmp_path / "edited"))
    tensors = load_file(edited / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][37] += 1.0
    save_file(tensors, edited / "model.safetensors", metadata={"format": "pt"})

    def from_disk(model: Path) -> int:
        with LLM(str(model), threads=1, quiet=True, disk=tmp_path / "kv") as made:
            return made.generate([7] * 100, PARAMS)[0].usage.served["disk"]

    assert from_disk(tiny_folder("qwen3")) == 0 and from_disk(tiny_folder("qwen3")) > 90
    assert from_disk(edited) == 0 and from_disk(edited) > 90


def test_bits_that_depend_on_a_batch_are_not_read_from_disk(tiny_folder: Callable[[str], Path], tmp_path: Path):
    def served(**options: Any) -> int:
        with LLM(str(tiny_folder("qwen3")), threads=1, quiet=True, disk=tmp_path, **options) as made:
            return made.generate([7] * 100, PARAMS)[0].usage.served["disk"]

    assert served(dtype="int8", batch_invariant=False) == 0
    assert served(dtype="int8") == 0  # was promised the bits of a token alone
    assert served(dtype="int8") == served(dtype="int8", batch_invariant=False) == 96
    assert served(dtype="float32", batch_invariant=False) == 0
    assert served(dtype="float32") == 96  # no such promise: nothing differs


@pytest.mark.parametrize("token", [10**12, -1])
def test_a_prompt_outside_the_vocabulary_has_no_prefixes(llm: LLM, token: int):
    with pytest.raises(BadRequest, match=f"token id {token} is not in the vocabulary") as caught:
        llm.prefixes([5, token])
    assert caught.value.hint


def test_options_of_one_call(llm: LLM) -> None:
    assert llm.generate("fog", max_tokens=3, ignore_eos=True)[0].usage.completion_tokens == 3
    assert llm.generate("fog", PARAMS, max_tokens=3)[0].token_ids == llm.generate("fog", PARAMS)[0].token_ids[:3]
    assert len(list(llm.stream("fog", PARAMS, max_tokens=2, speculation="off"))) == 2
    assert llm.chat(MESSAGES, max_tokens=2, ignore_eos=True)[0].usage.completion_tokens == 2
    assert len(asyncio.run(llm.agenerate("fog", PARAMS, max_tokens=2))[0].token_ids) == 2
    with pytest.raises(BadRequest, match="called 'max_token'") as caught:
        llm.generate("fog", max_token=3)  # type: ignore[call-arg]
    assert caught.value.hint == "did you mean max_tokens?"
    for name, hint in (("sampling_params", "as params"), ("best_of", "known are"), ("budget", "prefill=Prefill(")):
        with pytest.raises(BadRequest, match=f"called {name!r}") as caught:
            llm.generate("fog", **{name: PARAMS})  # type: ignore[arg-type]
        assert hint in caught.value.hint
    with pytest.raises(BadRequest, match="temperature is -1"):
        llm.generate("fog", temperature=-1)
    with pytest.warns(DeprecationWarning, match="speculate= is now speculation="):
        llm.generate("fog", PARAMS, speculate="off")  # type: ignore[call-arg]


def test_options_of_one_call_are_the_fields_of_params() -> None:
    assert list(SamplingOptions.__annotations__) == [entry.name for entry in fields(SamplingParams)]


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    each = [replace(PARAMS, max_tokens=number) for number in (1, 2, 3, 4)]
    assert [len(c.token_ids) for c in llm.generate(PROMPTS, each)] == [1, 2, 3, 4]
    assert [len(c.token_ids) for c in asyncio.run(llm.agenerate(PROMPTS, each, n=2))] == [1, 2, 3, 4]
    with pytest.raises(BadRequest, match="4 prompts and 3 params"):
        llm.generate(PROMPTS, each[:3])
    with pytest.raises(BadRequest, match="must be SamplingParams"):
        llm.generate(PROMPTS, {"max_tokens": 3})  # type: ignore[arg-type]


def test_progress_counts_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("forerun.core.progress.LINE_AFTER_S", 0.0)
    monkeypatch.setattr("forerun.core.progress.LINE_INTERVAL_S", 0.002)
    llm.generate(PROMPTS, PARAMS, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert all(" of 4" in line for line in lines) and lines[-1].startswith("answers: 4 of 4 in")
    asyncio.run(llm.agenerate(PROMPTS, PARAMS, progress=True, n=2))
    lines = capsys.readouterr().err.splitlines()
    assert all(" of 8" in line for line in lines) and lines[-1].startswith("answers: 8 of 8 in")
    llm.generate(PROMPTS, PARAMS)
    assert capsys.readouterr().err == ""


def test_a_prediction_may_be_text(llm: LLM) -> None:
    plain = llm.generate("fog", PARAMS)[0]
    for prediction in (plain.text, plain.token_ids):
        found = llm.generate("fog", PARAMS, prediction=prediction, speculation="copy", cache=False)[0]
        assert found.token_ids == plain.token_ids
    assert llm.request([5], SamplingParams(prediction="fog")).params.prediction == tuple(llm.tokenizer.encode("fog"))


def test_statistics_are_methods_and_old_names_warn(llm: LLM) -> None:
    assert llm.memory_stats()["weights"] > 0 and "drafters" in llm.speculation_stats()
    with pytest.warns(DeprecationWarning, match="LLM.memory is now"):
        assert llm.memory.keys() == llm.memory_stats().keys()
    with pytest.warns(DeprecationWarning, match=r"LLM.speculation\(\) is now"):
        llm.speculation()
    with pytest.warns(DeprecationWarning, match="LLM.profile is now LLM.prefill_profile"):
        assert llm.profile is None


def test_the_repr_names_what_runs(llm: LLM) -> None:
    assert repr(llm).startswith(f"LLM({llm.model!r}, dtype='float32', device='cpu', max_model_len=")


def test_old_arguments_are_accepted_with_a_warning(tiny_folder: Callable[[str], Path]) -> None:
    old: Any = {"weights": "float32", "max_context": 64, "pool_tokens": 256, "max_batch": 4, "chunk_tokens": 32}
    with pytest.warns(DeprecationWarning) as caught:
        made = LLM(
            str(tiny_folder("llama")), threads=1, quiet=True, prefix_cache=False, draft=None, profile=None, **old
        )
    config = made.engine.config
    made.close()
    assert len(caught) == 8 and all(warning.filename == __file__ for warning in caught)
    assert (config.max_model_len, config.kv_cache_tokens, config.max_num_seqs) == (64, 256, 4)
    assert config.max_num_batched_tokens == 32 and not config.enable_prefix_caching
    with pytest.raises(BadRequest, match="weights and dtype are the same"):
        LLM(str(tiny_folder("llama")), weights="float32", dtype="float32")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("dtype", "quantization", "mode"),
    [
        ("auto", None, "auto"),
        ("float16", None, "fp16"),
        ("half", None, "fp16"),
        (torch.bfloat16, None, "bf16"),
        (torch.float32, None, "float32"),
        ("auto", "int8", "int8"),
        ("int8", "int8", "int8"),
    ],
)
def test_weights_are_named_as_others_name_them(dtype: Any, quantization: str | None, mode: str) -> None:
    assert weights_mode(dtype, quantization) == mode


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "float32", "quantization": "int8"}, "dtype is 'float32' and quantization 'int8'"),
        ({"quantization": "awq"}, "quantization is 'awq'"),
        ({"gpu_memory_utilization": 0.9, "device": "cpu"}, "about CUDA"),
    ],
)
def test_what_cannot_be_opened_so(options: Any, error: str, tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(BadRequest, match=error):
        LLM(str(tiny_folder("llama")), threads=1, quiet=True, **options)


def test_a_model_recommends_its_own_settings(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with LLM(str(folder), dtype="float32", threads=1, quiet=True) as made:
        found = made.get_default_sampling_params()
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.95, 20)


def test_an_unknown_role_is_refused(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="the role 'wizard'") as caught:
        llm.chat([{"role": "wizard", "content": "Who counts the ships?"}], PARAMS)
    assert "system, user, assistant, tool" in caught.value.hint


def test_requests_of_asyncio_are_encoded_and_checked_in_a_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop's own thread does neither, in any of the four ways to ask."""
    threads: list[tuple[str, threading.Thread]] = []

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            threads.append((name, threading.current_thread()))
            return real(*args, **more)

        monkeypatch.setattr(owner, name, call)

    watched(llm.tokenizer, "encode")
    watched(llm.engine.intake, "check")
    watched(llm.driver, "prepare")

    async def ask() -> None:
        await llm.agenerate("fog", PARAMS)
        await llm.achat(MESSAGES, PARAMS)
        assert [event async for event in llm.astream("fog", PARAMS)]
        session = llm.session("asyncio")
        session.append(MESSAGES)
        await session.aanswer(PARAMS)
        session.append(MESSAGES)
        assert [event async for event in session.astream(PARAMS)]

    asyncio.run(ask())
    assert [name for name, _ in threads].count("check") == 5 and {name for name, _ in threads} == {
        "encode",
        "check",
        "prepare",
    }
    assert threading.main_thread() not in [thread for _, thread in threads]


def test_a_stream_that_cannot_start_raises_where_it_is_read(llm: LLM) -> None:
    async def read(prompt: Any) -> None:
        async for _ in llm.astream(prompt, PARAMS):
            pass

    with pytest.raises(BadRequest, match="the prompt is empty"):
        asyncio.run(read(""))
    with pytest.raises(BadRequest, match="the context holds"):
        asyncio.run(read([5] * 5000))
    assert llm.engine.idle


def test_what_vllm_users_pass(llm: LLM) -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    with pytest.raises(BadRequest, match="top_k is -2"):
        SamplingParams(top_k=-2)
    limit = llm.engine.config.max_model_len
    whole = llm.generate([5] * (limit - 9), max_tokens=None, ignore_eos=True)[0]
    assert (len(whole.token_ids), whole.finish_reason) == (9, "length")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who counts "}, {"type": "text", "text": "ships?"}]}]
    plain = [{"role": "user", "content": "Who counts ships?"}]
    assert llm.chat(parts, PARAMS)[0] == replace(llm.chat(plain, PARAMS)[0], usage=ANY)
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 5):
        with pytest.raises(BadRequest, match="a part of a message is") as caught:
            llm.chat([{"role": "user", "content": [part]}], PARAMS)  # type: ignore[list-item]
        assert "text only" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0", "leave max_num_seqs out for the default"),
        ({"max_model_len": 10_000_000}, "max_model_len is 10000000, allowed is from 2 to", "leave it out for"),
    ],
)
def test_limits_have_hints_that_help(options: Any, message: str, hint: str, tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        LLM(str(tiny_folder("llama")), threads=1, quiet=True, **options)
    assert hint in caught.value.hint


def test_warnings_about_old_names_stand_in_the_callers_file(llm: LLM) -> None:
    async def ask() -> None:
        await llm.agenerate("fog", PARAMS, speculate="off")  # type: ignore[call-arg]

    for use in (
        lambda: llm.generate("fog", PARAMS, speculate="off"),  # type: ignore[call-arg]
        lambda: list(llm.stream("fog", PARAMS, speculate="off")),  # type: ignore[call-arg]
        lambda: asyncio.run(ask()),
        lambda: replace(PARAMS, speculate="off"),  # type: ignore[call-arg]
        lambda: llm.memory,
    ):
        with pytest.warns(DeprecationWarning) as caught:
            use()
        assert [warning.filename for warning in caught] == [__file__]


def test_after_close_every_call_says_so(tiny_folder: Callable[[str], Path]) -> None:
    closed = LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True)
    session = closed.session("before")
    session.append("fog and rain")
    closed.close()

    async def read(events: Any) -> None:
        async for _ in events:
            pass

    for use in (
        lambda: closed.generate("fog"),
        lambda: closed.chat(MESSAGES),
        lambda: next(closed.stream("fog")),
        lambda: asyncio.run(closed.achat(MESSAGES)),
        lambda: asyncio.run(read(closed.astream("fog"))),
        lambda: closed.request([5]),
        lambda: closed.session("after"),
        lambda: session.append("x"),
        lambda: session.answer(),
        lambda: asyncio.run(session.aanswer()),
        lambda: next(closed.workers("fog", 2)),
        lambda: closed.rollout("fog", 2, 2, 100),
        lambda: closed.prepare(PARAMS),
        lambda: closed.upgrade(),
        lambda: score_continuations(closed, [5], [[6]]),
    ):
        with pytest.raises(ForerunError, match="this LLM is closed"):
            use()
    assert closed.stats().answers == 0 and "closed" in repr(closed)  # what was measured can still be read
    closed.close()
