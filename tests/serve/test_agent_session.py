"""Sessions of coding agents: a made one of some 8,000 to 12,000 tokens with Anthropic's client, and a recorded one.

recorded/coding_agent.json has what an agent that fixes a failing test sent in its first five turns over each of three
APIs (its own JavaScript clients, the answers by a 1.5B model); its instructions are replaced by a text as long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from forerun import LLM, SamplingParams
from forerun.serve import response
from forerun.serve.dialects.messages import CountRequest
from forerun.serve.tools import ToolDialect
from forerun_research.scripts.agent_session import session
from tests import tiny
from tests.serve.common import NAME, Running, running, slowed

TURNS = 3
RECORDED = json.loads((Path(__file__).parent / "recorded" / "coding_agent.json").read_text())
ENDS = {"/v1/chat/completions": "[DONE]", "/v1/messages": "message_stop", "/v1/responses": "response.incomplete"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny model with the context of agents."""
    folder = tiny.write_folder(Path(tmp_path_factory.mktemp("wide")) / "qwen3", "qwen3", max_position_embeddings=32768)
    with LLM(str(folder), dtype="float32", threads=1, quiet=True, kv_cache_tokens=32768) as llm, running(llm) as made:
        yield made


def turns(
    made: Running, tokens: int, changing: bool
) -> list[tuple[dict[str, Any], anthropic.types.Message, list[str]]]:
    client = anthropic.Anthropic(base_url=made.url, api_key="none", max_retries=0, timeout=60)
    found = []
    for body in session(TURNS, tokens, changing, NAME):
        asked = {name: value for name, value in body.items() if name != "stream"} | {"max_tokens": 6}
        with client.messages.stream(**asked) as stream:
            names = [event.type for event in stream]
            found.append((asked, stream.get_final_message(), names))
    return found


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)


def test_a_session_is_replayed(wide: Running):
    replayed = turns(wide, 3200, changing=False)
    client = anthropic.Anthropic(base_url=wide.url, api_key="none", max_retries=0)
    sizes = [prompt_tokens(message.usage) for _, message, _ in replayed]
    assert 7000 < sizes[0] < sizes[-1] < 28_000 and sizes == sorted(sizes)
    for number, (asked, message, names) in enumerate(replayed):
        usage = message.usage
        assert (names[0], names[-1]) == ("message_start", "message_stop") and usage.output_tokens > 0
        if number:  # all of the turn before it was read, but for the last page
            assert usage.cache_read_input_tokens > sizes[number - 1] - 32
        counted = {name: value for name, value in asked.items() if name != "max_tokens"}
        assert client.messages.count_tokens(**counted).input_tokens == sizes[number]
    assert_as_in_the_library(wide.llm, *replayed[0][:2])
    pinned = wide.llm.engine.scheduler.pins.distinct_pages
    assert pinned * 16 >= sizes[-1] - 64  # what the agent marks stays


def test_with_a_changed_first_line_nothing_is_read(wide: Running):
    wide.llm.clear_cache()
    for number, (_, message, _) in enumerate(turns(wide, 800, changing=True)):
        if number:
            assert (message.usage.cache_read_input_tokens or 0) < 64


def assert_as_in_the_library(llm: LLM, asked: dict[str, Any], message: anthropic.types.Message) -> None:
    text = "".join(block.text for block in message.content if block.type == "text")
    counted = {name: asked[name] for name in ("model", "system", "messages", "tools")}
    chat = CountRequest.model_validate(counted).chat()
    ids = chat.chat_prompt(ToolDialect.of(llm.tokenizer)).encode(llm.tokenizer)
    assert llm.generate([ids], SamplingParams(max_tokens=6))[0].text == text


def recorded_bodies(path: str) -> list[dict[str, Any]]:
    """Each turn repeats the conversation before it."""
    found, field = RECORDED[path], "input" if path.endswith("responses") else "messages"
    turns, lengths = found["turns"], found["lengths"]
    each = turns if isinstance(turns[0], list) else [turns[:length] for length in lengths]
    limit = {"/v1/chat/completions": "max_completion_tokens", "/v1/messages": "max_tokens"}
    short = {limit.get(path, "max_output_tokens"): 6, "model": NAME}
    return [found["body"] | short | {field: turn} for turn in each]


def replay(made: Running, path: str, body: dict[str, Any]) -> tuple[list[str], dict[str, Any], httpx.Response]:
    """The data of a stream's events, and its usage in OpenAI's later names."""
    answer = httpx.post(made.url + path, json=body, headers=RECORDED[path]["headers"], timeout=60)
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    values = [json.loads(event) for event in events if event != "[DONE]"]
    usage = next(v for v in (value.get("response", value).get("usage") for value in reversed(values)) if v)
    cached = usage.get("prompt_tokens_details", usage.get("input_tokens_details", {})).get("cached_tokens")
    if cached is None:
        cached = usage["cache_read_input_tokens"]
        read = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
        return events, {"prompt": read, "cached": cached}, answer
    return events, {"prompt": usage.get("prompt_tokens", usage.get("input_tokens")), "cached": cached}, answer


@pytest.mark.parametrize("path", RECORDED)
def test_a_recorded_session_is_replayed(path: str, wide: Running):
    wide.llm.clear_cache()
    sizes = [0]
    for body in recorded_bodies(path):
        events, usage, answer = replay(wide, path, body)
        assert events[-1] == ENDS[path] or json.loads(events[-1])["type"] == ENDS[path]
        assert (
            usage["prompt"] > sizes[-1] and usage["cached"] >= sizes[-1] - 32
        )  # all but the last pages of the turn before
        ignored = answer.headers.get("x-forerun-ignored", "")
        assert all(name.endswith("eager_input_streaming") for name in ignored.split(", ") if name)
        sizes.append(usage["prompt"])
    assert len(sizes) == 6 and sizes[1] > 1000


def test_the_three_apis_give_the_model_the_same_conversation(wide: Running):
    """The agent's own forms of the same first two messages and tools."""
    texts = []
    for path in RECORDED:
        events, _, _ = replay(wide, path, recorded_bodies(path)[0])
        texts.append(streamed_text(path, events))
    assert texts[0] == texts[1] == texts[2] != ""


def streamed_text(path: str, events: list[str]) -> str:
    values = [json.loads(event) for event in events if event != "[DONE]"]
    if path.endswith("completions"):
        return "".join(c["delta"].get("content") or "" for value in values for c in value["choices"])
    if path.endswith("messages"):
        return "".join(value["delta"].get("text", "") for value in values if value["type"] == "content_block_delta")
    return "".join(value["delta"] for value in values if value["type"] == "response.output_text.delta")


@pytest.mark.parametrize("path", RECORDED)
def test_a_stream_that_waits_for_its_prompt_is_kept_open(path: str, wide: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(response, "KEEP_ALIVE_S", 0.0005)
    wide.llm.clear_cache()
    patch, _ = slowed(wide.llm)  # by 5 ms a step
    try:
        events, _, answer = replay(wide, path, recorded_bodies(path)[0])
    finally:
        patch.undo()
    pings = answer.text.count("event: ping\n" if path.endswith("messages") else ": keep-alive\n")
    assert pings > 0 and streamed_text(path, events) != ""
