"""Requests that no client should send: made-up schemas, grammars, parameters and bodies, and misuse of sockets.

Each is drawn from a seeded generator, so that a run can be repeated. Knows no server: `serve_fuzz` sends them, and so
do the server's tests.
"""

from __future__ import annotations

import json
import random
from typing import Any

CHAT = "/v1/chat/completions"
SESSIONS = ("a", "b", "c")
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


def any_request(draws: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    text = draws.choice(["Who counts?", "", "\n", "<tool_call>", "é" * 50, "lamp " * 900])
    chat: dict[str, Any] = {"model": model, "max_tokens": 6, "messages": [{"role": "user", "content": text}]}
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
        return "/v1/responses", {"model": model, "input": [item], "max_output_tokens": 6} | odd
    else:
        return "/v1/completions", {
            "model": model,
            "prompt": draws.choice([*ODD, text]),
            "echo": True,
            "logprobs": 1,
            "max_tokens": 2,
        }
    return CHAT, chat | {"stream": draws.random() < 0.3}


def mutated(draws: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A request of any dialect that uses many fields, with one or two values replaced by odd ones."""
    path, body = draws.choice((_chat, _chat, _messages, _responses, _completion, _tokens))(draws)
    body["model"] = model
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(body)
    for node, key in draws.sample(places, draws.choice((1, 1, 2))):
        node[key] = draws.choice(ODD)
    return path, body


def _own(draws: random.Random) -> dict[str, Any]:
    return {"prefill": draws.choice(["exact", "speculative", "provisional"]), "speculation": "auto", "cache": True}


def _schema() -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": [1, None]}}, "required": ["a"]}


def _chat(draws: random.Random) -> tuple[str, dict[str, Any]]:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "x", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    return CHAT, {
        "messages": history[: draws.choice((2, 4))],
        "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "seed": 3, "n": 2, "stop": ["x"], "logprobs": True,
        "top_logprobs": 2, "logit_bias": {"5": 1.0}, "tools": [tool], "tool_choice": "auto", "stream": True,
        "stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "prompt_cache_key": "k",
        "prediction": {"type": "content", "content": "Because"}, "user": "ann", "metadata": {"a": "b"},
        "guided_regex": None, "min_p": 0.1, "top_k": 4, "repetition_penalty": 1.1, "stop_token_ids": [7],
        "forerun": _own(draws),
    }  # fmt: skip


def _messages(draws: random.Random) -> tuple[str, dict[str, Any]]:
    mark = {"cache_control": {"type": "ephemeral", "ttl": draws.choice(["5m", "1h"])}}
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "1"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [{"type": "text", "text": "7"}]}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Lamps."}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Why?"} | mark, document]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}, call]},
        {"role": "user", "content": [result | mark, {"type": "text", "text": "And?"}]},
    ]
    body: dict[str, Any] = {
        "messages": history[: draws.choice((1, 3))], "system": [{"type": "text", "text": "Be brief."} | mark],
        "max_tokens": 8, "stream": draws.random() < 0.5, "stop_sequences": ["x"], "temperature": 0.7, "top_p": 0.9,
        "top_k": 4, "tools": [{"name": "f", "description": "d", "input_schema": _schema(), "strict": True} | mark],
        "tool_choice": {"type": draws.choice(["auto", "any", "none"]), "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}, "forerun": _own(draws),
    }  # fmt: skip
    if draws.random() < 0.3:
        body["output_config"] = {"effort": "low", "format": {"type": "json_schema", "schema": _schema()}}
    return draws.choice(("/v1/messages", "/v1/messages", "/v1/messages/count_tokens")), body


def _responses(draws: random.Random) -> tuple[str, dict[str, Any]]:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": "1"}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ]
    form = {"type": "json_schema", "name": "n", "strict": True, "schema": _schema()}
    return "/v1/responses", {
        "input": items[: draws.choice((1, 3, 5))], "instructions": "Be brief.", "max_output_tokens": 8,
        "temperature": 0.7, "top_p": 0.9, "stream": draws.random() < 0.5, "store": draws.random() < 0.5,
        "tools": [{"type": "function", "name": "f", "parameters": _schema(), "strict": True}], "tool_choice": "auto",
        "parallel_tool_calls": False, "text": {"format": draws.choice([form, {"type": "text"}]), "verbosity": "low"},
        "top_logprobs": 2, "include": ["message.output_text.logprobs"], "prompt_cache_key": "k", "metadata": {"a": "b"},
        "reasoning": {"effort": "low"}, "truncation": "auto", "forerun": _own(draws),
    }  # fmt: skip


def _completion(draws: random.Random) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {
        "prompt": draws.choice(["Why?", [5, 6, 7], ["Why?", "How?"]]), "max_tokens": 8, "temperature": 0.7, "n": 2,
        "logprobs": 2, "echo": draws.random() < 0.5, "stop": "x", "stream": draws.random() < 0.5, "best_of": 1,
        "suffix": None, "logit_bias": {"5": -100}, "seed": 3, "top_k": 4, "guided_choice": ["a", "b"],
        "forerun": _own(draws),
    }  # fmt: skip


def _tokens(draws: random.Random) -> tuple[str, dict[str, Any]]:
    path = draws.choice(("/tokenize", "/detokenize", "/forerun/tokens", "/forerun/tree"))
    message = {"role": "user", "content": "Why?"}
    if path == "/detokenize":
        return path, {"tokens": [5, 6, 7]}
    own = {"prompt": "Why?", "with_pieces": True, "add_special_tokens": True} if draws.random() < 0.5 else {}
    return path, (own if path == "/tokenize" and own else {"messages": [message]})


def any_session(draws: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    name: Any = draws.choice([*SESSIONS, "../d", "", "x" * 129, {"name": "a", "ttl": draws.choice([-1, 1e9, 5])}])
    message = {"role": draws.choice(["user", "assistant", "tool"]), "content": draws.choice(["And then?", "", "é"])}
    return CHAT, {"model": model, "messages": [message], "max_tokens": 4, "forerun": {"session": name}}


def any_bytes(draws: random.Random, model: str) -> bytes:
    """A body that is no request, or hardly one."""
    good = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why? " * 20}], "max_tokens": 4})
    kind = draws.randrange(8)
    if kind == 0:
        return draws.randbytes(draws.choice([0, 1, 100, 100_000]))
    if kind == 1:
        return good[: draws.randrange(len(good))].encode()
    if kind == 2:
        return b"[" * draws.choice([10, 1000, 200_000])
    if kind == 3:
        return good.replace("Why?", "lamp " * draws.choice([10_000, 75_000, 300_000])).encode()  # 1, 7.5, 30 MB
    if kind == 4:
        return b'{"model": NaN, "messages": Infinity, "n": 1e999}'
    if kind == 5:
        return good.encode("utf-16")
    if kind == 6:
        return ('{"a":' * 5000 + "1" + "}" * 5000).encode()
    at = draws.randrange(len(good))
    return good[:at].encode() + draws.randbytes(3) + good[at:].encode()
