"""A real server in a thread, on a free port, for the tests of this folder."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from forerun import LLM
from forerun.serve import ServeConfig, create_app
from forerun.serve.listening import listen
from forerun.serve.server import Server

NAME = "tiny"
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Who counts the ships?"}],
    "temperature": 0,
    "max_tokens": 8,
}
ENDLESS = ASKED | {"max_tokens": 900, "stream": True, "forerun": {"ignore_eos": True, "speculation": "off"}}


@dataclass
class Running:
    llm: LLM
    server: Server
    app: Any
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30, **options)

    def aclient(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        given = {"json": body} if body is not None else {}
        return httpx.post(f"{self.url}{path}", timeout=30, **given, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30, **options)


@contextlib.contextmanager
def running(llm: LLM, **config: Any) -> Iterator[Running]:
    settings = ServeConfig(NAME, **config)
    with serving(llm, create_app(llm, settings), settings) as made:
        yield made


@contextlib.contextmanager
def serving(llm: LLM, app: Any, settings: ServeConfig) -> Iterator[Running]:
    server, sock = Server(app, settings), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield Running(llm, server, app, sock.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response that has to be one."""
    assert response.status_code == status, response.text
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code", "hint"} and found["message"] and found["type"]
    return found


def slowed(llm: LLM) -> tuple[pytest.MonkeyPatch, list[float]]:
    """Steps of the engine, each made a little slower, so that an answer is not over before its client is gone."""
    patch, steps, step = pytest.MonkeyPatch(), [], llm.engine.step

    def slower() -> bool:
        steps.append(time.monotonic())
        time.sleep(0.005)
        return step()

    patch.setattr(llm.engine, "step", slower)
    return patch, steps


class Holding:
    """A client with a long answer open, reading it in a thread."""

    def __init__(self, made: Running, body: dict[str, Any] = ENDLESS, **options: Any) -> None:
        self.text, self.first = "", threading.Event()
        self._thread = threading.Thread(target=self._read, args=(made, body, options))
        self._thread.start()
        assert self.first.wait(60)

    def _read(self, made: Running, body: dict[str, Any], options: dict[str, Any]) -> None:
        with httpx.stream("POST", made.url + CHAT, json=body | {"max_tokens": 120}, timeout=60, **options) as response:
            for piece in response.iter_text():
                self.text += piece
                self.first.set()

    def join(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.text
