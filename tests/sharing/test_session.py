"""Sessions: turns read what earlier ones left, restarts find them again, misuse is said clearly."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.cache.segments import read_header
from forerun.errors import BadRequest, ForerunError

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, speculate="off")
LONG = "The lamp turns twelve times a minute, and every ship that hears the horn answers. " * 6
USER = {"role": "user", "content": "Who counts the ships that pass, and where are their names written?"}


@pytest.fixture(scope="module")
def make(tiny_folder: Callable[[str], Path]) -> Callable[..., LLM]:
    def made(**options: Any) -> LLM:
        return LLM(
            str(tiny_folder("qwen3")), weights="float32", threads=1, quiet=True, **{"pool_tokens": 4096, **options}
        )

    return made


@pytest.fixture(scope="module")
def llm(make: Callable[..., LLM]) -> Iterator[LLM]:
    with make() as made:
        yield made


def test_a_text_goes_on_as_if_it_had_been_one_prompt(llm: LLM):
    session = llm.session("text")
    session.append(LONG)
    first = session.answer(PARAMS)
    session.append(" And then?")
    second = session.answer(PARAMS)
    prompt = [*first.prompt_ids, *first.token_ids, *llm.tokenizer.encode(" And then?")]
    assert second.prompt_ids == prompt and second.token_ids == llm.generate(prompt, PARAMS)[0].token_ids
    assert second.usage.served["pool"] >= (len(first.prompt_ids) + 12) // 16 * 16 - 16
    assert session.tokens == [*prompt, *second.token_ids] and session.turns == 2
    assert session.stats.answers == 2 and llm.stats().sessions["text"].prompt_tokens == session.stats.prompt_tokens


def test_a_conversation_keeps_its_answers_token_by_token(llm: LLM):
    session = llm.session("chat")
    session.append(USER)
    first = session.answer(PARAMS)
    assert first.prompt_ids == llm.encode([USER]) and session.messages[-1]["content"] == first.text
    session.append([{"role": "user", "content": "Why?"}])
    second = session.answer(PARAMS)
    told = [*first.prompt_ids, *first.token_ids]
    assert second.prompt_ids[: len(told)] == told
    tail = "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt_ids[len(told) :] == llm.tokenizer.encode(tail, parse_special=True)
    with pytest.raises(BadRequest, match="is answered"):
        session.answer(PARAMS)


def test_an_answer_that_ended_by_itself_is_not_ended_twice(llm: LLM):
    session = llm.session("ends")
    session.append(USER)
    end = llm.tokenizer.encode("<|im_end|>", parse_special=True)[0]
    ends = SamplingParams(max_tokens=12, logit_bias={end: 100.0})
    first = session.answer(ends)
    assert first.token_ids == [end] and first.finish_reason == "stop"
    session.append({"role": "user", "content": "Why?"})
    assert session.answer(PARAMS).prompt_ids.count(end) == 3


def test_streaming_is_the_same_and_leaving_early_changes_nothing(llm: LLM):
    session = llm.session("stream")
    session.append(LONG)
    before = session.tokens
    for _ in session.stream(PARAMS):
        break
    assert session.tokens == before and session.turns == 0
    events = list(session.stream(PARAMS))
    assert session.tokens == before + [t for e in events for t in e.token_ids]


def test_forks_go_their_own_ways_from_one_cache(llm: LLM):
    session = llm.session("trunk")
    session.append(LONG)
    session.answer(PARAMS)
    fork = session.fork("branch")
    session.append(" One.")
    fork.append(" Two.")
    a, b = session.answer(PARAMS), fork.answer(PARAMS)
    assert a.prompt_ids != b.prompt_ids and min(a.usage.served["pool"], b.usage.served["pool"]) > 80
    with pytest.raises(BadRequest, match="already"):
        session.fork("branch")


def test_rewinding_by_turns_and_tokens(llm: LLM):
    session = llm.session("rewind")
    session.append(LONG)
    first = session.answer(PARAMS)
    after = session.tokens
    session.append(" One.")
    session.answer(PARAMS)
    session.append(" Two.")
    session.rewind(turns=2)  # what waits, and one answer with what led to it
    assert session.tokens == after and session.turns == 1
    session.rewind(tokens=12)
    assert session.tokens == first.prompt_ids and session.answer(PARAMS).token_ids == first.token_ids
    session.rewind(turns=session.turns)
    assert session.tokens == [] and session.turns == 0
    chat = llm.session("rewind chat")
    chat.append(USER)
    said = chat.answer(PARAMS)
    chat.append({"role": "user", "content": "Why?"})
    chat.answer(PARAMS)
    chat.rewind(turns=1)
    assert len(chat.messages) == 2 and chat.tokens == [*said.prompt_ids, *said.token_ids]
    for wrong in ({"turns": 5}, {"turns": 0}, {"tokens": 1}, {}, {"turns": 1, "tokens": 1}, {"turns": True}):
        with pytest.raises(BadRequest):
            chat.rewind(**wrong)
    assert chat.turns == 1


def test_misuse_is_said_clearly_and_harms_nothing(llm: LLM):
    session = llm.session("misuse")
    with pytest.raises(BadRequest, match="is empty"):
        session.answer(PARAMS)
    with pytest.raises(BadRequest, match="empty"):
        session.append("")
    session.append(LONG)
    with pytest.raises(BadRequest, match="plain text"):
        session.append(USER)
    with pytest.raises(BadRequest, match="n is 2"):
        session.answer(SamplingParams(n=2))
    running = session.stream(PARAMS)
    next(running)
    for use in (session.answer, lambda: session.append("x"), lambda: session.fork("y"), session.close):
        with pytest.raises(BadRequest, match="a turn of it is running"):
            use()
    assert len(list(running)) == 11 and session.turns == 1
    session.close()
    for use in (session.answer, lambda: session.append("x"), lambda: session.fork("y")):
        with pytest.raises(BadRequest, match="it is closed"):
            use()
    session.close()
    with pytest.raises(BadRequest, match="no session 'misuse'"):
        llm.session("misuse", create=False)
    for ttl in (0, -1.0, True, float("nan"), "long", float("inf")):
        with pytest.raises(BadRequest, match="ttl is"):
            llm.session("other", ttl=ttl)  # type: ignore[arg-type]
    for name in ("", "  ", 3, "x" * 201):
        with pytest.raises(BadRequest, match="name"):
            llm.session(name)  # type: ignore[arg-type]
    chat = llm.session("misuse chat")
    chat.append(USER)
    with pytest.raises(BadRequest, match="conversation"):
        chat.append("text")
    with pytest.raises(BadRequest, match="role"):
        chat.append([{"content": "x"}])
    assert chat.messages == [USER]


def test_the_same_name_is_the_same_session_and_its_pages_are_pinned(llm: LLM):
    session = llm.session("pinned", ttl=60)
    assert llm.session("pinned") is session and "pinned" in llm.sessions.names()
    session.append(LONG)
    session.answer(PARAMS)
    pins = llm.engine.scheduler.pins
    held = pins.num_pages
    llm.engine.tree.evict(10_000)
    assert len(llm.engine.tree.match(session.tokens)) * 16 >= len(session.tokens) - 17
    session.close()
    assert pins.num_pages < held


def test_a_restart_finds_sessions_and_their_cache(make: Callable[..., LLM], tmp_path: Path):
    with make(disk=tmp_path) as llm:
        session = llm.session("kept")
        session.append(USER)
        session.answer(PARAMS)
        waiting = llm.session("waiting")
        waiting.append(LONG)
        expected = session.fork("fork")
        expected.append({"role": "user", "content": "Why?"})
        told = expected.answer(PARAMS)
        before = session.tokens
        with pytest.raises(BadRequest, match="in use"):
            make(disk=tmp_path)
    with make(disk=tmp_path) as llm:
        assert llm.sessions.names() == ["fork", "kept", "waiting"]
        assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("sessions/*.json"))
        session = llm.session("kept", create=False)
        assert session.tokens == before and session.turns == 1
        session.append({"role": "user", "content": "Why?"})
        again = session.answer(PARAMS)
        assert again.token_ids == told.token_ids and again.prompt_ids == told.prompt_ids
        assert again.usage.served["disk"] == (len(again.prompt_ids) - 1) // 16 * 16
        assert len(llm.session("waiting").answer(PARAMS).token_ids) == 12
        llm.session("fork").close(forget=True)
        assert "fork" not in llm.sessions.names()


def test_a_crash_loses_nothing_of_a_finished_turn(make: Callable[..., LLM], tmp_path: Path):
    llm = make(disk=tmp_path)
    session = llm.session("crash")
    session.append(LONG)
    session.answer(PARAMS)
    disk = llm.engine.tiers.disk  # type: ignore[union-attr]
    assert disk is not None and disk._lock_file is not None
    disk.flush()
    disk._lock_file.close()  # the process is gone
    with make(disk=tmp_path) as again:
        kept = again.session("crash", create=False)
        assert kept.tokens == session.tokens
        assert kept.answer(PARAMS).usage.served["disk"] == (len(session.tokens) - 1) // 16 * 16
    disk.off = "gone"


def test_a_damaged_session_file_is_refused_and_segments_are_recomputed(make: Callable[..., LLM], tmp_path: Path):
    with make(disk=tmp_path) as llm:
        session = llm.session("x")
        session.append(LONG)
        first = session.answer(PARAMS)
    for path in [*tmp_path.glob("*.safetensors"), *tmp_path.glob("sessions/*.json")]:
        data = bytearray(path.read_bytes())
        data[read_header(path).start + 3 if path.suffix == ".safetensors" else -20] ^= 1
        path.write_bytes(data)
    with make(disk=tmp_path) as llm:
        with pytest.raises(ForerunError, match="damaged"):
            llm.session("x")
        again = llm.generate(first.prompt_ids, PARAMS)[0]
        assert again.token_ids == first.token_ids
        assert again.usage.served["disk"] == 0 and llm.stats().tiers["disk"]["damaged_files"] == 1


def test_a_full_disk_stops_nobody(make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("forerun.cache.segments.save_file", refuse)
    monkeypatch.setattr("forerun.sharing.session_files.os.replace", refuse)
    with make(disk=tmp_path) as llm:
        session = llm.session("x")
        session.append(LONG)
        assert len(session.answer(PARAMS).token_ids) == 12
        llm.engine.tiers.disk.flush()  # type: ignore[union-attr]
        assert "No space" in llm.stats().tiers["disk"]["off"]
        session.append(" More.")
        assert session.answer(PARAMS).usage.served["pool"] > 80
    assert not list(tmp_path.glob("**/*.tmp"))


def test_tiers_need_the_prefix_cache(make: Callable[..., LLM], tmp_path: Path):
    with pytest.raises(BadRequest, match="prefix_cache is off"):
        make(disk=tmp_path, prefix_cache=False)
    with make(prefix_cache=False) as llm:
        session = llm.session("x")
        session.append(LONG)
        assert session.answer(PARAMS).usage.served["computed"] == len(llm.encode(LONG))


def test_sessions_go_on_side_by_side_in_asyncio(llm: LLM):
    names = [f"async {i}" for i in range(4)]

    async def one(name: str) -> tuple[list[int], list[int]]:
        session = llm.session(name)
        session.append(f"{LONG} {name}")
        first = await session.aanswer(PARAMS)
        with pytest.raises(BadRequest, match="a turn of it is running"):
            await asyncio.gather(session.aanswer(PARAMS), session.aanswer(PARAMS))
        while session.turns < 2:  # the first of the two goes on
            await asyncio.sleep(0.01)
        said = [token async for event in session.astream(PARAMS) for token in event.token_ids]
        assert session.turns == 3 and session.tokens[-12:] == said
        return first.prompt_ids, first.token_ids

    async def all_of_them() -> list[tuple[list[int], list[int]]]:
        return await asyncio.gather(*map(one, names))

    for prompt, told in asyncio.run(all_of_them()):
        assert told == llm.generate(prompt, PARAMS)[0].token_ids
    assert llm.stats().sessions["async 0"].answers == 3


def test_a_cancelled_task_leaves_the_session_as_it_was(llm: LLM):
    session = llm.session("cancelled task")
    session.append(LONG)
    before = session.tokens

    async def leave() -> None:
        task = asyncio.create_task(session.aanswer(SamplingParams(max_tokens=400, ignore_eos=True)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert session.tokens == before and session.turns == 0
    assert session.answer(PARAMS).prompt_ids == before


KILLED = """
import os, signal, sys
from forerun import LLM, SamplingParams
llm = LLM(sys.argv[1], weights="float32", threads=1, quiet=True, pool_tokens=4096, disk=sys.argv[2])
session = llm.session("killed")
session.append("The lamp turns twelve times a minute, and every ship answers. " * 6)
answer = session.answer(SamplingParams(max_tokens=12, ignore_eos=True, speculate="off"))
session.append(" More of it.")
running = session.stream(SamplingParams(max_tokens=400, ignore_eos=True))
next(running)
print(answer.token_ids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_no_turn_that_had_ended(
    make: Callable[..., LLM], tiny_folder: Callable[[str], Path], tmp_path: Path
):
    arguments = [sys.executable, "-c", KILLED, str(tiny_folder("qwen3")), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with make(disk=tmp_path) as llm:
        session = llm.session("killed", create=False)
        more = llm.tokenizer.encode(" More of it.")
        assert session.turns == 1 and session.tokens[-len(more) - 12 :] == [*json.loads(done.stdout), *more]
        again = session.answer(PARAMS)  # the turn that was running is asked again
        assert again.token_ids == llm.generate(again.prompt_ids, PARAMS)[0].token_ids


def test_another_precision_finds_the_session_and_computes(
    make: Callable[..., LLM], tiny_folder: Callable[[str], Path], tmp_path: Path
):
    with make(disk=tmp_path) as llm:
        session = llm.session("moved")
        session.append(LONG)
        session.answer(PARAMS)
    with LLM(str(tiny_folder("qwen3")), weights="int8", threads=1, quiet=True, pool_tokens=4096, disk=tmp_path) as llm:
        again = llm.session("moved", create=False)
        assert again.tokens == session.tokens and again.answer(PARAMS).usage.served["disk"] == 0


def test_sessions_of_a_closed_llm_write_nothing(make: Callable[..., LLM], tmp_path: Path):
    with make(disk=tmp_path) as llm:
        session = llm.session("x")
        session.append(LONG)
    files = {path: path.read_bytes() for path in tmp_path.glob("sessions/*")}
    for use in (lambda: session.append("more"), session.answer, lambda: session.fork("y"), lambda: llm.session("z")):
        with pytest.raises(ForerunError, match="this LLM is closed"):
            use()
    session.close()
    assert session.closed and files == {path: path.read_bytes() for path in tmp_path.glob("sessions/*")}


@pytest.mark.parametrize("seed", range(2))
def test_random_turns_forks_rewinds_and_restarts_beside_plain_lists(
    make: Callable[..., LLM], tmp_path: Path, seed: int, llm: LLM
):
    """Beside every session a plain list of its tokens and where its turns began; answers are those of an engine with
    room for everything. A small pool: sessions push each other out, to memory and disk."""
    dice, folders = random.Random(seed), iter(range(100))
    options = {"pool_tokens": 1024, "host_bytes": 256 << 10}
    running = make(disk=tmp_path / "0", **options)
    known: dict[str, tuple[list[int], list[int]]] = {}

    def restart(crash: bool) -> LLM:
        disk = running.engine.tiers.disk  # type: ignore[union-attr]
        left = tmp_path / f"left {next(folders)}"
        if crash:  # only files are left, as they are at this moment
            shutil.copytree(disk.folder, left, ignore=shutil.ignore_patterns("*.tmp"))  # type: ignore[union-attr]
        running.close()
        return make(disk=left if crash else disk.folder, **options)  # type: ignore[union-attr]

    for _ in range(25):
        action = dice.choice(["turn", "turn", "turn", "fork", "rewind", "restart", "crash", "close"])
        name = dice.choice([*known, f"new {len(known)}"])
        tokens, starts = known.get(name, ([], []))
        if len(tokens) > 700 and action == "turn":
            continue
        if action in ("restart", "crash"):
            running = restart(action == "crash")
        elif action == "turn" or not tokens:
            session = running.session(name)
            new = [dice.randrange(5, 300) for _ in range(dice.randrange(1, 80))]
            session.append(new)
            answer = session.answer(PARAMS)
            assert answer.prompt_ids == [*tokens, *new]
            known[name] = ([*tokens, *new, *answer.token_ids], [*starts, len(tokens)])
            assert answer.token_ids == llm.generate(answer.prompt_ids, PARAMS)[0].token_ids
        elif action == "fork":
            running.session(name, create=False).fork(f"fork {len(known)}")
            known[f"fork {len(known)}"] = (list(tokens), list(starts))
        elif action == "rewind":
            turns = dice.randint(1, len(starts))
            running.session(name, create=False).rewind(turns=turns)
            known[name] = (tokens[: starts[-turns]], starts[:-turns])
        else:
            running.session(name, create=False).close()
        for each, (expected, begun) in known.items():
            session = running.session(each, create=False)
            assert session.tokens == expected and session.turns == len(begun)
    for each in known:
        running.session(each).close()
    running.clear_cache()
    assert running.engine.pool.used == 0
    running.close()
