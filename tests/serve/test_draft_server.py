"""A draft server and targets on it, over real sockets: drafts that are used; servers that die, lie and send garbage.

Drafts are verified whatever they cost (`all_drafts_verified`), so that nothing depends on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from forerun import LLM, BadRequest, SamplingParams, Speculation
from forerun.checks.lossless.forced_drafting import VerifyAllDrafts, all_drafts_verified
from forerun.checks.lossless.remote import made_up_tree
from forerun.decode.control.acceptance import ELSEWHERE
from forerun.decode.drafters.remote import RemoteDrafter, RoundTrips
from forerun.decode.remote.protocol import (
    DraftOrder,
    Forgot,
    Hello,
    Refused,
    Tree,
    Welcome,
    decode,
    encode,
    vocabulary_digest,
)
from forerun.models.formats.pard import ParallelDrafting
from forerun.serve.config import ApiKeys
from forerun.serve.draft_server import DraftServeConfig, DraftServer
from forerun.serve.listening import listen
from tests import tiny

PROMPTS = ["The keeper counts", "On quiet nights the book", "def turn(lamp):"]
# near to greedy, so that a tiny random model is sure of its next token; the answer is drawn all the same
PARAMS = SamplingParams(temperature=0.05, seed=1, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def small(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_folder("llama")), dtype="float32", quiet=True, max_model_len=512, threads=1) as llm:
        yield llm


@pytest.fixture
def target(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    """The same weights, so that drafts are right."""
    with LLM(str(tiny_folder("llama")), dtype="float32", quiet=True, max_model_len=512, threads=1) as llm:
        yield llm


@contextlib.contextmanager
def running(llm: LLM, config: DraftServeConfig | None = None, port: int = 0) -> Iterator[tuple[DraftServer, int]]:
    server = DraftServer(llm, config or DraftServeConfig())
    with listen("127.0.0.1", port) as sock:
        thread = threading.Thread(target=server.run, args=(sock,))
        thread.start()
        try:
            yield server, sock.getsockname()[1]
        finally:
            while thread.is_alive():  # it may not have begun to serve
                server.stop()
                thread.join(0.05)


@contextlib.contextmanager
def scripted(behave: Callable[[ServerConnection], Any]) -> Iterator[int]:
    """A server of one's own behaviour."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    async def run() -> None:
        async with serve(behave, "127.0.0.1", 0, compression=None) as server:
            ports.append(server.sockets[0].getsockname()[1])
            ready.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Future()

    def begin() -> None:
        task = loop.create_task(run())
        tasks.append(task)
        loop.run_until_complete(task)

    tasks: list[asyncio.Task[None]] = []
    thread = threading.Thread(target=begin)
    thread.start()
    ready.wait()
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(tasks[0].cancel)
        thread.join()
        loop.close()


def ask(llm: LLM, drafter: str, params: SamplingParams = PARAMS, verify: str = "auto") -> list[Any]:
    with all_drafts_verified(llm.engine):
        return llm.generate(PROMPTS, replace(params, speculation=Speculation(drafter, verify=verify)))


def connect_drafter(llm: LLM, name: str) -> None:
    """Make the drafter and wait until its servers answered: on a busy machine that may be after the first steps."""
    llm.engine.speculator.drafter_pool.prepare(SamplingParams(speculation=Speculation(name)))
    while any(link.welcome is None for link in remote(llm, name).links):
        threading.Event().wait(0.01)


def plain(llm: LLM, params: SamplingParams = PARAMS) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, params, speculation="off")]


def remote(llm: LLM, name: str) -> RemoteDrafter:
    found = llm.engine.speculator.drafter_pool[name]
    assert isinstance(found, RemoteDrafter)
    return found


def test_a_machine_that_only_drafts_needs_no_web_framework() -> None:
    names = "commands.draft", "serve.draft_server", "serve.draft_worker", "serve.listening", "serve.logs"
    program = f"import sys, {', '.join(f'forerun.{name}' for name in names)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "websockets" in loaded and not {"fastapi", "starlette", "uvicorn"} & set(loaded)


# ---- drafts ----


def test_drafts_of_another_process_are_accepted_and_change_nothing(small: LLM, target: LLM) -> None:
    with running(small) as (server, port):
        name = f"remote:127.0.0.1:{port}"
        connect_drafter(target, name)
        answers = ask(target, name)
        assert [answer.token_ids for answer in answers] == plain(target)
        accepted = sum(answer.usage.accepted for answer in answers)
        assert accepted > 24 and all(answer.usage.drafters[name].accepted > 4 for answer in answers)
        figures = remote(target, name).figures()
        assert figures["guesses"] > 0 and 0 < figures["bytes_received"] == server.bytes_sent
        assert (figures["bytes_sent"] + figures["bytes_received"]) / accepted < 200
        while server.worker.num_sequences:  # a target closes what ended
            server.worker._thread.join(0.01)
    assert server.worker._pool.used == 0


