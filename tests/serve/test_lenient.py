"""Requests as clients and gateways send them: unknown fields, messages sent back, names of other servers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch

import forerun
from forerun import LLM, SamplingParams
from forerun.engine.sequence import Sequence
from forerun.models.execution.runner import Span
from forerun.serve import fill
from forerun.serve.config import ApiKeys
from forerun.serve.prompt_logprobs import prompt_logprobs
from tests.serve.common import ASKED, CHAT, NAME, Running, error, running

QUESTION = ASKED["messages"][0]
SHIP: Any = {"type": "function", "function": {"name": "count_ships", "parameters": {"type": "object"}}}


def content(made: Running, body: dict[str, Any]) -> str:
    response = made.post(CHAT, body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_unknown_fields_are_named_and_counted(served: Running):
    part = {"type": "text", "text": QUESTION["content"], "colour": 1}
    odd = ASKED | {"max_token": 3, "né\n": 1, "messages": [{"role": "user", "content": [part], "mood": "calm"}]}
    plain = served.post(CHAT, ASKED)
    before = served.app.state.context.metrics.ignored_fields._value.get()
    for stream in (False, True):
        answer = served.post(CHAT, odd | {"stream": stream})
        assert answer.headers["x-forerun-ignored"] == "max_token, n??, messages.0.mood, messages.0.content.0.colour"
    assert "x-forerun-ignored" not in plain.headers
    assert content(served, odd) == plain.json()["choices"][0]["message"]["content"]
    assert served.app.state.context.metrics.ignored_fields._value.get() == before + 12
    assert "forerun_ignored_fields_total" in served.get("/metrics").text
    nameless = served.post(CHAT, ASKED | {"mood": 1, "": 1})
    assert nameless.status_code == 200 and nameless.headers["x-forerun-ignored"] == "mood, ?"
    many = served.post(CHAT, ASKED | {f"x{i}": 1 for i in range(500)})
    assert many.headers["x-forerun-ignored"].count(",") == 19


def test_a_strict_server_refuses_them(llm: LLM):
    with running(llm, strict=True) as made:
        assert made.post(CHAT, ASKED).status_code == 200
        assert error(made.post(CHAT, ASKED | {"max_token": 3}), 400)["param"] == "max_token"
        tool = {"type": "function", "function": {"name": "a", "colour": 1}}
        assert error(made.post(CHAT, ASKED | {"tools": [tool]}), 400)["param"] == "tools.0.function.colour"
        prompt = {"model": NAME, "prompt": "The lamp", "best": 1}
        assert error(made.post("/v1/completions", prompt), 400)["param"] == "best"


@pytest.mark.parametrize(
    ("own", "hint"),
    [
        ({"prefil": "exact"}, "did you mean prefill?"),
        ({"sesion": "a"}, "did you mean session?"),
        ({"session": {"name": "a", "tll": 5}}, "did you mean ttl?"),
        ({"zzzzzz": 1}, "it has "),
    ],
)
def test_typos_in_the_forerun_object_are_refused(served: Running, own: dict[str, Any], hint: str):
    assert error(served.post(CHAT, ASKED | {"forerun": own}), 400)["hint"].startswith(hint)


def test_messages_as_clients_send_them_back(served: Running):
    call = {"id": "call_1", "type": "function", "function": {"name": "count_ships", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "nine"}
    tools = {"tools": [SHIP], "max_tokens": 12}
    plain = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    calls = {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}]}
    more = {
        "refusal": None,
        "reasoning_content": "first the piers",
        "provider_specific_fields": {"a": 1},
        "cache_control": {"type": "ephemeral"},
        "function_call": None,
        "annotations": [],
    }
    assert content(served, ASKED | tools | {"messages": plain}) == content(
        served, ASKED | tools | {"messages": [QUESTION, calls | more, result]}
    )
    spoken = {"role": "assistant", "content": "Nine.", "tool_calls": []}
    short = [QUESTION, {"role": "assistant", "content": "Nine."}, QUESTION]
    assert content(served, ASKED | {"messages": short}) == content(
        served, ASKED | {"messages": [QUESTION, spoken | more, QUESTION]}
    )
    parts = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "refusal", "refusal": "No."}]
    spoken["content"] = [*parts, {"type": "text", "text": "Nine."}]
    answer = served.post(CHAT, ASKED | {"messages": [QUESTION, spoken, QUESTION]})
    assert "x-forerun-ignored" not in answer.headers
    assert answer.json()["choices"][0]["message"]["content"] == content(served, ASKED | {"messages": short})
    cached = [{"type": "text", "text": QUESTION["content"], "cache_control": {"type": "ephemeral"}}]
    answer = served.post(CHAT, ASKED | {"messages": [{"role": "user", "content": cached}]})
    assert "x-forerun-ignored" not in answer.headers and answer.status_code == 200


@pytest.mark.parametrize(
    "more",
    [
        {"tools": []},
        {"parallel_tool_calls": True},
        {"user": "ann", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"},
        {"reasoning_effort": "low", "verbosity": "low", "modalities": ["text"]},
        {"stream_options": None, "tool_choice": None, "response_format": None},
    ],
)
def test_fields_without_effect(served: Running, more: dict[str, Any]):
    answer = served.post(CHAT, ASKED | more)
    assert answer.status_code == 200 and "x-forerun-ignored" not in answer.headers
    assert answer.json()["choices"] == served.post(CHAT, ASKED).json()["choices"]


def test_sampling_under_other_servers_names(served: Running):
    asked = ASKED | {"temperature": 1.5, "seed": 3, "max_tokens": 24}
    own = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "ignore_eos": True}
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=24, **own)
    expected = served.llm.chat([QUESTION], params)[0].text
    assert content(served, asked | own) == content(served, asked | {"forerun": own}) == expected
    assert expected != served.llm.chat([QUESTION], SamplingParams(temperature=1.5, seed=3, max_tokens=24))[0].text
    greedy = served.llm.chat([QUESTION], SamplingParams(max_tokens=24))[0].text
    assert content(served, asked | {"top_p": 0}) == greedy  # as at OpenAI
    twice = asked | {"top_k": 3, "forerun": {"top_k": 4}}
    assert "top_k" in error(served.post(CHAT, twice), 400)["message"]
    error(served.post(CHAT, asked | {"top_k": -2}), 400)


def test_stop_token_ids(served: Running):
    asked = ASKED | {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=5)
    ids = served.llm.chat([QUESTION], params)[0].choices[0].token_ids
    last = next(i for i in range(4, 40) if ids[i] not in ids[:i])
    choice = served.post(CHAT, asked | {"stop_token_ids": [ids[last]]}).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == served.llm.tokenizer.decode(ids[:last])
    error(served.post(CHAT, ASKED | {"stop_token_ids": [-1]}), 400)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_guided_answers(served: Running, path: str):
    head = ASKED if path == CHAT else {"model": NAME, "prompt": "The lamp", "max_tokens": 40}

    def text(**more: Any) -> str:
        response = served.post(path, head | {"max_tokens": 60} | more)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return choice["message"]["content"] if path == CHAT else choice["text"]

    shape = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    shape |= {"x-guidance": {"whitespace_flexible": False}}
    assert json.loads(text(guided_json=shape))["a"] in ("x", "y")
    assert json.loads(text(guided_json=json.dumps(shape)))["a"] in ("x", "y")
    assert text(guided_regex="[0-9]{3}-[ab]").strip()[3] == "-"
    choices = ["a+b (c)", "né/€", "x|y"]
    assert text(guided_choice=choices) in choices
    assert text(guided_grammar='start: "left" | "right"') in ("left", "right")
    assert text(guided_grammar='root ::= "left" | "right"') in ("left", "right")
    assert text(response_format={"type": "regex", "regex": "[ab]{2}"}) in ("aa", "ab", "ba", "bb")
    assert text(response_format={"type": "grammar", "grammar": 'root ::= "left"'}) == "left"
    assert json.loads(text(response_format={"type": "json_object", "schema": shape}))["a"] in ("x", "y")
    assert text(structured_outputs={"choice": choices}) in choices
    assert json.loads(text(structured_outputs={"json": shape}))["a"] in ("x", "y")
    assert text(grammar='root ::= "left"') == "left"  # llama.cpp's names
    assert json.loads(text(json_schema=shape))["a"] in ("x", "y")
    error(served.post(path, head | {"response_format": {"type": "regex"}}), 400)
    both = head | {"guided_regex": "a", "guided_choice": ["a"]}
    assert "guided_regex and guided_choice" in error(served.post(path, both), 400)["message"]
    error(served.post(path, head | {"guided_regex": "("}), 400)


def test_tools_beside_a_raw_grammar_are_refused(served: Running):
    error(served.post(CHAT, ASKED | {"tools": [SHIP], "guided_regex": "a+"}), 400)


@pytest.mark.parametrize("stream", [False, True])
def test_an_assistants_last_message_is_continued(served: Running, stream: bool):
    llm, start = served.llm, "The keeper <|im_end|> counts"
    body = ASKED | {"messages": [QUESTION, {"role": "assistant", "content": start}], "stream": stream}
    ids = llm.tokenizer.apply_chat_template([QUESTION]) + llm.tokenizer.encode(start)
    expected = llm.generate([ids], SamplingParams(max_tokens=8))[0].text
    if not stream:
        assert content(served, body) == expected
        return
    lines = [json.loads(line[6:]) for line in served.post(CHAT, body).text.splitlines() if line.startswith("data: {")]
    assert "".join(c["delta"].get("content") or "" for line in lines for c in line["choices"]) == expected


def test_text_between_two_texts(served: Running, monkeypatch: pytest.MonkeyPatch):
    asked = {"model": NAME, "prompt": "The lamp", "suffix": " at night", "max_tokens": 6}
    assert "fills in the middle" in error(served.post("/v1/completions", asked), 400)["message"]
    monkeypatch.setattr(fill, "_FORMS", (("<|endoftext|>", "<|im_start|>", "<|im_end|>"),))
    encode, (before, after, middle) = served.llm.tokenizer.encode, fill.fill_tokens(served.llm.tokenizer)
    ids = [before, *encode("The lamp"), after, *encode(" at night"), middle]
    expected = served.llm.generate([ids], SamplingParams(max_tokens=6))[0].text
    assert served.post("/v1/completions", asked).json()["choices"][0]["text"] == expected
    echoed = served.post("/v1/completions", asked | {"echo": True}).json()["choices"][0]["text"]
    assert echoed == f"The lamp{expected}"
    error(served.post("/v1/completions", asked | {"prompt": [1, 2]}), 400)


def test_echo(served: Running):
    body = {"model": NAME, "prompt": ["The lamp turns", "The lamp stands"], "max_tokens": 4, "n": 2}
    plain = served.post("/v1/completions", body).json()["choices"]
    echoed = served.post("/v1/completions", body | {"echo": True}).json()["choices"]
    prompts = ["The lamp turns", "The lamp turns", "The lamp stands", "The lamp stands"]
    assert [c["text"] for c in echoed] == [a + b["text"] for a, b in zip(prompts, plain, strict=True)]
    stream = served.post("/v1/completions", body | {"echo": True, "stream": True}).text
    texts = ["", "", "", ""]
    for line in stream.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in echoed]
    ids = {"model": NAME, "prompt": served.llm.encode("The lamp turns"), "max_tokens": 4, "echo": True}
    assert served.post("/v1/completions", ids).json()["choices"][0]["text"] == echoed[0]["text"]


def test_echo_with_logprobs(served: Running):
    """Those of the prompt are the model's own, also of a prompt of several pieces; offsets point into the text."""
    llm = served.llm
    for prompt in ("The lamp turns", "The keeper counts the ships of the pier. " * 12):
        body = {"model": NAME, "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 2, "ignore_eos": True}
        ids = llm.encode(prompt)
        expected = torch.log_softmax(llm.engine.score(ids).float(), -1)
        pages = llm.engine.pool.free
        choice = served.post("/v1/completions", body).json()["choices"][0]
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        for place, token in enumerate(ids[1:], 1):
            assert found["token_logprobs"][place] == pytest.approx(float(expected[place - 1, token]), abs=1e-3)
            best = max(found["top_logprobs"][place].values())
            assert best == pytest.approx(float(expected[place - 1].max()), abs=1e-3)
        assert len(found["tokens"]) == len(ids) + 3 and "".join(found["tokens"][: len(ids)]) == prompt
        for offset, text in zip(found["text_offset"][: len(ids)], found["tokens"], strict=False):
            assert choice["text"][offset : offset + len(text)] == text
        assert found["text_offset"][len(ids)] == len(prompt)
        columns: dict[str, list[Any]] = {name: [] for name in found}
        for line in served.post("/v1/completions", body | {"stream": True}).text.splitlines():
            for part in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                for name, values in (part["logprobs"] or {}).items():
                    columns[name] += values
        assert columns["tokens"] == found["tokens"] and columns["text_offset"] == found["text_offset"]
        llm.clear_cache()
        assert llm.engine.pool.free >= pages and not llm.engine.leases


def test_a_prompt_is_scored_without_an_answer(served: Running):
    """The classical way to score texts: nothing is written after the prompt."""
    prompts = ["The lamp turns", "The keeper counts"]
    body: dict[str, Any] = {"model": NAME, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 2, "n": 2}
    found = served.client().completions.create(**body)
    longer = served.client().completions.create(**body | {"max_tokens": 1})
    assert [choice.text for choice in found.choices] == [prompts[0], prompts[0], prompts[1], prompts[1]]
    for choice, other in zip(found.choices, longer.choices, strict=True):
        assert choice.finish_reason == "length" and choice.logprobs and other.logprobs
        assert choice.logprobs.tokens and "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs == other.logprobs.token_logprobs[: len(choice.logprobs.tokens)]
    assert found.usage and longer.usage and found.usage.completion_tokens == 0
    assert found.usage.prompt_tokens == longer.usage.prompt_tokens
    chunks = list(served.client().completions.create(**body | {"prompt": prompts[0], "n": 1}, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == prompts[0]
    assert chunks[-1].choices[0].finish_reason == "length"
    error(served.post("/v1/completions", body | {"echo": False}), 400)
    error(served.post("/v1/completions", body | {"prompt": "a", "n": 1, "forerun": {"session": "scored"}}), 400)


def test_log_probabilities_of_a_prompt_run_in_pieces_as_streams_allow(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """What was scored is not computed a second time, unless the request wants nothing of the cache."""
    scheduler, forward, pieces = llm.engine.scheduler, llm.engine.runner.forward, list[int]()

    def counted(spans: list[Span], *args: Any) -> Any:
        pieces.extend(len(span.ids) for span in spans if span.prompt)
        return forward(spans, *args)

    monkeypatch.setattr(llm.engine.runner, "forward", counted)
    ids = llm.encode("The keeper counts the ships of the pier. " * 6)
    whole = prompt_logprobs(llm, llm.request(ids, SamplingParams(logprobs=2, cache=False)))
    assert max(pieces) > 20 and not scheduler.prefixes.exact_pages(Sequence(llm.request(ids, SamplingParams()), 0, 0))
    pieces.clear()
    monkeypatch.setattr(scheduler, "tokens_beside_streams", lambda context, most: 10)
    found = prompt_logprobs(llm, llm.request(ids, SamplingParams(logprobs=2)))
    assert set(pieces) <= {5, (len(ids) - 1) % 5} and len(pieces) == len(range(0, len(ids) - 1, 5))
    assert [entry.token_id for entry in found] == ids[1:]
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in whole], abs=1e-3)
    output = llm.generate([ids], SamplingParams(max_tokens=1))[0]
    assert output.usage.cached_tokens >= len(ids) - 1 - llm.engine.pool.page_size
    llm.clear_cache()


def test_a_salted_prompt_is_shared_with_none(served: Running):
    """vLLM's field against guesses from times; salts are not told apart, as nothing is kept."""
    long = ASKED | {"messages": [{"role": "user", "content": "The keeper counts the ships. " * 12}]}

    def cached(body: dict[str, Any]) -> int:
        return served.post(CHAT, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    served.llm.clear_cache()
    assert [cached(long | {"cache_salt": "a"}) for _ in range(2)] == [0, 0]
    assert cached(long) == 0 and cached(long) > 16 and cached(long | {"cache_salt": "b"}) == 0
    error(served.post(CHAT, long | {"cache_salt": "a", "forerun": {"session": "s"}}), 400)


def test_tokenize_and_back(served: Running):
    llm = served.llm
    told = served.post("/tokenize", {"prompt": "The lamp <|im_end|>"}).json()
    assert told["tokens"] == llm.encode("The lamp <|im_end|>") and told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 2048
    assert served.post("/detokenize", {"tokens": told["tokens"]}).json()["prompt"] == "The lamp <|im_end|>"
    pieces = served.post("/tokenize", {"content": "The lamp", "with_pieces": True}).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "The lamp"
    chat = served.post("/tokenize", {"messages": [QUESTION]}).json()
    assert chat["tokens"] == llm.tokenizer.apply_chat_template([QUESTION])
    assert chat["count"] == served.post(CHAT, ASKED).json()["usage"]["prompt_tokens"]
    for wrong in ({}, {"prompt": "a", "content": "b"}, {"prompt": "x" * 3_000_000}, {"messages": []}):
        error(served.post("/tokenize", wrong), 400)
    error(served.post("/detokenize", {"tokens": [10**6]}), 400)


def test_version_and_fingerprint(served: Running):
    assert served.get("/version").json() == {"version": forerun.__version__}
    assert served.post(CHAT, ASKED).json()["system_fingerprint"] == f"forerun-{forerun.__version__}"
    assert served.get(f"/v1/models/{NAME}").json()["id"] == NAME


def test_keys_in_either_header(llm: LLM):
    digest = hashlib.sha256(b"secret").hexdigest()
    with running(llm, keys=ApiKeys.parse(f"ann {digest}", "here")) as made:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert made.post(CHAT, ASKED, headers=headers).status_code == 200
        for headers in ({"x-api-key": "wrong"}, {"x-api-key": ""}, {"authorization": "Basic secret"}, {}):
            assert error(made.post(CHAT, ASKED, headers=headers), 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
def test_the_model_may_be_left_out(served: Running, path: str):
    asked: dict[str, Any] = {"messages": [QUESTION], "input": "Who?", "max_tokens": 4, "max_output_tokens": 4}
    asked |= {"prompt": "The lamp"} if path == "/v1/completions" else {}
    for body in (asked, asked | {"model": None}):
        response = served.post(path, body)
        assert response.status_code == 200 and response.json()["model"] == NAME


def test_vllms_names_for_a_message_that_is_continued(served: Running):
    tokenizer, start = served.llm.tokenizer, {"role": "assistant", "content": "The keeper"}
    asked = ASKED | {"messages": [QUESTION, start]}
    anew = served.llm.generate([tokenizer.apply_chat_template([QUESTION, start])], SamplingParams(max_tokens=8))[0].text
    assert content(served, asked | {"add_generation_prompt": True}) == anew
    assert content(served, asked | {"continue_final_message": False}) == anew
    assert content(served, asked | {"continue_final_message": True, "add_generation_prompt": False}) == content(
        served, asked
    )
    both = asked | {"continue_final_message": True, "add_generation_prompt": True}
    assert "continue_final_message" in error(served.post(CHAT, both), 400)["message"]


def test_counts_in_every_chunk(served: Running):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = ASKED | {"stream": True, "stream_options": options, "ignore_eos": True}
    chunks = [json.loads(line[6:]) for line in served.post(CHAT, body).text.splitlines() if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    assert counts == sorted(counts) and counts[-1] == 8 and len(counts) == len(chunks) > 2
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks if chunk.get("usage")}) == 1
