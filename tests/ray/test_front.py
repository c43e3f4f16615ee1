"""The front over replicas in this process: the same answers as one server, limits over all, and what a loss does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forerun import LLM
from forerun.ray.call import ReplicaCall, rank
from forerun.ray.front import ReplicaLost, create_front
from forerun.ray.replica import EngineReplica, ReplicaSettings
from forerun.serve import ServeConfig
from forerun.serve.admission import AdmissionControl
from forerun.serve.config import ApiKeys
from tests.serve.common import ASKED, CHAT, ENDLESS, NAME, Holding, Running, error, running, serving, slowed, wait_for


class LocalReplicas:
    """Replicas of this process, by the rank of a request's session or text."""

    def __init__(self, engines: dict[str, EngineReplica]) -> None:
        self.engines = engines
        self.calls: list[tuple[str, str]] = []  # replica and path
        self.lose_after: dict[str, int] = {}  # by replica: so many messages

    def names(self) -> list[str]:
        return sorted(self.engines)

    async def stream(self, call: ReplicaCall) -> AsyncIterator[tuple[str, list[Any]]]:
        name = call.only or rank(call.session or call.prompt[:40], self.names())[0]
        self.calls.append((name, call.scope["path"]))
        sent = 0
        async for part in self.engines[name].respond(call):
            if sent >= self.lose_after.get(name, 10**9):
                del self.lose_after[name]
                raise ReplicaLost
            sent += 1
            yield part


