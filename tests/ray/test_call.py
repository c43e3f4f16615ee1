"""What decides a request's replica: text, session, stored response; and how many answers it asks for."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import pytest

from forerun.ray.call import (
    MAX_ROUTING_CHARS,
    ReplicaCall,
    count_chosen,
    count_ended,
    order_replicas,
    publish_replicas,
    rank,
    replica_call,
    replica_loads,
)
from forerun.serve.config import ApiKey


def made(body: Any, path: str = "/v1/chat/completions", method: str = "POST", key: ApiKey | None = None) -> ReplicaCall:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    scope = {"type": "http", "method": method, "path": path, "headers": [(b"a", b"b")], "state": {"key": key}}
    return replica_call(scope | {"app": object(), "query_string": b""}, raw)


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]} | more


def test_the_text_of_a_prompt_in_every_dialect():
    assert made(user("Why?")).prompt == "systemBe brief.userWhy?"
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}], "system": "Be brief."}
    assert made(parts, "/v1/messages").prompt == "Be brief.userWhy?"
    assert made({"instructions": "Be brief.", "input": "Why?"}, "/v1/responses").prompt == "Be brief.Why?"
    assert made({"prompt": "Once"}, "/v1/completions").prompt == "Once"
    assert made({"prompt": [1, 2]}, "/v1/completions").prompt == "1 2 " != made({"prompt": [12]}).prompt
    assert len(made(user("x" * 10**6)).prompt) == MAX_ROUTING_CHARS


def test_prompts_that_begin_the_same_have_texts_that_begin_the_same():
    first, second = made(user("A document. One?")).prompt, made(user("A document. Two?")).prompt
    assert first[:30] == second[:30] and first != second


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 10**5, b'{"messages": 7, "n": "x", "forerun": 3}'])
def test_a_body_that_is_no_request_goes_on_to_be_refused(body: bytes):
    call = made(body)
    assert call.answers == 1 and not call.session and not call.stored


def test_how_many_answers_a_request_asks_for():
    assert made(user("a")).answers == 1 and made(user("a", n=3)).answers == 3
    prompts = {"prompt": ["a", "b"], "n": 2}
    assert made(prompts, "/v1/completions").answers == 4
    assert made({"prompt": [1, 2, 3]}, "/v1/completions").answers == 1
    assert made({"prompt": [[1], [2]]}, "/v1/completions").answers == 2
    assert made(user("a"), "/forerun/tree").answers == 0 and made(b"", method="GET").answers == 0


def test_sessions_belong_to_their_key():
    ann, bob = ApiKey("ann", b""), ApiKey("bob", b"")
    calls = [made(user("a", forerun={"session": "x"}), key=key) for key in (ann, bob)]
    assert [call.session for call in calls] == ["ann x", "bob x"]
    named = made(user("a", forerun={"session": {"name": "x"}}), key=ann)
    assert named.session == made(b"", "/forerun/sessions/x", "DELETE", ann).session == "ann x"


def test_stored_responses():
    assert made({"previous_response_id": "resp_1"}, "/v1/responses").stored
    assert made(b"", "/v1/responses/resp_1", "GET").stored and not made(b"", "/v1/responses").stored


def test_what_travels_has_no_objects_of_the_process_and_the_text_once():
    call = pickle.loads(pickle.dumps(made(user("Why?"))))
    assert "app" not in call.scope and call.prompt == "" and b"Why?" in call.body and call.answers == 1


def test_few_texts_move_when_a_replica_comes_or_goes():
    texts, four = [f"document {number}" for number in range(400)], list("abcd")
    before = {text: rank(text, four)[0] for text in texts}
    assert min(Counter(before.values()).values()) > 60
    without = {text: rank(text, list("abc"))[0] for text in texts}
    assert all(without[text] == owner for text, owner in before.items() if owner != "d")
    assert sum(rank(text, list("abcde"))[0] != owner for text, owner in before.items()) < 130


def test_what_a_replica_holds_is_weighed_against_its_load():
    def chosen(loads: dict[str, int], holders: str, shared_tokens: int) -> str:
        return order_replicas({name: (count, 0) for name, count in loads.items()}, holders, 4 * shared_tokens)[0]

    assert chosen({"a": 0, "b": 0}, "b", 2000) == "b" and chosen({"a": 0, "b": 7}, "b", 2000) == "b"
    assert chosen({"a": 0, "b": 8}, "b", 2000) == "a" and chosen({"a": 0, "b": 9}, "b", 10**6) == "a"
    assert chosen({"a": 0, "b": 1}, "b", 200) == "a" and chosen({"a": 1, "b": 1}, "b", 200) == "b"
    assert chosen({"a": 0, "b": 0}, "b", 30) == "a"  # too little to count
    assert chosen({"a": 3, "b": 2, "c": 0}, "ab", 2000) == "b"  # of those that hold it, the one with less to do
    assert order_replicas({"a": (1, 0), "b": (0, 900), "c": (0, 30)}, [], 0) == ["c", "b", "a"]


def test_calls_are_counted_at_their_replica_until_they_end():
    first, second = made(user("Why?")), made(user("Why?"))
    for call, name in ((first, "a"), (second, "b"), (second, "b"), (second, "a")):  # the second was sent to another
        count_chosen("tested", call, name)
    chars = len(first.prompt)
    assert replica_loads("tested", "abc") == {"a": (2, 2 * chars), "b": (0, 0), "c": (0, 0)}
    count_ended("tested", second)
    count_ended("tested", second)
    count_chosen("tested", second, "b")  # its client has left while it was routed
    assert replica_loads("tested", "ab") == {"a": (1, 2 * chars), "b": (0, 0)}
    count_chosen("tested", second.again(), "b")
    assert replica_loads("tested", "ab") == {"a": (1, 2 * chars), "b": (1, chars)}
    assert not pickle.loads(pickle.dumps(first)).counted.replica and not first.to("b").counted.replica


def test_a_new_replica_need_not_make_up_for_what_others_got_before():
    publish_replicas("grown", ["a", "b"])
    for name, count in (("a", 3), ("b", 5)):
        for _ in range(count):
            count_chosen("grown", made(user("Why?")), name)
    sent = {name: chars for name, (_, chars) in replica_loads("grown", "ab").items()}
    publish_replicas("grown", ["a", "b", "c"])
    assert replica_loads("grown", "c")["c"] == (0, sent["a"])
    publish_replicas("grown", ["c", "b"])  # "a" has gone, "d" comes in its place
    publish_replicas("grown", ["b", "c", "d"])
    assert replica_loads("grown", "d")["d"] == (0, sent["a"]) and replica_loads("grown", "b")["b"][1] == sent["b"]
