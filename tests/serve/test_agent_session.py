"""A coding agent's session of some 8,000 to 12,000 tokens, replayed with Anthropic's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from forerun import LLM, SamplingParams
from forerun.serve.dialects.messages import CountRequest
from forerun.serve.tools import ToolDialect
from forerun_research.scripts.agent_session import session
from tests import tiny
from tests.serve.common import NAME, Running, running

TURNS = 3


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
    replayed = turns(wide, 4800, changing=False)
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
