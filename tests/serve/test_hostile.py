"""Clients that send too much, too slowly, half or nonsense: each gets a response or is cut off; others go on."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest
from pydantic import BaseModel, ValidationError

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest
from forerun.serve.access import MAX_OBJECTS, MAX_VALUES
from forerun.serve.config import ServeConfig
from forerun.serve.dialects.messages import MessagesRequest
from forerun.serve.dialects.responses import ResponsesRequest
from forerun.serve.schema import ChatRequest, CompletionRequest
from tests.serve.common import ASKED, CHAT, ENDLESS, NAME, Running, error, running, slowed, wait_for

MB = 1 << 20


def connected(made: Running, seconds: float = 10) -> socket.socket:
    return socket.create_connection(("127.0.0.1", made.port), timeout=seconds)


def head(*lines: str, path: str = CHAT) -> bytes:
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines, "", ""]
    ).encode()


def received(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("announced", [True, False])
def test_a_hundred_megabytes_are_refused_before_they_are_read(served: Running, announced: bool):
    before, piece = psutil.Process().memory_info().rss, b"x" * MB
    line = f"Content-Length: {100 * MB}" if announced else "Transfer-Encoding: chunked"
    with connected(served) as sock:
        sock.sendall(head(line))
        for _ in range(0 if announced else 9):
            sock.sendall(b"%x\r\n%s\r\n" % (MB, piece))
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")  # 91 of them were not sent
        start = time.monotonic()
        with pytest.raises(OSError):  # a client that continues all the same is cut off
            while time.monotonic() < start + 30:
                sock.sendall(piece if announced else b"%x\r\n%s\r\n" % (MB, piece))
                time.sleep(0.005)
    assert psutil.Process().memory_info().rss - before < 40 * MB
    assert served.post(CHAT, ASKED).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [1] * 2000},
        {"messages": [{}] * 2000},
        {"messages": [{"role": "user", "content": [1] * 2000}]},
        {"stop": [1] * 2000},
        {"stop_token_ids": ["x"] * 2000},
        {"logit_bias": {str(number): "x" for number in range(2000)}},
        {"tools": [{}] * 2000},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_list_of_mistakes_is_one_mistake(served: Running, change: dict[str, Any]):
    """All errors of a body are made at once: millions of them took seconds and gigabytes."""
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate(ASKED | change)
    assert found.value.error_count() < 10
    error(served.post(CHAT, ASKED | change), 400)


def test_mistakes_in_other_dialects_are_few_too():
    bodies: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (CompletionRequest, {"prompt": [1.5] * 2000}),
        (MessagesRequest, {"messages": [{"role": "user", "content": [1] * 2000}], "max_tokens": 1}),
        (MessagesRequest, {"messages": ASKED["messages"], "system": [1] * 2000, "max_tokens": 1}),
        (ResponsesRequest, {"input": [1] * 2000}),
    ]
    for kind, body in bodies:
        with pytest.raises(ValidationError) as found:
            kind.model_validate(body)
        assert found.value.error_count() < 10


def test_more_objects_than_a_request_can_have_are_refused_before_they_are_read(served: Running):
    body = ASKED | {"messages": [{"role": "user", "content": ""}] * (MAX_OBJECTS + 1)}
    assert "objects" in error(served.post(CHAT, body), 413)["message"]


def test_more_values_than_a_request_can_have_are_refused_before_they_are_read(served: Running):
    """Four million token ids took the event loop a second, and four with `echo`."""
    assert "values" in error(served.post("/detokenize", {"tokens": [1] * (MAX_VALUES + 2)}), 413)["message"]
    assert served.post("/detokenize", {"tokens": [70] * 2000}).status_code == 200


def test_token_ids_beyond_the_context_are_not_echoed(served: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served.llm.tokenizer, "decode", None)
    body = {"model": NAME, "prompt": [[5], [5] * 100_000], "echo": True}
    assert "100000 tokens" in error(served.post("/v1/completions", body), 400)["message"]


def test_prompts_that_are_not_admitted_are_not_decoded(served: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served.llm.tokenizer, "decode", None)
    body = {"model": NAME, "prompt": [[5]] * 1000, "echo": True}
    assert "1000 answers" in error(served.post("/v1/completions", body), 400)["message"]


def test_of_a_long_prediction_only_its_start_is_tokenised(served: Running, monkeypatch: pytest.MonkeyPatch):
    encode, seen = served.llm.tokenizer.encode, list[int]()

    def counted(text: str, *args: Any, **options: Any) -> list[int]:
        seen.append(len(text))
        return encode(text, *args, **options)

    monkeypatch.setattr(served.llm.tokenizer, "encode", counted)
    prediction = {"type": "content", "content": "lamp " * 1_000_000}
    assert served.post(CHAT, ASKED | {"prediction": prediction}).status_code == 200
    longest = max(len(served.llm.tokenizer.token_bytes(token)) for token in range(served.llm.tokenizer.vocab_size))
    assert max(seen) <= served.llm.engine.config.max_model_len * longest


def test_the_text_of_tools_and_calls_counts_before_it_is_tokenised(served: Running, monkeypatch: pytest.MonkeyPatch):
    long = "lamp " * 220_000
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": long}}
    called = [*ASKED["messages"], {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "7"}
    monkeypatch.setattr(served.llm.tokenizer, "apply_chat_template", None)
    for change in ({"tools": [tool]}, {"messages": [*called, result]}):
        for own in ({}, {"forerun": {"session": "long"}}):
            assert "characters" in error(served.post(CHAT, ASKED | change | own), 400)["message"]
        counted = {"messages": ASKED["messages"], "tools": [], "model": NAME} | change
        assert "characters" in error(served.post("/tokenize", counted), 400)["message"]
    refused = error(served.post("/v1/completions", {"model": NAME, "prompt": [5] * 100_000}), 400)
    assert "100000 tokens" in refused["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "metadata", ["NaN", '"\\ud800"', *("[" * depth + "]" * depth for depth in range(930, 1000, 10))]
)
def test_what_a_response_returns_can_be_sent(served: Running, metadata: str, stream: bool):
    body = (
        f'{{"input": "Hi", "max_output_tokens": 2, "stream": {str(stream).lower()}, "metadata": {{"a": {metadata}}}}}'
    )
    response = served.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert response.status_code in ((200, 400) if "[" in metadata else (400,)), response.text
    assert "server_error" not in response.text and "failed to answer" not in response.text


def test_expect_100_continue_is_refused(served: Running):
    with connected(served) as sock:
        sock.sendall(head(f"Content-Length: {100 * MB}", "Expect: 100-continue", "Connection: close"))
        answer = received(sock)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in answer


def test_a_body_for_an_unknown_path_does_not_hold_the_connection(served: Running):
    with connected(served) as sock:
        sock.sendall(head("Content-Length: 1000", path="/nothing") + b"{")
        start = time.monotonic()
        assert received(sock).startswith(b"HTTP/1.1 404 ") and time.monotonic() < start + 30


@pytest.mark.alone
def test_one_byte_at_a_time_is_too_slow(llm: LLM):
    with running(llm, max_header_s=0.4, max_body_s=0.4) as made:
        cut: list[float] = []
        answers: list[bytes] = []

        def trickle(start: bytes) -> None:
            with connected(made) as sock:
                began = time.monotonic()
                try:
                    sock.sendall(start)
                    while time.monotonic() < began + 8:
                        time.sleep(0.03)
                        sock.sendall(b"a")
                        sock.settimeout(0.001)
                        try:
                            answers.append(sock.recv(4096))
                            break
                        except TimeoutError:
                            pass
                        sock.settimeout(10)
                except OSError:  # cut while a byte was on its way: what had been answered can still be read
                    with suppress(OSError):
                        answers.append(sock.recv(4096))
                cut.append(time.monotonic() - began)

        starts = [b"", b"POST ", head()[:-2] + b"X-Slow: "] * 8 + [head("Content-Length: 5000") + b"{"] * 8
        threads = [threading.Thread(target=trickle, args=(start,)) for start in starts]
        for thread in threads:
            thread.start()
        assert made.post(CHAT, ASKED).status_code == 200  # slow clients do not delay others
        for thread in threads:
            thread.join(20)
        assert len(cut) == len(starts) and max(cut) < 5
        assert sum(b" 408 " in answer for answer in answers) == 8
        assert made.app.state.admission.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_half_closed_connection_is_a_disconnect(llm: LLM, stream: bool):
    """A client that closes its sending side counts as disconnected: ASGI cannot tell the two apart."""
    patch, _ = slowed(llm)
    with running(llm) as made:
        body = json.dumps(ENDLESS | {"stream": stream}).encode()
        with connected(made) as sock:
            sock.sendall(head(f"Content-Length: {len(body)}") + body)
            wait_for(lambda: made.app.state.admission.num_open == 1 and bool(llm.engine.scheduler.running))
            sock.shutdown(socket.SHUT_WR)
            received(sock)
        wait_for(lambda: made.app.state.admission.num_open == 0 and llm.engine.idle)
        with connected(made) as sock:  # in the middle of a body
            sock.sendall(head("Content-Length: 1000") + b"{")
            sock.shutdown(socket.SHUT_WR)
            assert received(sock) == b""
        patch.undo()
        assert made.post(CHAT, ASKED).status_code == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\xff\xfe\x00\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET /v1/models/%ff%fe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: \xff\xfe\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET /v1/models HTTP/1.1\r\nHost: \xff\r\nConnection: close\r\n\r\n", b"4"),
        (head("Content-Length: 3", "Connection: close") + b"\xff\xfe{", b"400"),
        (head("Content-Length: -1"), b"400"),
        (head("Content-Length: 5", "Content-Length: 6"), b"400"),
        (head("Transfer-Encoding: chunked") + b"zz\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * MB + b"\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_http_or_no_utf8(served: Running, sent: bytes, status: bytes):
    with connected(served) as sock:
        with suppress(OSError):  # the server may close first
            sock.sendall(sent)
        answer = received(sock)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
    assert served.post(CHAT, ASKED).status_code == 200


def test_only_requests_for_its_own_host_name(llm: LLM):
    """A page whose own name was made to lead here (DNS rebinding) is not this server's page."""
    with running(llm) as made:
        port = made.port
        for host in ("localhost", f"127.0.0.1:{port}", f"LOCALHOST:{port}", "[::1]:80", "a.localhost", "localhost."):
            assert made.get("/v1/models", headers={"host": host}).status_code == 200
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
        ):
            for path in ("/v1/models", "/health", "/", "/metrics"):
                assert error(made.get(path, headers={"host": host}), 421)["code"] == "host_not_allowed"
    with running(llm, allowed_hosts=("models.example",)) as made:
        assert made.get("/health", headers={"host": "Models.example:8000"}).status_code == 200
        error(made.get("/health"), 421)
    with running(llm, allowed_hosts=("*",)) as made:
        assert made.get("/health", headers={"host": "anything.example"}).status_code == 200
    with pytest.raises(BadRequest, match="allowed host"):
        ServeConfig(NAME, allowed_hosts=("http://a.example",))


