"""Two replicas of a tiny model on a real Ray, started by `forerun serve --replicas`'s own code: routing, sessions,
cancellation, a killed replica, replicas replaced under load."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from forerun.ray import cluster
from forerun.ray.call import known_replicas
from forerun.ray.cluster import APPLICATION, DEPLOYMENT, RayReplicas, Scale
from forerun.ray.replica import ReplicaSettings
from forerun.ray.service import ReplicaService, replica_service
from forerun.serve import ServeConfig
from tests.serve.common import ASKED, CHAT, ENDLESS, NAME, Running, serving, wait_for

WHOLE_S = 120.0  # for a replica to be started again, on a machine that is busy


@pytest.fixture(scope="module")
def served(
    tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, ReplicaService]]:
    llm = {"model": str(tiny_folder("qwen3")), "dtype": "float32", "threads": 1, "quiet": True, "max_num_seqs": 32}
    llm |= {"kv_cache_tokens": 16384, "disk": str(tmp_path_factory.mktemp("kv"))}
    config = ServeConfig(NAME)
    with (
        replica_service(llm, config, Scale(2, cpus=0.5), None) as service,
        serving(None, service.app, config) as made,  # type: ignore[arg-type]
    ):
        yield made, service


def document(number: int) -> str:
    return "".join(chr(97 + (number * 7 + at * at * (number + 3)) % 26) for at in range(500))


def streamed(number: int, tokens: int = 200) -> dict[str, Any]:
    return ENDLESS | {"max_tokens": tokens, "messages": [{"role": "user", "content": document(number)}]}


async def outcome(client: httpx.AsyncClient, url: str, number: int) -> str:
    """done, or the code of the error that ended the stream."""
    async with client.stream("POST", url + CHAT, json=streamed(number), timeout=120) as response:
        assert response.status_code == 200, await response.aread()
        last = ""
        async for line in response.aiter_lines():
            last = line or last
    return "done" if last == "data: [DONE]" else json.loads(last.removeprefix("data: "))["error"]["code"]


def running(made: Running) -> list[float]:
    lines = [line for line in made.get("/metrics").text.splitlines() if line.startswith("forerun_sequences_running{")]
    assert len(lines) == len(known_replicas(APPLICATION))
    return [float(line.split()[-1]) for line in lines]


def test_second_questions_reach_the_replica_that_holds_the_document(served: tuple[Running, ReplicaService]):
    made, _ = served

    def ask(number: int, question: str) -> Any:
        text = f"{document(number)} {question}"
        body = ASKED | {"messages": [{"role": "user", "content": text}]}
        return made.post(CHAT, body).json()["usage"]

    first = [ask(number, "What is this?") for number in range(20)]
    second = [ask(number, "And why is it so?") for number in range(20)]
    held = [u["prompt_tokens_details"]["cached_tokens"] > 0.7 * u["prompt_tokens"] for u in second]
    assert sum(held) >= 19 and all(u["prompt_tokens_details"]["cached_tokens"] < 100 for u in first)
    answered = [line for line in made.get("/metrics").text.splitlines() if line.startswith("forerun_answers_total{")]
    assert len(answered) == 2 and all(float(line.split()[-1]) >= 4 for line in answered)  # both have documents


def answered(made: Running) -> list[float]:
    """By each replica."""
    lines = [line for line in made.get("/metrics").text.splitlines() if line.startswith("forerun_answers_total{")]
    return [sum(float(line.split()[-1]) for line in lines if name in line) for name in known_replicas(APPLICATION)]


async def at_once(made: Running, texts: list[str]) -> list[float]:
    """How many of these prompts, sent at the same moment, each replica answered."""
    before = answered(made)
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=64), timeout=120) as client:
        asked = (ASKED | {"messages": [{"role": "user", "content": text}]} for text in texts)
        found = await asyncio.gather(*(client.post(made.url + CHAT, json=body) for body in asked))
    assert not [response.text for response in found if response.status_code != 200]
    return [now - then for now, then in zip(answered(made), before, strict=True)]


async def test_requests_that_come_at_once_are_spread_evenly(served: tuple[Running, ReplicaService]):
    shares = await at_once(served[0], [document(100 + number) for number in range(16)])
    assert sorted(shares) == [8, 8]


async def test_questions_about_one_new_document_that_come_at_once_go_to_one_replica(
    served: tuple[Running, ReplicaService],
):
    long = "The ship and the sea. " * 180  # as long as is worth three more open requests
    shares = await at_once(served[0], [f"{long} Question {number}?" for number in range(4)])
    assert sorted(shares) == [0, 4]


def test_sessions_stay_and_are_listed(served: tuple[Running, ReplicaService]):
    made, _ = served
    for turn in (1, 2, 3):
        for name in ("a", "b", "c"):
            told = made.post(CHAT, ASKED | {"forerun": {"session": name}}).json()["forerun"]["session"]
            assert told["turn"] == turn and (turn == 1 or told["served"]["pool"] > 0)
    assert {"a", "b", "c"} <= {entry["name"] for entry in made.get("/forerun/sessions").json()["data"]}


def test_a_client_that_leaves_frees_its_replica(served: tuple[Running, ReplicaService]):
    made, _ = served
    with httpx.stream("POST", made.url + CHAT, json=streamed(1, 1200), timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        wait_for(lambda: sum(running(made)) == 1, 60)
    wait_for(lambda: sum(running(made)) == 0, 60)


async def test_a_killed_replica_disturbs_no_other_and_is_started_again(served: tuple[Running, ReplicaService]):
    made, _ = served
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=64)) as client:
        tasks = [asyncio.create_task(outcome(client, made.url, number)) for number in range(32)]
        while not all(await asyncio.to_thread(running, made)):
            await asyncio.sleep(0.02)
        victim = known_replicas(APPLICATION)[0]
        actor = ray.get_actor(f"SERVE_REPLICA::{APPLICATION}#{DEPLOYMENT}#{victim}", namespace="serve")
        ray.kill(actor, no_restart=True)
        found = await asyncio.gather(*tasks)
    assert set(found) <= {"done", "replica_lost"} and found.count("done") > 0
    wait_for(lambda: victim not in known_replicas(APPLICATION) and len(known_replicas(APPLICATION)) == 2, WHOLE_S)
    told = made.post(CHAT, ASKED | {"forerun": {"session": {"name": "a", "create": False}}}).json()
    assert told["forerun"]["session"]["turn"] == 4  # on disk, wherever it is now


def test_replicas_are_replaced_under_load_and_no_request_is_lost(served: tuple[Running, ReplicaService]):
    made, service = served
    before, found, stop = set(known_replicas(APPLICATION)), list[str](), threading.Event()

    async def user(client: httpx.AsyncClient, number: int) -> None:
        while not stop.is_set():
            found.append(await outcome(client, made.url, number))

    async def users() -> None:
        async with httpx.AsyncClient() as client:
            await asyncio.gather(*(user(client, number) for number in range(4)))

    load = threading.Thread(target=lambda: asyncio.run(users()))
    load.start()
    try:
        service.update()
    finally:
        stop.set()
        load.join()
    assert len(found) >= 4 and set(found) == {"done"}
    wait_for(lambda: len(known_replicas(APPLICATION)) == 2 and not before & set(known_replicas(APPLICATION)), WHOLE_S)
    told = made.post(CHAT, ASKED | {"forerun": {"session": {"name": "b", "create": False}}}).json()
    assert told["forerun"]["session"]["turn"] == 4


def test_replicas_that_cannot_be_replaced_leave_the_service_whole(
    served: tuple[Running, ReplicaService],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    made, service = served
    (wrong := tmp_path / "file").write_text("no folder")
    deploy, generation = cluster.deploy, service._settings.generation

    def with_a_wrong_folder(settings: ReplicaSettings, scale: Scale) -> RayReplicas:
        broken = replace(settings, llm=settings.llm | {"disk": str(wrong)})
        return deploy(settings if settings.generation == generation else broken, scale)

    monkeypatch.setattr(cluster, "deploy", with_a_wrong_folder)
    with caplog.at_level("ERROR", "forerun.serve"):
        service.update()
    assert "not replaced: the replicas did not start: the disk tier cannot use" in caplog.text
    assert "cannot be started again" not in caplog.text
    wait_for(lambda: len(known_replicas(APPLICATION)) == 2, WHOLE_S)
    assert all(made.post(CHAT, ASKED).status_code == 200 for _ in range(4))
