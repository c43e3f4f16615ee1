"""The load bench: traces, their replay against the library and an endpoint, and the figures."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.errors import BadRequest, ForerunError
from forerun_research.bench import load
from forerun_research.bench.load_targets import EndpointTarget, LibraryTarget, Messages, ReplayedAnswer
from forerun_research.bench.load_trace import (
    TraceRequest,
    TraceTexts,
    chats_beside_prompts,
    poisson,
    read_trace,
    write_trace,
)
from tests.serve.common import running
from tests.test_cli import run


class FakeTarget:
    """Answers at once with three tokens."""

    def __init__(self) -> None:
        self.asked: list[tuple[Messages, str | None]] = []

    async def ask(self, answer: ReplayedAnswer, messages: Messages, max_tokens: int, key: str | None) -> None:
        self.asked.append((messages, key))
        answer.sent, answer.token_times, answer.text = 10.0, [10.5, 10.6, 10.9], f"answer {answer.number}"
        answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens = 100, 40, 3


def test_turns_of_a_session_follow_each_other_with_the_answers_that_came():
    trace = [TraceRequest(0.0, 8, 4, session="a", key="ann"), TraceRequest(0.0, 8, 4, session="a", key="ann")]
    target = FakeTarget()
    asyncio.run(load.replay(target, trace, TraceTexts()))
    (first, key), (second, _) = target.asked
    assert [m["role"] for m in second] == ["user", "assistant", "user"] and key == "ann"
    assert second[0] == first[0] and second[1]["content"] == "answer 0" and second[2] != first[0]


def test_documents_are_the_same_text_and_questions_are_not():
    texts = TraceTexts()
    asked = [texts.user_message(i, TraceRequest(0.0, 500, 4, document=name))["content"] for i, name in enumerate("aab")]
    shared = next(i for i, (x, y) in enumerate(zip(asked[0], asked[1], strict=False)) if x != y)
    assert 1700 < shared < len(asked[0]) and abs(len(asked[0]) - 2000) < 20
    assert asked[2][:20] != asked[0][:20]


def test_figures():
    trace = [TraceRequest(0.0, 8, 4), TraceRequest(0.0, 800, 4, kind="long"), TraceRequest(0.0, 8, 4)]
    answers = asyncio.run(load.replay(FakeTarget(), trace, TraceTexts()))
    answers[2].error = "HTTP 429"
    found = load.figures(trace, answers, price_per_hour=36.0)
    chat = found["kinds"]["chat"]
    assert (chat["requests"], chat["answered"]) == (2, 1) and found["errors"] == {"HTTP 429": 1}
    assert chat["first_s"]["p99"] == pytest.approx(0.5) and chat["gap_s"]["max"] == pytest.approx(0.3)
    assert chat["gap_s"]["p50"] == pytest.approx(0.1)
    assert found["hit_rate"] == pytest.approx(0.4) and found["tokens_per_s"] == pytest.approx(6 / 0.9)
    assert found["cost_per_answer"] == pytest.approx(36 / 3600 * 0.9 / 2)
    result = {"model": "m", "url": None, "price_per_hour": 36.0, "runs": {"alone": found}}
    assert load.table(result).row_count == 2


def test_quantiles():
    assert load.quantiles(range(1, 101)) == {"p50": 50, "p95": 95, "p99": 99, "max": 100}
    assert load.quantiles([]) == {} and load.quantiles([7.0])["p50"] == 7.0


def test_traces_on_disk(tmp_path: Path):
    trace, path = poisson(2.0, 30.0, turns=3), tmp_path / "users.jsonl"
    write_trace(path, trace)
    assert read_trace(path) == trace == poisson(2.0, 30.0, turns=3) != poisson(2.0, 30.0, turns=3, seed=2)
    assert 30 < len({request.session for request in trace}) < 100
    by_session: dict[str | None, list[TraceRequest]] = {}
    for request in trace:
        by_session.setdefault(request.session, []).append(request)
    assert all([r.kind for r in own] == ["first", "next", "next"] for own in by_session.values())
    for line, words in [("{", "line 1"), ('{"arrival_s": 1}', "line 1"), ("[]", "line 1"), ("", "no requests")]:
        path.write_text(line)
        with pytest.raises(BadRequest, match=words):
            read_trace(path)
    path.write_text(json.dumps({"arrival_s": -1, "prompt_tokens": 4, "max_tokens": 4}))
    with pytest.raises(BadRequest, match="arrival_s is -1"):
        read_trace(path)
    with pytest.raises(BadRequest, match="cannot read"):
        read_trace(tmp_path / "none")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("5", "no object"),
        ('{"arrival_s": 1e999}', "arrival_s is inf"),
        ('{"arrival_s": true}', "arrival_s is True"),
        ('{"prompt_tokens": 1.5}', "prompt_tokens is 1.5"),
        ('{"prompt_tokens": 1000000000000}', "prompt_tokens is 1000000000000"),
        ('{"document": {}}', "document is {}"),
        ('{"session": [1]}', r"session is \[1\]"),
        ('{"kind": null}', "kind is None"),
        ('{"key": 5}', "key is 5"),
        ('{"colour": 1}', "unknown: colour"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_lines_that_are_no_request(line: str, words: str, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    if line.startswith("{"):
        line = json.dumps({"arrival_s": 0, "prompt_tokens": 4, "max_tokens": 4} | json.loads(line))
    path.write_text(line)
    with pytest.raises(BadRequest, match=f"line 1: .*{words}"):
        read_trace(path)


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Any:
    with LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True, kv_cache_tokens=8192) as made:
        yield made


def small_trace() -> list[TraceRequest]:
    beside = chats_beside_prompts(chats=2, tokens=12, prompts=1, prompt_tokens=200, later=1)
    return [TraceRequest(0.0, *(getattr(r, f) for f in ("prompt_tokens", "max_tokens", "document"))) for r in beside]


def test_the_library_and_an_endpoint_answer_the_same(llm: LLM):
    trace, texts = small_trace(), TraceTexts(2.0)
    direct = asyncio.run(load.replay(LibraryTarget(llm), trace, texts))
    with running(llm) as server:
        target = EndpointTarget(f"{server.url}/v1", "tiny", {})
        served = asyncio.run(load.replay(target, trace, texts))
        wrong = asyncio.run(load.replay(EndpointTarget(f"{server.url}/v1", "other", {}), trace[:1], texts))
    assert [a.error for a in (*direct, *served)] == [""] * 8
    assert [a.text for a in served] == [a.text for a in direct]
    assert [a.prompt_tokens for a in served] == [a.prompt_tokens for a in direct] and served[3].cached_tokens > 0
    assert all(len(a.token_times) > 1 and a.first_s > 0 for a in (*direct, *served))
    assert "HTTP 404" in wrong[0].error
    refused = asyncio.run(load.replay(EndpointTarget("http://127.0.0.1:1/v1", "tiny", {}), trace[:1], texts))
    assert refused[0].error and not load.figures(trace[:1], refused, 1.0)["kinds"]["chat"]["answered"]
    for wrong_url in ("127.0.0.1:8000", "http://a:99999/v1", "http://[/v1", "ftp://a/v1"):
        with pytest.raises(BadRequest, match="--url"):
            EndpointTarget(wrong_url, "tiny", {})


ANSWERS = {
    "no usage": b'data: {"usage": {"total": 3}}\n\n',
    "no delta": b'data: {"choices": [{"delta": null}]}\n\n',
    "a list": b"data: []\n\n",
    "no status": b"",
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_is_no_answer_fails_its_request_alone(kind: str):
    head = b"HTTP/1.1 200 OK\r\n\r\n" if ANSWERS[kind] else b"SSH-2.0\r\n\r\n"

    async def ask() -> str:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(head + ANSWERS[kind])
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            target, answer = EndpointTarget(f"http://127.0.0.1:{port}/v1", "m", {}), ReplayedAnswer(0)
            await target.check()
            await target.ask(answer, [], 4, None)
        return answer.error

    assert "no answer of an OpenAI endpoint" in asyncio.run(ask())


def test_an_endpoint_that_does_not_answer_is_said_before_the_trace_is_replayed():
    trace = [TraceRequest(3600.0, 8, 4)]
    with socket.socket() as bound:  # it does not listen, and no other socket can
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        with pytest.raises(BadRequest, match="nothing answers at 127.0.0.1"):
            load.measure(load.LoadSetup("tiny", url), trace)


def test_an_endpoint_that_answers_nothing_of_a_trace_is_an_error(llm: LLM):
    with running(llm) as server, pytest.raises(ForerunError, match="none of 4 requests was answered; .*HTTP 404"):
        load.measure(load.LoadSetup("other", f"{server.url}/v1"), small_trace())


def test_the_command(tiny_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "trace.jsonl"
    write_trace(path, small_trace()[:2])
    model = ["--model", str(tiny_folder("qwen3")), "--threads", "1", "--kv-cache-tokens", "4096"]
    assert run("bench", "load", *model, "--trace", str(path), "--price", "1", "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["runs"]["trace"]["kinds"]["chat"]["answered"] == 2 and result["hardware"]["threads"] == 1
    assert run("bench", "load", "--trace", str(path), "--rate", "1") == 1
    assert "leave one out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rate", "inf"], "--rate"),
        (["--rate", "1", "--seconds", "inf"], "--seconds"),
        (["--rate", "1000", "--seconds", "1000000"], "at most 1000000"),
        (["--rate", "0.001", "--seconds", "1"], "no user arrives"),
        (["--rate", "1", "--think", "inf"], "--think"),
        (["--price", "inf"], "--price"),
        (["--turns", "3"], "--turns has no meaning for chats"),
        (["--rate", "1", "--chats", "3"], "--chats has no meaning for users"),
        (["--trace", "users", "--turns", "3"], "--turns has no meaning for a trace"),
        (["--url", "http://a/v1", "--threads", "2"], "--threads has no meaning for a server"),
        (["--key", "ann=x"], "--key has no meaning for the library"),
        (["--cores", "2"], "--cores has no meaning for one process"),
        (["--simulate", "2", "--random-shape", "1.5b"], "--random-shape has no meaning for a simulation"),
        (["--simulate", "0"], "--simulate '0'"),
        (["--rate", "1", "--save-trace", "/no/such/folder/x"], "cannot write the trace"),
    ],
)
def test_options_that_mean_nothing(options: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert run("bench", "load", *options) == 1
    error, hint, *more = capsys.readouterr().err.strip().splitlines()
    assert words in error and hint.startswith("hint: ") and not more
