"""Refusals, disconnects, queueing, draining, and the limits of a server."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest
from forerun.serve.config import ServeConfig
from forerun.serve.listening import listen
from forerun.serve.server import MAX_ARENAS
from tests.serve.common import ASKED, CHAT, ENDLESS, NAME, Holding, Running, error, running, slowed, wait_for


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"forerun": {"prefil": "exact"}}, "forerun.prefil"),
        ({"model": 7}, "model"),
    ],
)
def test_wrong_types_and_unknown_fields(served: Running, change: dict[str, Any], param: str):
    found = error(served.post(CHAT, ASKED | change), 400)
    assert found["type"] == "invalid_request_error" and found["param"].startswith(param)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"n": 0}, "n is 0"),
        ({"n": 10**12}, "wants 1000000000000 answers"),
        ({"n": 256, "temperature": 1, "max_tokens": 1}, None),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 10**9}, "max_tokens is 1000000000"),
        ({"stop": [""]}, "stop strings"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0"),
        ({"logit_bias": {"x": 1}}, "no token id"),
        ({"logit_bias": {"99999": 1}}, "99999"),
        ({"stream_options": {"include_usage": True}}, "stream is not true"),
        ({"response_format": {"type": "json_schema"}}, "no json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "schema"),
        ({"forerun": {"speculation": "magic"}}, "magic"),
        ({"forerun": {"speculation": "magic"}}, "magic"),
        ({"forerun": {"prefill": "speculative"}}, "needs a profile"),
        ({"messages": [{"role": "user", "content": "ship " * 4000}]}, "the context holds 2048"),
    ],
)
def test_values_out_of_bounds(served: Running, change: dict[str, Any], words: str | None):
    response = served.post(CHAT, ASKED | change)
    if words is None:  # within the limits of the library and of this server's queue
        assert response.status_code == 200 and len(response.json()["choices"]) == 256
        return
    found = error(response, 400)
    assert words in found["message"] and found["hint"] in found["message"]


def test_an_answer_without_a_limit_has_a_quarter_of_the_pool(
    llm: LLM, served: Running, monkeypatch: pytest.MonkeyPatch
):
    """Whatever the context holds; one that is named is kept."""
    asked: list[int] = []
    request = llm.driver.request

    def seen(ids: list[int], params: SamplingParams, *more: Any, **named: Any) -> Any:
        asked.append(params.max_tokens)
        return request(ids, replace(params, max_tokens=2), *more, **named)

    monkeypatch.setattr(llm.driver, "request", seen)
    monkeypatch.setattr(type(llm.engine.config), "capacity", 1000)
    for limit in ({"max_tokens": None}, {"max_tokens": 700}, {"max_tokens": None, "max_completion_tokens": 600}):
        assert served.post(CHAT, ASKED | limit).status_code == 200
    assert asked == [250, 700, 600]


@pytest.mark.parametrize("ids", [[10**40, -1], [5, 10**6], [-3]])
def test_token_ids_that_no_vocabulary_has(served: Running, ids: list[int]):
    """Also where the prompt's text comes back, which is made before the request is checked."""
    for echo in (False, True):
        body = {"model": NAME, "prompt": ids, "max_tokens": 4, "echo": echo, "logprobs": 2}
        assert "vocabulary" in error(served.post("/v1/completions", body), 400)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": "\xff\xfe"}',
        b"[" * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        json.dumps(ASKED | {"messages": [{"role": "user", "content": "\ud800"}]}).encode(),
        json.dumps(ASKED | {"forerun": {"speculation": "\ud800"}}).encode(),
        json.dumps(ASKED | {"temperature": float("nan")}).encode(),
    ],
)
def test_bodies_that_are_no_request(served: Running, body: bytes):
    error(served.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)
    assert served.post(CHAT, ASKED).status_code == 200


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "required"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"stop": 5}, "stop", "a valid string or a valid list"),
        ({"tool_choice": "all"}, "tool_choice", "'none', 'auto' or 'required' or an object"),
        ({"forerun": {"prefill": {"mode": "exact", "x": 1}}}, "forerun.prefill.x", "not supported"),
        ({"forerun": {"session": ""}}, "forerun.session", "at least 1 character"),
        ({"forerun": {"session": ".."}}, "forerun.session", "cannot be called .."),
        ({"forerun": None}, "forerun", "an object"),
    ],
)
def test_errors_name_the_place_in_the_request(served: Running, change: Any, param: str, words: str):
    """Not the place in the schema, which has a name for each type of a union."""
    found = error(served.post(CHAT, ASKED | change), 400)
    assert found["param"] == param and found["message"].startswith(param) and words in found["message"]


