"""Anthropic's messages with its own client: each answer is the one that a chat completion of the same request has."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import anthropic
import pytest

from forerun import LLM, SamplingParams
from forerun.serve.config import ApiKeys
from tests.serve.common import ASKED, CHAT, NAME, Running, running, slowed

PATH = "/v1/messages"
QUESTION: Any = {"role": "user", "content": "Who counts the ships?"}
SIZE = {
    "type": "object",
    "properties": {"size": {"enum": ["s", "m"]}},
    "required": ["size"],
    "additionalProperties": False,
}
SHIPS: Any = {"name": "count_ships", "description": "Counts ships", "input_schema": SIZE}
FUNCTION = {"type": "function", "function": {"name": "count_ships", "description": "Counts ships", "parameters": SIZE}}


def client(made: Running, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=made.url, api_key=key, max_retries=0, timeout=30)


def chat(made: Running, messages: list[Any], **more: Any) -> dict[str, Any]:
    response = made.post(CHAT, {"model": NAME, "messages": messages, "max_tokens": 24} | more)
    assert response.status_code == 200, response.text
    return response.json()


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_an_answer(served: Running):
    message = client(served).messages.create(model=NAME, max_tokens=24, messages=[QUESTION], system="Be brief.")
    plain = chat(served, [{"role": "system", "content": "Be brief."}, QUESTION])
    assert text(message) == plain["choices"][0]["message"]["content"]
    assert message.type == "message" and message.role == "assistant" and message.model == NAME
    assert message.id.startswith("msg_") and message.stop_sequence is None
    assert message.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[plain["choices"][0]["finish_reason"]]
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == plain["usage"]["prompt_tokens"]
    assert usage.output_tokens == plain["usage"]["completion_tokens"] and usage.cache_creation_input_tokens == 0


def test_blocks_thinking_and_documents(served: Running):
    thinking = {"type": "thinking", "thinking": "the piers first", "signature": "x"}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Who counts "}, {"type": "text", "text": "the ships?"}]},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "The keeper."}]},
        {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "A log."}}]},
    ]
    system: Any = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    message = client(served).messages.create(model=NAME, max_tokens=24, messages=messages, system=system)
    same = [{"role": "system", "content": "Be brief."}, QUESTION]
    same += [{"role": "assistant", "content": "The keeper."}, {"role": "user", "content": "A log."}]
    assert text(message) == chat(served, same)["choices"][0]["message"]["content"]


def test_a_stream_has_its_events_in_order(served: Running):
    kinds, shown = [], ""
    with client(served).messages.stream(model=NAME, max_tokens=24, messages=[QUESTION]) as stream:
        for event in stream:
            kinds.append(event.type)
            shown += event.text if event.type == "text" else ""
        final = stream.get_final_message()
    raw = [kind for kind in kinds if kind not in ("text", "content_block_delta")]
    assert raw == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    whole = client(served).messages.create(model=NAME, max_tokens=24, messages=[QUESTION])
    assert shown == text(final) == text(whole) and final.stop_reason == whole.stop_reason
    total = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert total == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_stop_sequences(served: Running):
    whole = served.llm.chat([QUESTION], SamplingParams(max_tokens=24, temperature=1.0, seed=2))[0].text
    stop = next(
        whole[i : i + 3] for i in range(6, len(whole)) if whole[i : i + 3].strip() and whole.find(whole[i : i + 3]) == i
    )
    asked: Any = {"model": NAME, "max_tokens": 24, "messages": [QUESTION], "stop_sequences": ["never", stop]}
    expected = served.llm.chat([QUESTION], SamplingParams(max_tokens=24, stop=("never", stop)))[0]
    message = client(served).messages.create(**asked)
    assert text(message) == expected.text
    asked["stop_sequences"] = [
        text(client(served).messages.create(model=NAME, max_tokens=24, messages=[QUESTION]))[2:5]
    ]
    cut = client(served).messages.create(**asked)
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == asked["stop_sequences"][0]
    with client(served).messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence, text(final)) == ("stop_sequence", cut.stop_sequence, text(cut))


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "count_ships"}])
def test_a_tool_is_called_and_its_result_sent_back(served: Running, choice: Any):
    asked: Any = {"model": NAME, "max_tokens": 200, "tools": [SHIPS]}
    choice = choice | {"disable_parallel_tool_use": True}
    first = client(served).messages.create(**asked, messages=[QUESTION], tool_choice=choice)
    (call,) = first.content
    assert call.type == "tool_use" and call.name == "count_ships" and call.input["size"] in ("s", "m")
    assert first.stop_reason == "tool_use"
    with client(served).messages.stream(**asked, messages=[QUESTION], tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    assert streamed.stop_reason == "tool_use" and streamed.content[0].input == call.input
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "nine"}]}
    answer: Any = {"role": "user", "content": [result, {"type": "text", "text": "And lamps?"}]}
    second = client(served).messages.create(
        **asked, messages=[QUESTION, {"role": "assistant", "content": first.content}, answer]
    )
    function = {"name": "count_ships", "arguments": json.dumps(call.input)}
    calls = [{"id": call.id, "type": "function", "function": function}]
    same = [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
    same += [{"role": "tool", "tool_call_id": call.id, "content": "nine"}, {"role": "user", "content": "And lamps?"}]
    expected = chat(served, same, tools=[FUNCTION], max_tokens=200)["choices"][0]["message"]
    assert text(second) == (expected["content"] or "")


def test_cache_control_is_reported(served: Running):
    served.llm.clear_cache()
    system: Any = [{"type": "text", "text": "The keeper counts the ships of the pier. " * 12}]
    marked = [system[0] | {"cache_control": {"type": "ephemeral"}}]

    def usage(system: Any, **more: Any) -> Any:
        return (
            client(served).messages.create(model=NAME, max_tokens=4, messages=[QUESTION], system=system, **more).usage
        )

    first, second = usage(marked), usage(marked)
    assert first.cache_creation_input_tokens > 16 and first.cache_read_input_tokens == 0
    assert 0 < first.input_tokens < 40  # the question, after the mark
    total = first.input_tokens + first.cache_creation_input_tokens
    assert second.cache_read_input_tokens > 16 and second.cache_creation_input_tokens == 0
    assert second.input_tokens + second.cache_read_input_tokens == total
    served.llm.clear_cache()
    unmarked, whole = usage(system), usage(system, cache_control={"type": "ephemeral"})
    assert unmarked.cache_creation_input_tokens == 0 and unmarked.input_tokens == total
    assert whole.cache_read_input_tokens + whole.cache_creation_input_tokens > total - 16  # all but the last tokens


def test_tokens_are_counted(served: Running):
    for more in ({}, {"system": "Be brief."}, {"tools": [SHIPS]}):
        counted = client(served).messages.count_tokens(model=NAME, messages=[QUESTION], **more)
        message = client(served).messages.create(model=NAME, max_tokens=1, messages=[QUESTION], **more)
        usage = message.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_prefill_and_structured_output(served: Running):
    start = [QUESTION, {"role": "assistant", "content": "The keeper"}]
    message = client(served).messages.create(model=NAME, max_tokens=24, messages=start)  # type: ignore[arg-type]
    assert text(message) == chat(served, start)["choices"][0]["message"]["content"]
    form = {"format": {"type": "json_schema", "schema": SIZE | {"x-guidance": {"whitespace_flexible": False}}}}
    body = {"model": NAME, "max_tokens": 40, "messages": [QUESTION], "output_config": form}
    assert json.loads(served.post(PATH, body).json()["content"][0]["text"])["size"] in ("s", "m")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "'x'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": 5}]}]}, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}], "tool_choice": {"type": "any"}}, "no tools"),
        ({"tool_choice": {"type": "tool"}}, "no name"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"forerun": {"prefil": 1}}, "did you mean prefill?"),
    ],
)
def test_mistakes_are_errors_in_anthropics_form(served: Running, change: dict[str, Any], words: str):
    response = served.post(PATH, {"model": NAME, "max_tokens": 8, "messages": [QUESTION]} | change)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (
        body["type"] == "error"
        and body["error"]["type"] == "invalid_request_error"
        and words in body["error"]["message"]
    )


def test_other_errors(llm: LLM):
    digest = hashlib.sha256(b"secret").hexdigest()
    with running(llm, keys=ApiKeys.parse(f"ann {digest}", "here"), max_request_s=1.0) as made:
        asked: Any = {"max_tokens": 8, "messages": [QUESTION]}
        with pytest.raises(anthropic.AuthenticationError):
            client(made, "wrong").messages.create(model=NAME, **asked)
        with pytest.raises(anthropic.NotFoundError):
            client(made, "secret").messages.create(model="other", **asked)
        assert client(made, "secret").messages.create(model=NAME, **asked).id
        patch, _ = slowed(llm)
        try:
            with pytest.raises(anthropic.APIStatusError, match="longer than this server allows"):
                endless = {"ignore_eos": True, "speculation": "off"}
                create = client(made, "secret").messages.create
                for _ in create(
                    model=NAME, stream=True, extra_body={"forerun": endless}, **asked | {"max_tokens": 900}
                ):
                    pass
        finally:
            patch.undo()


def test_tools_of_anthropics_servers_are_passed_over(llm: LLM, served: Running):
    tools = [SHIPS, {"type": "web_search_20250305", "name": "web_search"}]
    body = {"model": NAME, "max_tokens": 4, "messages": [QUESTION], "tools": tools}
    response, without = served.post(PATH, body), served.post(PATH, body | {"tools": [SHIPS]})
    assert response.headers["x-forerun-ignored"] == "tools.1.web_search_20250305"
    assert response.json()["content"] == without.json()["content"]
    with running(llm, strict=True) as strict:
        assert "web_search" in strict.post(PATH, body).json()["error"]["message"]


def test_forerun_events_are_part_of_the_stream(served: Running):
    own = {"session": "events", "statistics": True}
    with client(served).messages.stream(
        model=NAME, max_tokens=4, messages=[QUESTION], extra_body={"forerun": own}
    ) as stream:
        assert text(stream.get_final_message())  # the client passes over them
    body = {"model": NAME, "max_tokens": 4, "messages": [QUESTION], "stream": True, "forerun": own}
    lines = [line for line in served.post(PATH, body).text.splitlines() if line.startswith("data: ")]
    *_, told, _, stop = (json.loads(line[6:]) for line in lines)
    assert told["type"] == "forerun" and told["session"]["turn"] == 2 and told["statistics"]["completion_tokens"] > 0
    assert stop["type"] == "message_stop"


def test_unknown_fields_are_named(served: Running):
    body = {"model": NAME, "max_tokens": 4, "messages": [QUESTION], "mood": 1, "metadata": {"user_id": "a"}}
    assert served.post(PATH, body).headers["x-forerun-ignored"] == "mood"
    assert ASKED["model"] == NAME