def test_guessed_outcomes_come_true(small: LLM, target: LLM) -> None:
    """The server drafts on while the target verifies; with its own weights as the target the guess is mostly right."""
    with running(small) as (_, port):
        name = f"remote:127.0.0.1:{port}"
        connect_drafter(target, name)
        ask(target, name, replace(PARAMS, max_tokens=48))
        figures = remote(target, name).figures()
    assert figures["hits"] > 0 and figures["hits"] <= figures["guesses"] <= figures["orders"]


@pytest.mark.parametrize("verify", ["rejection", "traversal", "transport", "block"])
def test_sampled_drafts_are_drawn_here_from_quantised_distributions(small: LLM, target: LLM, verify: str) -> None:
    with running(small) as (_, port):
        name = f"remote:127.0.0.1:{port}"
        connect_drafter(target, name)
        answers = ask(target, name, replace(PARAMS, temperature=0.15), verify)
    assert sum(answer.usage.drafters[name].accepted for answer in answers) > 10
    assert all(answer.usage.verifier == verify and answer.usage.lossless for answer in answers)


@pytest.mark.parametrize("verify", ["match", "rejection", "transport"])
def test_drafts_of_several_tokens_in_one_forward(
    tiny_folder: Callable[[str], Path], target: LLM, verify: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not trained for it, so that hardly more than the first of five is right."""
    with LLM(str(tiny_folder("llama")), dtype="float32", quiet=True, max_model_len=512, threads=1) as llm:
        llm.parallel = ParallelDrafting(mask_token=2, tokens=5, outcomes={"text": [[30.0, 40.0]]})  # type: ignore[attr-defined]
        with running(llm) as (server, port):
            name = f"remote:127.0.0.1:{port}"
            connect_drafter(target, name)
            answers = ask(target, name, verify=verify)
            usage = [answer.usage.drafters[name] for answer in answers]
            assert sum(tally.accepted for tally in usage) > 10
            assert server.worker.num_rounds == server.worker.trees > 0
            known = target.engine.speculator.controller
            assert (
                known.slowdowns[name].rounds.tokens == 5 and known.acceptance.records[name].kinds["text"].total[1] > 0
            )
    assert verify != "match" or [answer.token_ids for answer in answers] == plain(target)
    assert "drafting failed" not in caplog.text


def test_a_prompt_is_read_in_parts_and_rolled_back_where_a_guess_was_wrong(
    small: LLM, target: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.decode.drafters.model.MAX_CATCH_UP_TOKENS", 48)
    long = " ".join(tiny.TEXT.split())[:1200]
    params = replace(PARAMS, temperature=0.2, max_tokens=32)  # often elsewhere than drafted
    expected = target.generate(long, params, speculation="off")[0].token_ids
    with running(small) as (_, port), all_drafts_verified(target.engine):
        answer = target.generate(long, params, speculation=f"remote:127.0.0.1:{port}")[0]
        greedy = target.generate(long, params, temperature=0.05, speculation=f"remote:127.0.0.1:{port}")[0]
    assert answer.token_ids == expected and 0 < answer.usage.accepted < answer.usage.drafted
    assert greedy.usage.accepted > 4  # what was rolled back is not what later drafts are made of


def test_two_servers_share_the_sequences(small: LLM, target: LLM, tiny_folder: Callable[[str], Path]) -> None:
    with (
        LLM(str(tiny_folder("llama")), dtype="float32", quiet=True, max_model_len=512, threads=1) as other,
        running(small) as (first, one),
        running(other) as (second, two),
    ):
        answers = ask(target, f"remote:127.0.0.1:{one},127.0.0.1:{two}")
        assert first.worker.trees > 0 and second.worker.trees > 0
    assert [answer.token_ids for answer in answers] == plain(target)


def test_a_silent_server_of_several_does_not_hold_up_the_sequences_of_another(
    small: LLM, target: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence has its own draft in flight: a step runs with those that are here."""
    monkeypatch.setattr(VerifyAllDrafts, "max_wait_s", lambda *given: (0.2, 1.0))

    async def silent(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            await greeted(connection)
            async for _ in connection:
                pass

    with running(small) as (server, port), scripted(silent) as other:
        name = f"remote:127.0.0.1:{port},127.0.0.1:{other}"
        connect_drafter(target, name)
        answers = ask(target, name)
        drafted = [answer.usage.drafted for answer in answers]
        assert server.worker.trees > 0 and 0 in drafted and max(drafted) > 4, drafted
    assert [answer.token_ids for answer in answers] == plain(target)


def test_steps_are_timed_beside_a_server_of_this_machine(small: LLM, target: LLM) -> None:
    with running(small) as (server, port):
        name, slowdowns = f"remote:127.0.0.1:{port}", target.engine.speculator.controller.slowdowns
        connect_drafter(target, name)
        while not server.worker.trees:  # on a busy machine the handshake may have come too late
            target.engine.speculator.drafter_pool.remove(name)
            del slowdowns[name]
            connect_drafter(target, name)
        drafter, slowdown = remote(target, name), slowdowns[name]
        assert server.worker.trees == 1 and drafter.figures()["orders"] == 0
        assert slowdown.round_s > 0.0 and (slowdown.round_s, slowdown.way_s) == drafter.turn_costs()[:2]
        assert drafter.trips.server_s == RoundTrips().server_s  # of orders that are waited for: unknown as before
        while server.worker.num_sequences:
            server.worker._thread.join(0.01)
        times = iter(range(1, 1000))
        assert drafter.time_beside(lambda: threading.Event().wait(0.002) or float(next(times))) is not None
    assert drafter.time_beside(lambda: 1.0) is None  # it is gone


def test_acceptance_is_that_of_a_servers_model_at_any_address(small: LLM, target: LLM) -> None:
    records = target.engine.speculator.controller.acceptance.records
    with running(small) as (_, one), running(small) as (_, two):
        for name in (names := [f"remote:127.0.0.1:{port}" for port in (one, two)]):
            connect_drafter(target, name)
        assert records[names[0]] is records[names[1]] is records[ELSEWHERE + small.model]


def test_auto_uses_a_remote_draft_model(small: LLM, tiny_folder: Callable[[str], Path]) -> None:
    with running(small) as (_, port):
        name = f"remote:127.0.0.1:{port}"
        with LLM(str(tiny_folder("llama")), draft_model=name, quiet=True, max_model_len=512, threads=1) as llm:
            assert llm.draft_name == name and name in llm.engine.speculator.drafter_pool.names(SamplingParams())
            answers = ask(llm, "auto")
            assert any(name in answer.usage.drafters for answer in answers)


# ---- servers that fail ----


def test_a_server_that_dies_and_comes_back_costs_no_answer(small: LLM, target: LLM) -> None:
    expected, drafted = plain(target), []
    with running(small) as (_, port):
        name = f"remote:127.0.0.1:{port}"
        drafted.append(ask(target, name))
    drafted.append(ask(target, name))  # it is gone
    with running(small, port=port):
        link = remote(target, name).links[0]
        while link.welcome is None:  # it connects again by itself
            link._thread.join(0.02)
        drafted.append(ask(target, name))
    assert all([answer.token_ids for answer in answers] == expected for answers in drafted)
    counts = [sum(answer.usage.accepted for answer in answers) for answers in drafted]
    assert counts[0] > 0 and counts[1] == 0 and counts[2] > 0


async def greeted(connection: ServerConnection) -> None:
    await connection.recv()
    await connection.send(encode(Welcome(512, 8, 1e-3, "scripted")))


def test_garbage_under_load_changes_nothing(target: LLM) -> None:
    draw, sent = random.Random(3), []

    async def behave(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            await greeted(connection)
            async for _ in connection:
                sent.append(draw.randbytes(draw.randrange(1, 60)))
                await connection.send(sent[-1])

    with scripted(behave) as port:
        name = f"remote:127.0.0.1:{port}"
        answers = ask(target, name)
        assert remote(target, name).figures()["trees"] == 0
    assert [answer.token_ids for answer in answers] == plain(target) and sent
    assert all(answer.finish_reason == "length" for answer in answers)


def test_lies_are_rejected(target: LLM) -> None:
    """Sound frames with trees of made-up tokens."""

    async def behave(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            await greeted(connection)
            async for data in connection:
                order = decode(data, tiny.VOCAB)  # type: ignore[arg-type]
                if isinstance(order, DraftOrder):
                    await connection.send(encode(made_up_tree(order, order.tokens, tiny.VOCAB), tiny.VOCAB))

    with scripted(behave) as port:
        answers = ask(target, f"remote:127.0.0.1:{port}")
    assert [answer.token_ids for answer in answers] == plain(target)
    assert sum(answer.usage.drafted for answer in answers) > 20


def test_a_server_that_never_answers_is_not_waited_for(target: LLM) -> None:
    """By the measured controller: what a draft is worth bounds the wait, and an overdue one is not waited for."""

    async def behave(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            await greeted(connection)
            async for _ in connection:
                pass

    with scripted(behave) as port:
        name = f"remote:127.0.0.1:{port}"
        answers = target.generate(PROMPTS, replace(PARAMS, speculation=name))
        assert remote(target, name).figures()["orders"] == len(PROMPTS)  # one in flight for each
    assert [answer.token_ids for answer in answers] == plain(target)


def test_an_address_without_a_server_is_no_error(target: LLM) -> None:
    with listen("127.0.0.1", 0) as sock:  # bound for as long as the test takes; it never answers
        answers = ask(target, f"remote:127.0.0.1:{sock.getsockname()[1]}")
    assert [answer.token_ids for answer in answers] == plain(target)


def test_an_address_where_nobody_listens_is_named_once(target: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with listen("127.0.0.1", 0) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    ask(target, f"remote:{address}")
    link = remote(target, f"remote:{address}").links[0]
    while not caplog.records:
        link._thread.join(0.01)
    link._thread.join(0.5)  # further attempts
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"no drafts from {address} yet, it is tried again: ConnectionRefusedError")


# ---- access and limits ----


def test_names_that_are_no_address_are_refused(target: LLM) -> None:
    for name in ("remote:", "remote:http://a", "remote:a b", "remote:a", "remote:a:b", "remote:a:1,b"):
        with pytest.raises(BadRequest, match="no address of a draft server"):
            target.generate("a", speculation=name)


def test_keys_are_checked_before_a_connection_is_accepted(
    small: LLM, target: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys.parse(f"one {hashlib.sha256(b'secret').hexdigest()} 2", "here")
    with running(small, DraftServeConfig(keys=keys)) as (_, port):
        name = f"remote:127.0.0.1:{port}"
        answers = ask(target, name)
        assert sum(answer.usage.drafted for answer in answers) == 0
        assert "HTTP 401: the API key is missing or wrong: targets send it from FORERUN_DRAFT_KEY" in caplog.text
        with pytest.raises(InvalidStatus, match="401"):
            connect(f"ws://127.0.0.1:{port}")
        with pytest.raises(InvalidStatus, match="403"):  # a page of a browser
            connect(f"ws://127.0.0.1:{port}", origin="https://example.org", additional_headers=bearer("secret"))  # type: ignore[arg-type]
        monkeypatch.setenv("FORERUN_DRAFT_KEY", "secret")
        target.engine.speculator.drafter_pool.remove(name)
        answers = ask(target, name)
        drafted = [answer.usage.drafted for answer in answers]
        assert sum(count > 0 for count in drafted) == 2, drafted  # the key's limit
    assert [answer.token_ids for answer in answers] == plain(target)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_another_vocabulary_is_refused_by_name(small: LLM, tiny_folder: Callable[[str], Path]) -> None:
    with running(small) as (_, port), connect(f"ws://127.0.0.1:{port}") as socket:
        socket.send(encode(Hello(tiny.VOCAB, bytes(16))))
        refused = decode(socket.recv(decode=False))
        assert isinstance(refused, Refused) and "the tokens of" in refused.reason
        skip: dict[str, Any] = {"skip_tokenizer_init": True, "quiet": True, "max_model_len": 512, "threads": 1}
        with (
            LLM(str(tiny_folder("llama")), **skip) as llm,
            pytest.raises(BadRequest, match="are others than the target"),
        ):
            llm.generate([[1, 2]], speculation=f"remote:127.0.0.1:{port}")


def test_orders_beyond_the_limits_are_refused_one_by_one(small: LLM) -> None:
    digest = vocabulary_digest(small.engine.tokenizer)
    with running(small, DraftServeConfig(max_sequences=1)) as (_, port), connect(f"ws://127.0.0.1:{port}") as socket:

        def send(order: DraftOrder) -> Any:
            socket.send(encode(order, tiny.VOCAB))
            return decode(socket.recv(decode=False), tiny.VOCAB)

        socket.send(encode(Hello(tiny.VOCAB, digest)))
        assert isinstance(decode(socket.recv(decode=False)), Welcome)
        assert isinstance(send(DraftOrder(1, 1, 5, 0, [1])), Forgot)  # it builds on tokens that were never sent
        assert isinstance(send(DraftOrder(1, 2, 0, 0, [1, 2, 3])), Tree)
        assert isinstance(send(DraftOrder(2, 1, 0, 0, [1])), Refused)  # one sequence at once
        long = send(DraftOrder(1, 3, 3, 0, [1] * 600))
        assert isinstance(long, Refused) and "the context is 512" in long.reason
        tree = send(DraftOrder(1, 4, 2, 0, [4], depth=2, nodes=3, min_prob=0.0, top_tokens=4, temperature=0.05))
        assert isinstance(tree, Tree) and 0 < len(tree.tokens) <= 3 and len(tree.distributions[-1].tokens) <= 4
        socket.send(b"\xff nonsense")
        with pytest.raises(ConnectionClosed):
            socket.recv()
