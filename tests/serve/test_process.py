"""`forerun serve` as a process of its own: killed in the middle of everything, started again, asked to leave."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import LLM, SamplingParams
from tests.serve.common import CHAT, ENDLESS, wait_for

pytestmark = pytest.mark.alone

QUESTION = "Who counts the ships that pass the light at night, and why? " * 4
GREEDY = SamplingParams(max_tokens=8)


@dataclass
class Process:
    handle: subprocess.Popen[str]
    url: str
    lines: list[str]

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + CHAT, json=body, timeout=30)


@contextmanager
def process(model: Path, disk: Path, *more: Any) -> Iterator[Process]:
    code = "from forerun.cli import main; main()"
    options = [
        "--model",
        model,
        "--name",
        "tiny",
        "--port",
        0,
        "--disk",
        disk,
        "--threads",
        1,
        "--kv-cache-tokens",
        8192,
    ]
    command = [sys.executable, "-c", code, "serve", *map(str, (*options, *more)), "--dtype", "float32"]
    handle = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert handle.stderr is not None

    def read(stream: Any) -> None:
        for line in stream:
            lines.append(line)

    reader = threading.Thread(target=read, args=(handle.stderr,))
    reader.start()
    try:
        wait_for(lambda: any("http://" in line for line in lines) or handle.poll() is not None, 60)
        found = re.search(r"(http://[\d.]+:\d+)/v1", "".join(lines))
        assert found, lines
        wait_for(lambda: _ready(found[1]), 60)
        yield Process(handle, found[1], lines)
    finally:
        handle.kill()
        handle.wait(60)
        reader.join(60)
        handle.stderr.close()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def ask(name: str | None = None, text: str = QUESTION, **more: Any) -> dict[str, Any]:
    own = {"speculation": "off"} | ({} if name is None else {"session": name})
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "forerun": own} | more


@pytest.fixture
def killed(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Counter[str]:
    """Turns that clients have heard the end of, by session, when the server was killed under load."""
    heard: Counter[str] = Counter()
    with process(tiny_folder("qwen3"), tmp_path) as made:

        def talk(name: str) -> None:
            while True:
                try:
                    answer = made.post(ask(name, f"{name}: {QUESTION}" if not heard[name] else "And then?"))
                    heard[name] = answer.json()["forerun"]["session"]["turn"]
                except httpx.HTTPError:
                    return

        talkers = [threading.Thread(target=talk, args=(f"s{number}",)) for number in range(6)]
        for talker in talkers:
            talker.start()
        wait_for(lambda: sum(heard.values()) > 30 and len(heard) == 6, 30)
        made.handle.send_signal(signal.SIGKILL)
        for talker in talkers:
            talker.join(30)
    assert made.handle.returncode == -signal.SIGKILL
    return heard


def test_what_was_promised_is_there_after_a_kill(
    killed: Counter[str], tiny_folder: Callable[[str], Path], tmp_path: Path
):
    folder = tiny_folder("qwen3")
    options: Any = {"dtype": "float32", "threads": 1, "quiet": True, "kv_cache_tokens": 8192}
    with LLM(str(folder), **options) as plain, LLM(str(folder), disk=tmp_path, **options) as llm:
        for name, turns in killed.items():
            session = llm.session(f" {name}", create=False)
            assert turns <= session.turns <= turns + 1
            read, fresh = (one.generate(session.tokens, GREEDY)[0] for one in (llm, plain))
            assert read.token_ids == fresh.token_ids and read.usage.served["disk"] > 0 == fresh.usage.cached_tokens
            killed[name] = session.turns
    with process(folder, tmp_path) as made:
        for name, turns in killed.items():
            session = made.post(ask(name, "And then?")).json()["forerun"]["session"]
            assert session["turn"] == turns + 1 and session["served"]["disk"] > 0
        _drop(made)
        _leave(made)
        assert not [line for line in made.lines if "WARNING" in line or "ERROR" in line or "Traceback" in line]


def _leave(made: Process) -> None:
    """Asked to end, it completes what is open, takes nothing new, and goes."""
    with httpx.stream("POST", made.url + CHAT, json=ENDLESS | {"max_tokens": 700}, timeout=60) as response:
        pieces = response.iter_text()
        text = next(pieces)
        made.handle.send_signal(signal.SIGTERM)
        wait_for(lambda: not _ready(made.url))
        refused = made.post(ask())
        assert refused.status_code == 503 and refused.headers["retry-after"]
        text += "".join(pieces)
    assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
    assert made.handle.wait(20) == 0


def _drop(made: Process) -> None:
    """Clients that go away leave nothing behind."""

    def figure(name: str) -> float:
        text = httpx.get(f"{made.url}/metrics", timeout=60).text
        return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])

    for _ in range(4):
        with httpx.stream("POST", made.url + CHAT, json=ENDLESS | {"max_tokens": 900}, timeout=60) as response:
            next(response.iter_text())
    wait_for(lambda: figure("forerun_sequences_running") == 0 == figure("forerun_answers_open"), 5)
    assert figure("forerun_pages_used") == figure("forerun_pages_cached")  # no sequence holds any of them


def test_it_is_ready_in_one_line_and_reads_keys_again(tiny_folder: Callable[[str], Path], tmp_path: Path):
    keys = tmp_path / "keys.txt"

    def allow(*names: str) -> None:
        keys.write_text("".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()}\n" for name in names))

    allow("ann")
    with process(tiny_folder("qwen3"), tmp_path / "kv", "--api-keys", keys, "--log-format", "json") as made:

        def status(key: str) -> int:
            return httpx.get(f"{made.url}/v1/models", headers={"x-api-key": key}, timeout=30).status_code

        memory = r"memory [\d.]+ GiB now \(weights .*, K/V up to .* 8,192 tokens\)"
        assert re.search(rf"tiny is ready at {made.url}/v1, page {made.url}/, {memory}", "".join(made.lines))
        assert (status("ann"), status("bob")) == (200, 401)
        allow("bob")
        made.handle.send_signal(signal.SIGHUP)
        wait_for(lambda: status("bob") == 200)
        assert status("ann") == 401
        keys.write_text("nonsense\n")
        made.handle.send_signal(signal.SIGHUP)
        wait_for(lambda: any("API keys are as before" in line for line in made.lines))
        assert status("bob") == 200
        assert json.loads(made.lines[-1])["level"] == "ERROR"