@pytest.mark.parametrize("given", [{"budget": 0.5}, {"mode": "exact", "quality": 0.9}, {"allow_exact": True}])
def test_what_exact_prefill_would_ignore_is_refused(served: Running, given: dict[str, Any]):
    found = error(served.post(CHAT, ASKED | {"forerun": {"prefill": given}}), 400)
    assert list(given)[-1] in found["message"] and "is about drafted prompts" in found["message"]
    assert "speculative or provisional" in found["hint"]
    assert served.post(CHAT, ASKED | {"forerun": {"prefill": {"mode": "exact"}}}).status_code == 200


def test_other_media_types_are_refused(served: Running):
    """A page of another origin can send text/plain without asking; it must not reach the model."""
    error(served.post(CHAT, content=json.dumps(ASKED), headers={"content-type": "text/plain"}), 400)


def test_what_is_not_there(served: Running):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'") as caught:
        served.client().chat.completions.create(**ASKED | {"model": "gpt-9"})
    assert caught.value.code == "model_not_found"
    error(served.get("/v1/models/gpt-9"), 404)
    assert not error(served.get("/v1/nothing"), 404)["hint"]
    for asked, there in (("/chat/completions", CHAT), ("/v1/v1/messages", "/v1/messages"), ("/models", "/v1/models")):
        assert error(served.post(asked, ASKED), 404)["hint"] == f"ask at {there}"
    assert error(served.get(CHAT), 405)["code"] == "method_not_allowed"
    assert "embedding model" in error(served.post("/v1/embeddings", {"model": NAME, "input": "x"}), 501)["message"]


def test_drafters_that_take_long_to_make_are_prepared_at_the_start(llm: LLM, tiny_folder: Any):
    asked = ASKED | {"forerun": {"speculation": {"drafter": "self"}}}
    with LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True) as fresh:
        with running(fresh) as made:
            assert "not prepared the drafter self" in error(made.post(CHAT, asked), 400)["message"]
            free = ASKED | {"forerun": {"speculation": "lookup"}, "response_format": {"type": "json_object"}}
            assert made.post(CHAT, free).status_code == 200
        with running(fresh, drafters=("self",)) as made:
            assert made.post(CHAT, asked).status_code == 200


def test_the_document_names_the_model(served: Running):
    schemas = served.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == [NAME]


def test_bodies_too_large(llm: LLM):
    with running(llm, max_body_bytes=2000) as small:
        large = ASKED | {"user": "x" * 3000}
        assert "2,000 bytes" in error(small.post(CHAT, large), 413)["message"]

        def pieces() -> Iterator[bytes]:  # without a length that could be checked beforehand
            yield b'{"user": "'
            for _ in range(40):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        assert error(small.post(CHAT, content=pieces(), headers=headers), 413)["code"] == "body_too_large"
        assert small.post(CHAT, ASKED).status_code == 200


@pytest.mark.alone
def test_slow_senders_are_cut_off(llm: LLM):
    with running(llm, max_header_s=0.2, max_body_s=0.2) as hasty:
        with socket.create_connection(("127.0.0.1", hasty.port), timeout=5) as sock:
            sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
            assert sock.recv(100) == b""
        with socket.create_connection(("127.0.0.1", hasty.port), timeout=5) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b""
            while b"ok" not in received:
                received += sock.recv(1000)
            assert b"200 OK" in received
            sock.sendall(b"GET /hea")  # the second request of a connection must be as quick
            assert sock.recv(100) == b""
        with socket.create_connection(("127.0.0.1", hasty.port), timeout=5) as sock:
            sock.sendall(head(9) + b"{")
            assert b" 408 " in sock.recv(1000)
        assert hasty.post(CHAT, ASKED).status_code == 200


def head(length: int) -> bytes:
    kind = "Content-Type: application/json"
    return f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_pages(llm: LLM, stream: bool):
    llm.clear_cache()
    with running(llm) as made:
        engine = llm.engine
        patch, steps = slowed(llm)
        cancelled: list[int] = []  # steps begun by then
        cancel = engine.cancel

        def noted(request: int) -> None:
            cancelled.append(len(steps))
            cancel(request)

        patch.setattr(engine, "cancel", noted)
        with socket.create_connection(("127.0.0.1", made.port)) as sock:
            body = json.dumps(ENDLESS | {"stream": stream}).encode()
            sock.sendall(head(len(body)) + body)
            wait_for(lambda: bool(engine.scheduler.running) and engine.scheduler.running[0].num_generated > 5)
        wait_for(lambda: engine.idle and made.app.state.admission.num_open == 0)
        assert len(steps) <= cancelled[0] + 1 < 900  # gone in the step after the one that was running
        llm.clear_cache()
        assert engine.pool.used == 0
        patch.undo()


