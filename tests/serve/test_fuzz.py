"""Made-up schemas, grammars, parameters and bodies beside streams: each is answered or refused, no stream changes."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.common import CHAT, NAME, Running, wait_for
from tests.serve.test_isolation import streams

REQUESTS = 60  # of one seed
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    10**40,
    "",
    "\ud800",
    "<|im_end|>",
    [],
    {},
    [[]],
    {"type": "text"},
    "x" * 3000,
]


def any_schema(draws: random.Random, depth: int = 0) -> Any:
    kind = draws.choice(["object", "array", "string", "integer", "number", "enum", "anyOf", "$ref", "odd", "true"])
    if depth > 3 or kind == "true":
        return True
    if kind == "object":
        names = [draws.choice(["a", "b", "type", "$ref", "é", "", '"']) for _ in range(draws.randint(0, 4))]
        return {
            "type": "object",
            "properties": {name: any_schema(draws, depth + 1) for name in names},
            "required": names,
        }
    if kind == "array":
        return {"type": "array", "items": any_schema(draws, depth + 1), "maxItems": draws.choice([0, 1, 3, -1, 10**9])}
    if kind == "string":
        return {
            "type": "string",
            "pattern": draws.choice(["^a+$", "(", "[a-z]{0,900}", "(?=a)", "\\d{3}", ".*(a|b){90}"]),
        }
    if kind in ("integer", "number"):
        return {"type": kind, "minimum": draws.choice([0, -(10**30), 5.5, 10]), "maximum": draws.choice([3, 10**30, 9])}
    if kind == "enum":
        return {"enum": draws.sample(ODD, 3)}
    if kind == "anyOf":
        return {"anyOf": [any_schema(draws, depth + 1) for _ in range(3)]}
    return {"$ref": draws.choice(["#", "#/$defs/a", "http://x/y"])} if kind == "$ref" else draws.choice(ODD)


def any_request(draws: random.Random) -> tuple[str, dict[str, Any]]:
    text = draws.choice(["Who counts?", "", "\n", "<tool_call>", "é" * 50, "lamp " * 900])
    chat: dict[str, Any] = {"model": NAME, "max_tokens": 6, "messages": [{"role": "user", "content": text}]}
    kind = draws.randrange(7)
    if kind == 0:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": any_schema(draws)}}
    elif kind == 1:
        name = draws.choice(["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
        values = [
            any_schema(draws),
            "a*",
            "(",
            ["a", "b"],
            'start: "a" | start "b"',
            "start: start",
            'root ::= "a"',
            "start: /(/",
        ]
        chat[name] = draws.choice(values)
    elif kind == 2:
        function = {"name": draws.choice(["f", "f g", "x" * 200]), "parameters": any_schema(draws), "strict": True}
        chat |= {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": draws.choice(["auto", "required"]),
        }
    elif kind == 3:
        names = [
            "temperature",
            "top_p",
            "top_k",
            "n",
            "seed",
            "stop",
            "logit_bias",
            "max_tokens",
            "stop_token_ids",
            "messages",
        ]
        chat |= {name: draws.choice(ODD) for name in draws.sample(names, 2)}
    elif kind == 4:
        block = draws.choice([{"type": "text", "text": text}, {"type": "tool_result"}, {"type": draws.choice(ODD)}, {}])
        message = {"role": draws.choice(["user", "assistant"]), "content": [block]}
        return "/v1/messages", chat | {"messages": [message], draws.choice(["system", "tools"]): draws.choice(ODD)}
    elif kind == 5:
        item = draws.choice(
            [{"role": "user", "content": text}, {"type": "function_call"}, {"type": draws.choice(ODD)}, {}]
        )
        odd = {draws.choice(["tools", "text", "tool_choice", "previous_response_id"]): draws.choice(ODD)}
        return "/v1/responses", {"model": NAME, "input": [item], "max_output_tokens": 6} | odd
    else:
        return "/v1/completions", {
            "model": NAME,
            "prompt": draws.choice([*ODD, text]),
            "echo": True,
            "logprobs": 1,
            "max_tokens": 2,
        }
    return CHAT, chat | {"stream": draws.random() < 0.3}


@pytest.mark.parametrize("seed", [1, 2])
def test_made_up_requests_beside_streams(served: Running, seed: int):
    draws = random.Random(seed)
    asked = [any_request(draws) for _ in range(REQUESTS)]

    def ask(request: tuple[str, dict[str, Any]]) -> int:
        path, body = request
        text = json.dumps(body)  # lone surrogates as escapes
        response = served.post(path, content=text, headers={"content-type": "application/json"})
        assert response.status_code < 500, (path, text[:600], response.text)
        assert "server_error" not in response.text, (path, text[:600], response.text)
        return response.status_code

    with streams(served), ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(ask, asked))
    assert {200, 400} <= set(statuses) <= {200, 400, 404}
    wait_for(lambda: served.llm.engine.idle)
    assert not served.app.state.admission.num_open and not served.llm.engine.leases
    assert served.llm.engine.output.open_texts == 0