@pytest.fixture(scope="module")
def engines(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = {}
    disk = tmp_path_factory.mktemp("shared")
    options = {"dtype": "float32", "threads": 1, "quiet": True, "kv_cache_tokens": 8192, "max_num_seqs": 16}
    for name in ("one", "two"):
        llm = {"model": str(tiny_folder("qwen3")), "disk": str(disk)} | options
        made[name] = EngineReplica(ReplicaSettings(llm, ServeConfig(NAME, max_request_s=60), 64), name)
    yield made
    for engine in made.values():
        engine.close()


@contextmanager
def fronted(engines: dict[str, EngineReplica], limit: int = 64, **config: Any) -> Iterator[tuple[Running, Any]]:
    replicas, settings = LocalReplicas(engines), ServeConfig(NAME, **config)
    app = create_front(replicas, settings, AdmissionControl(limit, 0, settings.keys))
    first: LLM = engines["one"].llm
    with serving(first, app, settings) as made:
        yield made, replicas


def of_replica(engines: dict[str, EngineReplica], name: str) -> dict[str, Any]:
    """A request that goes to one of them."""
    texts = (f"Ship {number}" for number in range(100))
    for text in texts:
        if rank(("user" + text)[:40], sorted(engines))[0] == name:
            return {"messages": [{"role": "user", "content": text}]}
    raise AssertionError("no text is ranked so")


def test_answers_and_streams_are_those_of_one_server(engines: Any):
    with fronted(engines) as (made, replicas), running(engines["two"].llm) as served:
        whole = made.client().chat.completions.create(**ASKED)
        assert (
            whole.choices[0].message.content
            == served.client().chat.completions.create(**ASKED).choices[0].message.content
        )
        parts = [
            part.choices[0].delta.content or "" for part in made.client().chat.completions.create(**ASKED, stream=True)
        ]
        assert "".join(parts) == whole.choices[0].message.content
        response = made.post(CHAT, ASKED, headers={"x-request-id": "mine"})
        assert response.headers.get_list("x-request-id") == ["mine"]
        assert len({name for name, path in replicas.calls if path == CHAT}) == 1  # all have the same prompt
        for path in ("/v1/models", "/forerun/about", "/", "/page/app.js", "/openapi.json", "/v1/nothing"):
            mine, theirs = made.get(path), served.get(path)
            assert (mine.status_code, mine.headers["content-type"]) == (
                theirs.status_code,
                theirs.headers["content-type"],
            )
        bad = made.post(CHAT, {"messages": 7})
        assert error(bad, 400) == error(served.post(CHAT, {"messages": 7}), 400)
        assert made.get("/health").json() == {"status": "ok"} and made.get("/ready").json() == {"status": "ready"}
        assert httpx.head(made.url + "/ready").status_code == 200


def test_keys_and_limits_hold_over_all_replicas(engines: Any):
    keys = ApiKeys.parse("\n".join(f"{n} {hashlib.sha256(n.encode()).hexdigest()} 2" for n in ("ann", "bob")), "test")
    ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    patches = [slowed(engine.llm)[0] for engine in engines.values()]
    with fronted(engines, keys=keys, max_body_bytes=10_000) as (made, replicas):
        error(made.post(CHAT, ASKED), 401)
        error(made.post(CHAT, ASKED, headers={"Authorization": "Bearer no"}), 401)
        error(made.post(CHAT, {"messages": "x" * 20_000}, headers=ann), 413)
        assert not replicas.calls  # nothing of these reaches a replica
        holding = [Holding(made, ENDLESS | of_replica(engines, name), headers=ann) for name in ("one", "two")]
        assert {name for name, _ in replicas.calls} == {"one", "two"}
        assert error(made.post(CHAT, ASKED, headers=ann), 429)["code"] == "key_limit"
        assert made.post(CHAT, ASKED, headers=bob).status_code == 200
        assert "3 answers" in error(made.post(CHAT, ASKED | {"n": 3}, headers=bob), 400)["message"]
        for patch in patches:
            patch.undo()
        assert all(held.join() for held in holding)
        assert made.post(CHAT, ASKED, headers=ann).status_code == 200


def test_a_full_front_and_one_that_drains_refuse(engines: Any):
    patch, _ = slowed(engines["one"].llm)
    with fronted(engines, limit=1) as (made, _):
        held = Holding(made, ENDLESS | of_replica(engines, "one"))
        assert error(made.post(CHAT, ASKED), 429)["code"] == "queue_full"
        made.app.state.admission.draining = True  # the server goes on as long as the answer is open
        assert error(made.post(CHAT, ASKED), 503)["code"] == "draining"
        assert made.get("/ready").status_code == 503
        patch.undo()
        held.join()


def test_a_client_that_leaves_frees_its_replica(engines: Any):
    patch, _ = slowed(engines["two"].llm)
    with fronted(engines) as (made, _):
        body = ENDLESS | of_replica(engines, "two")
        with httpx.stream("POST", made.url + CHAT, json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            wait_for(lambda: bool(engines["two"].llm.engine.scheduler.running))
        wait_for(lambda: not engines["two"].llm.engine.scheduler.running)
        wait_for(lambda: made.app.state.admission.num_open == 0)
    patch.undo()


@pytest.mark.parametrize("whole", [False, True])
def test_a_client_that_leaves_before_its_response_is_no_failure_of_the_server(
    whole: bool, engines: Any, caplog: pytest.LogCaptureFixture
):
    """In the middle of its body, or while it waits."""
    caplog.set_level("INFO", "forerun.serve")
    body = json.dumps(ENDLESS | {"stream": False} | of_replica(engines, "two")).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Request-Id: left\r\n"
    patch, _ = slowed(engines["two"].llm)
    with fronted(engines) as (made, _):
        with socket.create_connection(("127.0.0.1", made.port)) as client:
            client.sendall(f"{head}Content-Length: {len(body) + (not whole)}\r\n\r\n".encode() + body)
            if whole:
                wait_for(lambda: bool(engines["two"].llm.engine.scheduler.running))
        wait_for(lambda: any(record.getMessage().startswith("left ") for record in caplog.records))
        wait_for(lambda: not engines["two"].llm.engine.scheduler.running)
        assert made.post(CHAT, ASKED).status_code == 200
    patch.undo()
    own = [record.getMessage() for record in caplog.records if record.getMessage().startswith("left ")]
    assert own and all(" 499 " in line for line in own), own


def test_a_request_whose_replica_is_lost_before_it_began_is_answered_by_another(engines: Any):
    with fronted(engines) as (made, replicas):
        replicas.lose_after = {"one": 0}
        body = ASKED | of_replica(engines, "one")
        assert made.post(CHAT, body).status_code == 200
        assert len(replicas.calls) == 2


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_a_stream_whose_replica_is_lost_ends_with_an_error(engines: Any, path: str):
    body = ASKED | {"stream": True, "max_tokens": 40} | of_replica(engines, "one")
    if path == "/v1/responses":
        body = {"model": NAME, "input": "a", "stream": True, "max_output_tokens": 40}
    with fronted(engines) as (made, replicas):
        replicas.lose_after = dict.fromkeys(engines, 1)
        with httpx.stream("POST", made.url + path, json=body, timeout=30) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        last = json.loads(lines[-1].removeprefix("data: "))
        found = last if path == "/v1/responses" else last["error"]
        assert found["code"] == "replica_lost" and "send it again" in found["message"]
        assert made.app.state.admission.num_open == 0
        assert made.post(CHAT, ASKED).status_code == 200


def test_a_turn_of_a_session_is_not_sent_twice(engines: Any):
    with fronted(engines) as (made, replicas):
        replicas.lose_after = dict.fromkeys(engines, 0)
        body = ASKED | {"forerun": {"session": "once"}}
        assert error(made.post(CHAT, body), 503)["code"] == "replica_lost" and len(replicas.calls) == 1


def test_sessions_stay_with_their_replica_and_all_are_listed(engines: Any):
    with fronted(engines) as (made, replicas):
        for turn in (1, 2):
            for name in ("a", "b", "c", "d"):
                told = made.post(CHAT, ASKED | {"forerun": {"session": name}}).json()
                assert told["forerun"]["session"]["turn"] == turn
        where = {rank(f" {name}", sorted(engines))[0] for name in "abcd"}
        assert {name for name, path in replicas.calls if path == CHAT} == where == {"one", "two"}
        listed = [entry["name"] for entry in made.get("/forerun/sessions").json()["data"]]
        assert [name for name in listed if name in "abcd"] == list("abcd")
        assert httpx.delete(f"{made.url}/forerun/sessions/a", timeout=30).status_code == 200
        assert "a" not in [entry["name"] for entry in made.get("/forerun/sessions").json()["data"]]


def test_stored_responses_are_found_wherever_they_are(engines: Any):
    with fronted(engines) as (made, _):
        stored = [
            made.post("/v1/responses", {"model": NAME, "input": text, "max_output_tokens": 4}).json() for text in "abcd"
        ]
        for response in stored:
            assert made.get(f"/v1/responses/{response['id']}").json()["id"] == response["id"]
            more = {"model": NAME, "input": "b", "previous_response_id": response["id"], "max_output_tokens": 4}
            assert made.post("/v1/responses", more).status_code == 200
        error(made.get("/v1/responses/resp_none"), 404)


def test_metrics_of_all_replicas_are_in_one_place(engines: Any):
    with fronted(engines) as (made, _):
        for name in ("one", "two"):
            assert made.post(CHAT, ASKED | of_replica(engines, name)).status_code == 200
        made.post(CHAT, {}, headers={"Host": "evil.example"})
        text = made.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE forerun_requests_total ") == 1
    counted = {
        (s.labels["replica"], s.labels["status"])
        for s in families["forerun_requests"].samples
        if s.name.endswith("total")
    }
    assert {("one", "200"), ("two", "200"), ("front", "421")} <= counted
    assert sum(replica == "front" for replica, _ in counted) == 1  # what was forwarded is counted once
    running = {sample.labels["replica"] for sample in families["forerun_sequences_running"].samples}
    assert running == {"one", "two"}
    assert families["forerun_replicas"].samples[0].value == 2


def test_a_replica_that_does_not_answer_is_left_out_of_what_all_are_asked(engines: Any):
    with fronted(engines) as (made, replicas):
        replicas.lose_after = {"two": 0}
        text = made.get("/metrics").text
        assert 'replica="one"' in text and 'forerun_sequences_running{replica="two"}' not in text


def test_health_of_a_replica(engines: Any):
    engine = engines["one"]
    engine.check_health()
    engine._open, before = 1, engine._active_at
    engine._active_at = float("-inf")
    with pytest.raises(Exception, match="none has gone on"):
        engine.check_health()
    engine._open, engine._active_at = 0, before


async def test_leaving_a_response_cancels_it(engines: Any):
    engine = engines["one"]
    body = json.dumps(ENDLESS).encode()
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": CHAT, "raw_path": CHAT.encode()}
    scope |= {"query_string": b"", "scheme": "http", "headers": [(b"content-type", b"application/json")]}
    responding = engine.respond(ReplicaCall(scope | {"state": {"key": None}}, body))
    assert (await anext(responding))[0] == "one"
    await responding.aclose()
    for _ in range(2000):
        if not engine.llm.engine.scheduler.running:
            break
        await asyncio.sleep(0.005)
    assert not engine.llm.engine.scheduler.running and not engine._open
