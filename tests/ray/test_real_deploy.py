"""Replicas on a real Ray that come and go with the queue, that cannot start, and that `serve deploy` has started."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from forerun.errors import ForerunError
from forerun.ray.call import known_replicas
from forerun.ray.cluster import APPLICATION, Scale
from forerun.ray.service import replica_service
from forerun.serve import ServeConfig
from tests.prefill.test_engine_prefill import prompt, random_profile
from tests.serve.common import ASKED, CHAT, ENDLESS, NAME, serving, wait_for

CHANGE_S = 240.0  # for replicas to come and go, on a machine that is busy
TINY = {"dtype": "float32", "threads": 1, "quiet": True, "kv_cache_tokens": 8192}
DEPLOY = """
proxy_location: EveryNode
http_options: {{host: 127.0.0.1, port: {port}, request_timeout_s: 600}}
applications:
  - name: forerun
    route_prefix: /
    import_path: forerun.ray.deploy:application
    args: {args}
"""


def test_replicas_come_with_the_queue_and_go_without(tiny_folder: Callable[[str], Path]):
    llm, config = {"model": str(tiny_folder("qwen3")), "max_num_seqs": 4} | TINY, ServeConfig(NAME)
    scale = Scale(1, max_replicas=2, cpus=0.5, target_open=2, upscale_s=0.0, downscale_s=0.0)
    with (
        replica_service(llm, config, scale, None) as service,
        serving(None, service.app, config) as made,  # type: ignore[arg-type]
    ):
        assert len(known_replicas(APPLICATION)) == 1
        stop = threading.Event()

        async def user(client: httpx.AsyncClient) -> None:
            while not stop.is_set():
                assert (await client.post(made.url + CHAT, json=ENDLESS, timeout=CHANGE_S)).status_code == 200

        async def users() -> None:
            async with httpx.AsyncClient() as client:
                await asyncio.gather(*(user(client) for _ in range(8)))

        load = threading.Thread(target=lambda: asyncio.run(users()))
        load.start()
        try:
            wait_for(lambda: len(known_replicas(APPLICATION)) == 2, CHANGE_S)
        finally:
            stop.set()
            load.join()
        wait_for(lambda: len(known_replicas(APPLICATION)) == 1, CHANGE_S)
        assert made.post(CHAT, ASKED).status_code == 200


def command(folder: Path, *options: str) -> list[str]:
    """`forerun serve` over replicas, as a process of its own: how to print their lines Ray reads when imported."""
    own = ["--dtype", "float32", "--threads", "1", "--port", "0", "--name", NAME]
    return [sys.executable, "-m", "forerun", "serve", "--model", str(folder), *own, *options]


def test_replicas_that_cannot_start_are_one_line_and_nothing_is_left(tiny_folder: Callable[[str], Path]):
    asked = command(tiny_folder("qwen3"), "--replicas", "1", "--kv-cache-tokens", "16")
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=CHANGE_S)
    why = "error: the replicas did not start: kv_cache_tokens is 16, less than two pages of 16\nhint: raise it\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", why)


def test_the_log_of_replicas_has_a_line_of_each_request_and_nothing_else(
    tiny_folder: Callable[[str], Path], tmp_path: Path
):
    """As objects, with the replica's name; and of a server that ends as it was asked to no line of Ray's."""
    asked = command(tiny_folder("qwen3"), "--replicas", "2", "--kv-cache-tokens", "2048", "--log-format", "json")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(asked, stdout=log, stderr=log)
    lines = list[str]()

    def written() -> list[str]:
        lines[:] = (tmp_path / "log").read_text().splitlines()
        return lines

    try:
        wait_for(lambda: any(" is ready at " in line for line in written()), CHANGE_S)
        url = lines[0].partition(" is ready at ")[2].partition("/v1")[0]
        ids = [f"ann-{number}" for number in range(12)]
        for name in ids:
            assert httpx.post(url + CHAT, json=ASKED, headers={"x-request-id": name}, timeout=60).status_code == 200
        wait_for(lambda: len(written()) == 1 + len(ids), CHANGE_S)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(CHANGE_S) == 0
    found = [json.loads(line) for line in written()[1:]]
    assert sorted(entry["request_id"] for entry in found) == sorted(ids) and all(entry["replica"] for entry in found)


def test_a_disk_tier_that_cannot_be_had_starts_no_ray(tiny_folder: Callable[[str], Path], tmp_path: Path):
    wrong = tmp_path / "file"
    wrong.write_text("no folder")
    llm = {"model": str(tiny_folder("qwen3")), "max_num_seqs": 4, "disk": str(wrong)} | TINY
    with (
        pytest.raises(ForerunError, match="the disk tier cannot use"),
        replica_service(llm, ServeConfig(NAME), Scale(1, cpus=0.5), None),
    ):
        pass
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def deployed(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an application that the command `serve deploy` has started from a YAML file."""
    folder, own = tiny_folder("qwen2"), tmp_path_factory.mktemp("deploy")
    random_profile("self", folder).save(own / "profile")
    (own / "keys").write_text("".join(f"{n} {hashlib.sha256(n.encode()).hexdigest()} 2\n" for n in ("ann", "bob")))
    args = {"model": str(folder), "prefill_profile": str(own / "profile"), "max_num_batched_tokens": 64} | TINY
    args |= {"replicas": 2, "cpus": 0.5, "max_num_seqs": 8, "model_name": NAME, "api_keys": str(own / "keys")}
    context = ray.init(
        address="local", num_cpus=2, include_dashboard=True, logging_level="error", object_store_memory=100 << 20
    )
    try:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        (own / "forerun.yaml").write_text(DEPLOY.format(port=port, args=json.dumps(args)))
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(own / "forerun.yaml")]
        subprocess.run([*command, "--address", f"http://{context.dashboard_url}"], check=True)
        wait_for(lambda: _state() == "RUNNING", CHANGE_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def _state() -> str:
    found = serve.status().applications.get("forerun")
    state = "" if found is None else str(found.status.value)
    assert state != "DEPLOY_FAILED", found
    return state


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_a_yaml_file_is_deployed_and_answers_with_keys_and_limits(deployed: str):
    assert httpx.get(f"{deployed}/ready", timeout=60).json() == {"status": "ready"}
    assert httpx.post(deployed + CHAT, json=ASKED, timeout=60).status_code == 401
    answer = httpx.post(deployed + CHAT, json=ASKED, headers=key("ann"), timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
    body = ENDLESS | {"messages": [{"role": "user", "content": "Who counts?"}]}
    with (
        httpx.stream("POST", deployed + CHAT, json=body, headers=key("ann"), timeout=60) as first,
        httpx.stream("POST", deployed + CHAT, json=body, headers=key("ann"), timeout=60) as second,
    ):
        assert first.status_code == second.status_code == 200
        refused = httpx.post(deployed + CHAT, json=ASKED | {"n": 2}, headers=key("ann"), timeout=60)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "key_limit"
        assert httpx.post(deployed + CHAT, json=ASKED, headers=key("bob"), timeout=60).status_code == 200
    # both clients have gone: their places are free again
    asked = ASKED | {"n": 2, "temperature": 1}

    def free() -> bool:
        return httpx.post(deployed + CHAT, json=asked, headers=key("ann"), timeout=60).status_code == 200

    wait_for(free, CHANGE_S)


def test_provisional_text_comes_through(deployed: str):
    own: dict[str, Any] = {"prefill": "provisional", "statistics": True, "ignore_eos": True}
    body = {"model": NAME, "prompt": prompt(0, 1750), "temperature": 0, "max_tokens": 12, "stream": True}
    url, ann = f"{deployed}/v1/completions", key("ann")
    with httpx.stream("POST", url, json=body | {"forerun": own}, headers=ann, timeout=120) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    events = [chunk["forerun"] for chunk in map(json.loads, lines) if "forerun" in chunk]
    kinds = {event.get("event") for event in events}
    assert "provisional" in kinds and kinds & {"confirm", "retract"}
    text = "".join(choice["text"] for chunk in map(json.loads, lines) for choice in chunk.get("choices", ()))
    exact = body | {"stream": False, "forerun": {"ignore_eos": True}}
    assert httpx.post(url, json=exact, headers=ann, timeout=120).json()["choices"][0]["text"] == text


def test_metrics_of_both_replicas_are_there(deployed: str):
    found = httpx.get(f"{deployed}/metrics", headers=key("ann"), timeout=60).text
    assert found.count("\nforerun_sequences_running{") == 2


def test_the_log_is_written_as_before_once_the_router_is_imported():
    code = "import logging; logging.basicConfig(); root = logging.getLogger(); before = list(root.handlers), root.level"
    code += "; import forerun.ray.router; assert (root.handlers, root.level) == before, root.handlers"
    subprocess.run([sys.executable, "-c", code], check=True)