@pytest.fixture(scope="module")
def narrow(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True, max_num_seqs=1) as made:
        yield made


def test_a_full_queue_has_a_retry_after(narrow: LLM):
    patch, _ = slowed(narrow)
    with running(narrow, max_queue=0) as made:
        one = Holding(made)
        response = made.post(CHAT, ASKED)
        assert "the limit is 1" in error(response, 429)["message"]
        assert 1 <= int(response.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            made.client().chat.completions.create(**ASKED)
        assert error(made.post(CHAT, ASKED | {"n": 2}), 400)["hint"] == "lower n"
        assert one.join().endswith("data: [DONE]\n\n")
        wait_for(lambda: made.app.state.admission.num_open == 0)
        assert made.post(CHAT, ASKED).status_code == 200
    patch.undo()


def test_draining_lets_open_answers_end(llm: LLM, slow: None):
    with running(llm) as made:
        assert made.get("/ready").status_code == 200
        assert [httpx.head(made.url + path).status_code for path in ("/health", "/ready")] == [200, 200]
        one = Holding(made)
        made.server.handle_exit(signal.SIGTERM, None)
        response = made.post(CHAT, ASKED)
        assert error(response, 503)["code"] == "draining" and "retry-after" in response.headers
        assert made.get("/ready").status_code == 503 and made.get("/health").status_code == 200
        assert one.join().endswith("data: [DONE]\n\n")
        wait_for(lambda: made.server.should_exit)


def test_draining_has_an_end(llm: LLM, slow: None):
    with running(llm, drain_s=0.2) as made:
        with httpx.stream("POST", made.url + CHAT, json=ENDLESS, timeout=30) as response:
            pieces = response.iter_text()
            next(pieces)
            made.server.handle_exit(signal.SIGTERM, None)
            with pytest.raises(httpx.RemoteProtocolError):
                for _ in pieces:
                    pass
        wait_for(lambda: llm.engine.idle)


def test_a_request_has_a_time_limit(llm: LLM, slow: None):
    with running(llm, max_request_s=0.3) as made:
        response = made.post(CHAT, ENDLESS | {"stream": False})
        assert error(response, 408)["code"] == "timeout" and response.headers["x-should-retry"] == "false"
        own = {"forerun": ENDLESS["forerun"]}
        with pytest.raises(openai.APIError, match="longer than this server allows"):
            list(made.client().chat.completions.create(**ASKED | {"max_tokens": 900, "stream": True}, extra_body=own))
        wait_for(lambda: llm.engine.idle)


def test_prompts_are_logged_only_where_asked(llm: LLM, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="forerun.serve")
    for wanted in (False, True):
        caplog.clear()
        with running(llm, log_prompts=wanted) as made:
            made.post(CHAT, ASKED)
            made.post(CHAT, ASKED | {"messages": [{"role": "user", "content": "the ships? " * 2000}]})
        assert ("the ships?" in caplog.text) is wanted and "prompt=" in caplog.text


@pytest.mark.parametrize(
    "wrong", [{"max_queue": -1}, {"max_body_bytes": 1.5}, {"max_request_s": 0}, {"cors_origins": ("a.example",)}]
)
def test_a_configuration_is_checked(wrong: dict[str, Any]):
    with pytest.raises(BadRequest):
        ServeConfig(NAME, **wrong)


def test_a_port_that_is_taken():
    with listen("127.0.0.1", 0) as sock, pytest.raises(BadRequest, match="cannot listen"):
        listen("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(BadRequest, match="cannot listen"):
        listen("256.1.1.1", 0)


def test_freed_memory_goes_back_to_the_system(served: Running):
    kept = [bytearray(100_000) for _ in range(2000)]  # below the size that malloc maps by itself
    last = kept.pop()
    before = psutil.Process().memory_info().rss
    del kept
    served.server._trimmed_bytes = 0
    served.server.trim_memory()
    assert psutil.Process().memory_info().rss < before - 100e6 and len(last) == 100_000


def test_threads_share_few_arenas():
    """In a process of its own: arenas that are there stay."""
    code = """
import ctypes, threading
from forerun.serve.server import MAX_ARENAS, limit_arenas
limit_arenas()
kept, barrier = [], threading.Barrier(8)
def work():
    barrier.wait()
    kept.append([bytearray(50_000) for _ in range(20)])
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 1 <= found.count("<heap nr=") <= MAX_ARENAS
