"""Sessions on disk: restarts and crashes find them again; files that cannot be written or read do no harm."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from forerun import LLM
from forerun.cache.segments import read_header
from forerun.errors import BadRequest, ForerunError
from tests.sharing.common import LONG, PARAMS, USER


@pytest.fixture(scope="module")
def llm(make: Callable[..., LLM]) -> Iterator[LLM]:
    with make() as made:
        yield made


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
    assert disk is not None
    disk.flush()
    disk._alive.release()  # the process is gone
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


def test_a_full_disk_stops_no_request(make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("forerun.cache.segments.save_file", refuse)
    monkeypatch.setattr("forerun.sharing.session_registry.os.replace", refuse)
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
    with pytest.raises(BadRequest, match="enable_prefix_caching is off"):
        make(disk=tmp_path, enable_prefix_caching=False)
    with make(enable_prefix_caching=False) as llm:
        session = llm.session("x")
        session.append(LONG)
        assert session.answer(PARAMS).usage.served["computed"] == len(llm.encode(LONG))


KILLED = """
import os, signal, sys
from forerun import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", threads=1, quiet=True, kv_cache_tokens=4096, disk=sys.argv[2])
session = llm.session("killed")
session.append("The lamp turns twelve times a minute, and every ship answers. " * 6)
answer = session.answer(SamplingParams(max_tokens=12, ignore_eos=True, speculation="off"))
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
    with LLM(
        str(tiny_folder("qwen3")), dtype="int8", threads=1, quiet=True, kv_cache_tokens=4096, disk=tmp_path
    ) as llm:
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
    rng, folders = random.Random(seed), iter(range(100))
    options = {"kv_cache_tokens": 1024, "host_bytes": 256 << 10}
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
        action = rng.choice(["turn", "turn", "turn", "fork", "rewind", "restart", "crash", "close"])
        name = rng.choice([*known, f"new {len(known)}"])
        tokens, starts = known.get(name, ([], []))
        if len(tokens) > 700 and action == "turn":
            continue
        if action in ("restart", "crash"):
            running = restart(action == "crash")
        elif action == "turn" or not tokens:
            session = running.session(name)
            new = [rng.randrange(5, 300) for _ in range(rng.randrange(1, 80))]
            session.append(new)
            answer = session.answer(PARAMS)
            assert answer.prompt_ids == [*tokens, *new]
            known[name] = ([*tokens, *new, *answer.token_ids], [*starts, len(tokens)])
            assert answer.token_ids == llm.generate(answer.prompt_ids, PARAMS)[0].token_ids
        elif action == "fork":
            running.session(name, create=False).fork(f"fork {len(known)}")
            known[f"fork {len(known)}"] = (list(tokens), list(starts))
        elif action == "rewind":
            turns = rng.randint(1, len(starts))
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


def test_a_session_moves_between_processes_that_share_the_folder(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forerun.cache.disk.LIST_INTERVAL_S", 0.0)
    with make(disk=tmp_path) as one, make(disk=tmp_path) as two:
        here = one.session("moving")
        here.append(LONG)
        here.answer(PARAMS)
        one.engine.tiers.disk.flush()  # type: ignore[union-attr]
        there = two.session("moving", create=False)
        assert there.tokens == here.tokens
        there.append(" More of it.")
        answer = there.answer(PARAMS)
        assert answer.usage.served["disk"] > 0  # the other's K/V
        here.append(" And more.")  # the turn between is part of it
        assert here.turns == 2 and here.tokens[: len(there.tokens)] == there.tokens
        assert not there.pending
        assert two.session("moving").pending  # what the other appended
        there.close(forget=True)
        assert one.session("moving").tokens == [] and not list(tmp_path.glob("sessions/*.lock"))


def test_one_process_at_a_time_has_a_session(make: Callable[..., LLM], tmp_path: Path):
    with make(disk=tmp_path) as one, make(disk=tmp_path) as two:
        here, there = one.session("held"), two.session("held")
        here.append(LONG)
        with closing(here.stream(PARAMS)) as events:
            next(events)  # type: ignore[call-overload]
            with pytest.raises(BadRequest, match="in use by another process"):
                there.append(LONG)
            there.close()  # needs nothing of the other
        again = two.session("held")
        assert again.answer(PARAMS).token_ids
