"""OpenAI's responses with its own client: each answer is the one that a chat completion of the same request has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forerun import LLM
from forerun.serve.config import ApiKeys
from forerun.serve.dialects import response_store
from forerun.serve.dialects.response_files import ResponseFiles
from forerun.serve.dialects.response_store import ResponseStore
from forerun.serve.errors import ApiError
from tests.serve.common import CHAT, NAME, Running, error, running, slowed

PATH = "/v1/responses"
QUESTION: Any = {"role": "user", "content": "Who counts the ships?"}
SIZE = {
    "type": "object",
    "properties": {"size": {"enum": ["s", "m"]}},
    "required": ["size"],
    "additionalProperties": False,
}
SHIPS: Any = {
    "type": "function",
    "name": "count_ships",
    "description": "Counts ships",
    "parameters": SIZE,
    "strict": True,
}
FUNCTION = {"name": "count_ships", "description": "Counts ships", "parameters": SIZE, "strict": True}
ASK: Any = {"model": NAME, "max_output_tokens": 24}


def chat(made: Running, messages: list[Any], **more: Any) -> dict[str, Any]:
    response = made.post(CHAT, {"model": NAME, "messages": messages, "max_tokens": 24} | more)
    assert response.status_code == 200, response.text
    return response.json()


def content(made: Running, messages: list[Any], **more: Any) -> str:
    return chat(made, messages, **more)["choices"][0]["message"]["content"] or ""


def test_an_answer(served: Running):
    made = served.client().responses.create(**ASK, input="Who counts the ships?", instructions="Be brief.")
    plain = chat(served, [{"role": "system", "content": "Be brief."}, QUESTION])
    assert made.output_text == plain["choices"][0]["message"]["content"]
    assert made.object == "response" and made.id.startswith("resp_") and made.instructions == "Be brief."
    cut = plain["choices"][0]["finish_reason"] == "length"
    assert made.status == ("incomplete" if cut else "completed") and made.error is None
    assert cut == (made.incomplete_details is not None and made.incomplete_details.reason == "max_output_tokens")
    assert made.usage.input_tokens == plain["usage"]["prompt_tokens"]
    assert made.usage.output_tokens == plain["usage"]["completion_tokens"]
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


def test_input_items(served: Running):
    items: Any = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Who counts the ships?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I ask.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "count_ships", "arguments": '{"size": "s"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "nine"},
    ]
    made = served.client().responses.create(**ASK, input=items)
    call = {"id": "c1", "type": "function", "function": {"name": "count_ships", "arguments": '{"size": "s"}'}}
    same = [{"role": "system", "content": "Be brief."}, QUESTION]
    same += [{"role": "assistant", "content": "I ask.", "tool_calls": [call]}]
    same += [{"role": "tool", "tool_call_id": "c1", "content": "nine"}]
    assert made.output_text == content(served, same)


def test_a_stream_has_its_events_in_order(served: Running):
    kinds, numbers, shown = [], [], ""
    with served.client().responses.stream(**ASK, input="Who counts the ships?") as stream:
        for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            shown += event.delta if event.type == "response.output_text.delta" else ""
        final = event.response  # the client's own `get_final_response` needs a complete one
    assert numbers == list(range(len(numbers)))
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{final.status}",
    ]
    assert shown == final.output_text == content(served, [QUESTION])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "count_ships"}])
def test_a_tool_is_called_and_its_result_sent_back(served: Running, choice: Any):
    asked: Any = {"model": NAME, "max_output_tokens": 200, "tools": [SHIPS], "parallel_tool_calls": False}
    first = served.client().responses.create(**asked, input="Who counts?", tool_choice=choice)
    (call,) = first.output
    assert call.type == "function_call" and json.loads(call.arguments)["size"] in ("s", "m")
    kinds = []
    with served.client().responses.stream(**asked, input="Who counts?", tool_choice=choice) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output[0].arguments == call.arguments and final.status == "completed"
    assert kinds[2] == "response.output_item.added" and kinds[3] == "response.function_call_arguments.delta"
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "nine"}
    second = served.client().responses.create(**asked, input=[result], previous_response_id=first.id)
    calls = [{"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}]
    same = [{"role": "user", "content": "Who counts?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    same += [{"role": "tool", "tool_call_id": call.call_id, "content": "nine"}]
    more = {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False, "max_tokens": 200}
    expected = chat(served, same, **more)["choices"][0]["message"]
    assert second.output_text == (expected["content"] or "")


def test_structured_output(served: Running):
    plain = {"type": "json_schema", "name": "size", "schema": SIZE | {"x-guidance": {"whitespace_flexible": False}}}
    made = served.client().responses.create(
        model=NAME, input="How large?", text={"format": plain}, max_output_tokens=60
    )  # type: ignore[arg-type]
    assert json.loads(made.output_text)["size"] in ("s", "m") and made.text.format.type == "json_schema"


def test_a_conversation_is_continued_by_id(served: Running):
    client = served.client()
    first = client.responses.create(**ASK, input="Who counts the ships?", instructions="Be brief.")
    second = client.responses.create(**ASK, input="And the lamps?", previous_response_id=first.id)
    asked = [
        QUESTION,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And the lamps?"},
    ]
    assert second.output_text == content(served, asked)  # without the instructions of the first, as at OpenAI
    assert second.previous_response_id == first.id and second.usage.input_tokens_details.cached_tokens >= 0
    with client.responses.stream(**ASK, input="Why?", previous_response_id=second.id) as stream:
        third = list(stream)[-1].response
    asked += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "Why?"}]
    assert third.output_text == content(served, asked)
    assert client.responses.retrieve(third.id).output_text == third.output_text
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(third.id)
    client.responses.delete(third.id)
    for call in (client.responses.retrieve, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(third.id)
    gone = client.responses.create(**ASK, input="Who?", store=False)
    with pytest.raises(openai.NotFoundError, match="store=false"):
        client.responses.create(**ASK, input="And?", previous_response_id=gone.id)


def test_tokens_are_counted_without_an_answer(served: Running):
    client = served.client()
    first = client.responses.create(**ASK, input="Who counts the ships?", instructions="Be brief.")
    count = client.responses.input_tokens.count
    told = count(model=NAME, input="Who counts the ships?", instructions="Be brief.")
    assert told.object == "response.input_tokens" and told.input_tokens == first.usage.input_tokens
    second = client.responses.create(**ASK, input="And?", previous_response_id=first.id)
    assert count(model=NAME, input="And?", previous_response_id=first.id).input_tokens == second.usage.input_tokens


def test_keys_do_not_share_responses(llm: LLM):
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in ("one", "two")]
    with running(llm, keys=ApiKeys.parse(f"ann {digests[0]}\nbob {digests[1]}", "here")) as made:
        first = made.client("one").responses.create(**ASK, input="Who counts the ships?")
        for call in (
            lambda: made.client("two").responses.retrieve(first.id),
            lambda: made.client("two").responses.delete(first.id),
            lambda: made.client("two").responses.create(**ASK, input="And?", previous_response_id=first.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert made.client("one").responses.retrieve(first.id).id == first.id


async def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    store = ResponseStore()
    for number in range(4):
        store.add(None, {"id": f"r{number}"}, [])
    await store.get(None, "r1")  # used: the last to go
    store.add(None, {"id": "r4"}, [])
    for lost in ("r0", "r2"):
        with pytest.raises(ApiError):
            await store.get(None, lost)
    monkeypatch.setattr(response_store, "MAX_CHARS", 1000)
    store.add(None, {"id": "large"}, [{"content": "x" * 5000}])
    assert await store.get(None, "large")  # the latest stays, whatever its size
    with pytest.raises(ApiError):
        await store.get(None, "r1")


def test_responses_outlive_the_process_with_a_disk(tiny_folder: Callable[[str], Path], tmp_path: Path):
    options: Any = {"dtype": "float32", "threads": 1, "quiet": True, "disk": tmp_path, "kv_cache_tokens": 8192}
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in ("one", "two")]
    keys = ApiKeys.parse(f"ann {digests[0]}\nbob {digests[1]}", "here")
    with LLM(str(tiny_folder("qwen3")), **options) as llm, running(llm, keys=keys) as made:
        first, gone = (made.client("one").responses.create(**ASK, input=text) for text in ("Who counts?", "Who?"))
        unstored = made.client("one").responses.create(**ASK, input="Why?", store=False)
        made.client("one").responses.delete(gone.id)
        expected = made.client("one").responses.create(**ASK, input="And?", previous_response_id=first.id).output_text
    with LLM(str(tiny_folder("qwen3")), **options) as llm, running(llm, keys=keys) as made:
        again = made.client("one").responses.create(**ASK, input="And?", previous_response_id=first.id)
        assert again.output_text == expected
        assert made.client("one").responses.retrieve(first.id).output_text == first.output_text
        for key, lost in (("one", gone.id), ("one", unstored.id), ("two", first.id), ("one", "../../" + first.id)):
            with pytest.raises(openai.NotFoundError):
                made.client(key).responses.create(**ASK, input="And?", previous_response_id=lost)
        made.client("one").responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            made.client("one").responses.retrieve(first.id)


def test_files_of_responses_are_bounded_checked_and_private(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    files, ids = ResponseFiles(tmp_path, max_files=2, max_bytes=10_000), [f"resp_{n:032x}" for n in range(4)]
    for response_id in ids:
        files.write("ann", response_id, {"response": {"id": response_id}, "messages": []})
    assert all(files.read("ann", response_id) is None for response_id in ids)  # of this process: in its memory
    later = ResponseFiles(tmp_path, max_files=2, max_bytes=10_000)
    found = [later.read("ann", response_id) for response_id in ids]
    assert found[:2] == [None, None] and [entry["response"]["id"] for entry in found[2:] if entry] == ids[2:]
    last = next(tmp_path.glob(f"*/{ids[3]}.json"))
    assert last.stat().st_mode & 0o077 == 0 and later.read("bob", ids[3]) is None
    last.write_text(last.read_text().replace('"messages": []', '"messages": [1]'))
    assert later.read("ann", ids[3]) is None and "digest" in caplog.text
    later.write("ann", ids[0], {"response": {}, "messages": ["x" * 20_000]})
    assert [path.stem for path in tmp_path.glob("*/*.json")] == [ids[0]]
    blocked = tmp_path / "file"
    blocked.write_text("")
    ResponseFiles(blocked, 2, 10).write("ann", ids[0], {})
    assert "will not survive" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "messages"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "messages"),
        ({"tools": [{"name": "f"}]}, "tools.0"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "no tools"),
        ({"text": {"format": {"type": "xml"}}}, "xml"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": 0}, "max_tokens is 0"),
        ({"forerun": {"prefil": 1}}, "did you mean prefill?"),
    ],
)
def test_mistakes(served: Running, change: dict[str, Any], words: str):
    assert words in error(served.post(PATH, {"model": NAME, "input": "Who?"} | change), 400)["message"]


def test_tools_that_are_no_functions_are_passed_over(served: Running):
    tools = [{"type": "web_search", "search_context_size": "low"}, {"type": "namespace", "name": "n", "tools": [SHIPS]}]
    body = ASK | {"input": "Who?", "tools": tools}
    response = served.post(PATH, body)
    assert response.headers["x-forerun-ignored"] == "tools.0.web_search, tools.1.namespace"
    assert response.json()["tools"] == body["tools"] and response.json()["output"][0]["content"][0]["text"]


def test_forerun_events_are_part_of_the_stream(served: Running):
    own = {"forerun": {"session": "events of responses", "statistics": True}}
    with served.client().responses.stream(**ASK, input="Who?", extra_body=own) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    (told,) = [event for event in events if event.type == "forerun"]
    assert told is events[-2] and told.session["turn"] == 1 and told.statistics["completion_tokens"] > 0


def test_a_stream_that_fails_ends_with_an_error(llm: LLM):
    patch, _ = slowed(llm)
    try:
        with running(llm, max_request_s=1.0) as made:
            own = {"forerun": {"ignore_eos": True, "speculation": "off"}}
            body = {"model": NAME, "input": "Who?", "stream": True, "max_output_tokens": 900} | own
            lines = made.post(PATH, body).text.strip().split("\n\n")
            kind, data = lines[-1].split("\n")
            assert kind == "event: error" and json.loads(data[6:])["code"] == "timeout"
    finally:
        patch.undo()


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(served: Running, stream: bool):
    asked: Any = ASK | {"input": "Who counts?", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    if stream:
        events = list(served.client().responses.create(**asked, stream=True))
        made = events[-1].response
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        written = [entry.token for delta in deltas for entry in delta.logprobs]
        assert written == [entry.token for entry in made.output[0].content[0].logprobs]
    else:
        made = served.client().responses.create(**asked)
    question = [{"role": "user", "content": "Who counts?"}]
    expected = chat(served, question, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    found = [entry.model_dump() for entry in made.output[0].content[0].logprobs]
    assert [entry["token"] for entry in found] == [entry["token"] for entry in expected]
    assert [entry["logprob"] for entry in found] == pytest.approx([entry["logprob"] for entry in expected], abs=1e-4)
    assert all(len(entry["top_logprobs"]) == 2 for entry in found)