def test_no_text_of_other_requests_in_an_answer(llm: LLM):
    """Streams, whole answers, sessions, calls and failures side by side: each has what it would have alone."""
    words = [f"secret{number:02d}" for number in range(24)]

    def body(number: int) -> dict[str, Any]:
        messages: Any = [{"role": "user", "content": f"{words[number]} counts the ships"}]
        kind = number % 4
        more: dict[str, Any] = {"stream": kind == 0}
        if kind == 1:
            more = {"forerun": {"session": words[number]}}
        elif kind == 2:
            more = {"messages": messages * 400}
        return ASKED | {"messages": messages, "max_tokens": 24} | more

    def texts(lines: str) -> str:
        chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
        return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])

    with running(llm) as made, ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda number: made.post(CHAT, body(number)), range(24)))
        everything = [answer.text for answer in answers]
    for number, answer in enumerate(answers):
        assert not any(word in everything[number] for word in words if word != words[number])
        if number % 4 == 2:
            error(answer, 400)
            continue
        expected = llm.chat(body(number)["messages"], SamplingParams(max_tokens=24))[0].text
        found = texts(answer.text) if number % 4 == 0 else answer.json()["choices"][0]["message"]["content"]
        assert found == expected
    assert len({answer.headers["x-request-id"] for answer in answers if answer.status_code == 200}) == 18


@pytest.fixture(scope="module")
def single(llm: LLM) -> Iterator[Running]:
    with running(llm, max_body_bytes=1024) as made:
        yield made


def test_a_refused_body_does_not_become_the_next_request(single: Running):
    """What follows a refusal on the same connection is the rest of a body, never a request of its own."""
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(single) as sock:
        sock.sendall(head(f"Content-Length: {2000 + len(smuggled)}", "Connection: close") + b"x" * 2000 + smuggled)
        answer = received(sock)
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.startswith(b"HTTP/1.1 413 ")
