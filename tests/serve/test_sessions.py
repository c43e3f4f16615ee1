"""Stored conversations: messages sent again are not appended again, one turn at a time, separate for each key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from forerun import LLM, SamplingParams
from forerun.serve.config import ApiKeys
from tests.serve.common import ASKED, CHAT, ENDLESS, NAME, Holding, Running, error, running, slowed, wait_for

USER: Any = {"role": "user", "content": "And who counts the lamps?"}
LAMP: Any = {"type": "function", "function": {"name": "turn_lamp"}}
COMPLETIONS = "/v1/completions"


def own(session: Any, **more: Any) -> dict[str, Any]:
    return {"forerun": {"session": session} | more}


def told(made: Running, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    response = made.post(CHAT, body, **options)
    assert response.status_code == 200, response.text
    return response.json()


def content(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def names(made: Running, **options: Any) -> list[str]:
    return [entry["name"] for entry in made.get("/forerun/sessions", **options).json()["data"]]


def test_a_conversation_goes_on_where_it_was(served: Running):
    first = told(served, ASKED | own("a b/c <|im_end|>"))
    assert first["forerun"]["session"]["name"] == "a b/c <|im_end|>" and first["forerun"]["session"]["turn"] == 1
    second = told(served, ASKED | {"messages": [USER]} | own("a b/c <|im_end|>"))
    with served.llm.session("the library's") as same:
        for message, answer in ((*ASKED["messages"], first), (USER, second)):
            same.append(message)
            assert content(answer) == same.answer(SamplingParams(max_tokens=8)).text
    session = second["forerun"]["session"]
    assert session["turn"] == 2 and sum(session["served"].values()) == session["prompt_tokens"]
    assert session["served"]["pool"] >= first["usage"]["prompt_tokens"] - 16
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == session["served"]["pool"]


def test_the_whole_conversation_sent_again_gives_the_same(served: Running):
    name, messages = "whole", [{"role": "system", "content": "Be brief."}, *ASKED["messages"]]
    for turn in range(1, 4):
        answer = told(served, ASKED | {"messages": messages} | own(name))
        assert answer["forerun"]["session"]["turn"] == turn
        messages = [*messages, {"role": "assistant", "content": content(answer)}, USER]
    assert content(told(served, ASKED | {"messages": messages})) == content(
        told(served, ASKED | {"messages": messages} | own(name))
    )
    changed = [*messages[:2], {"role": "assistant", "content": "The tide."}, USER]
    assert "word for word" in error(served.post(CHAT, ASKED | {"messages": changed} | own(name)), 400)["hint"]
    known = messages[:1]
    assert "new ones" in error(served.post(CHAT, ASKED | {"messages": known} | own(name)), 400)["message"]


def test_streams_and_the_official_client(served: Running):
    options: Any = {"extra_body": own({"name": "streamed", "ttl": 60}), "stream": True}
    chunks: list[Any] = list(served.client().chat.completions.create(**ASKED, **options))
    assert chunks[-1].forerun["event"] == "session" and not chunks[-1].choices
    assert chunks[-1].forerun["session"] | {"served": 0, "prompt_tokens": 0, "tokens": 0} == {
        "name": "streamed", "turn": 1, "ttl": 60, "served": 0, "prompt_tokens": 0, "tokens": 0,
    }  # fmt: skip
    assert not any(hasattr(chunk, "forerun") for chunk in chunks[:-1])
    options["extra_body"] = own("streamed", statistics=True)
    last: Any = list(served.client().chat.completions.create(**ASKED | {"messages": [USER]}, **options))[-1]
    assert last.forerun["event"] == "statistics" and last.forerun["session"]["turn"] == 2
    assert last.forerun["statistics"]["served"] == last.forerun["session"]["served"]


def test_calls_and_results(served: Running):
    asked = ASKED | {"tools": [LAMP], "max_tokens": 200, "parallel_tool_calls": False, "tool_choice": "required"}
    message = told(served, asked | own("tools"))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "It turns."}
    short = told(served, ASKED | {"tools": [LAMP], "messages": [result]} | own("tools"))
    told(served, asked | own("tools again"))
    whole = [*ASKED["messages"], message, result]
    long = told(served, ASKED | {"tools": [LAMP], "messages": whole} | own("tools again"))
    assert content(short) == content(long) and long["forerun"]["session"]["turn"] == 2
    assert short["usage"]["prompt_tokens"] == long["usage"]["prompt_tokens"]


def test_plain_texts(served: Running):
    asked: Any = {"model": NAME, "prompt": "The lamp turns", "temperature": 0, "max_tokens": 8}
    first = served.post(COMPLETIONS, asked | own("text")).json()
    second = served.post(COMPLETIONS, asked | {"prompt": " and turns"} | own("text")).json()
    assert second["forerun"]["session"]["turn"] == 2
    assert second["usage"]["prompt_tokens"] > first["usage"]["total_tokens"]
    assert "cannot take messages" in error(served.post(CHAT, ASKED | own("text")), 400)["message"]
    assert "2 prompts" in error(served.post(COMPLETIONS, asked | {"prompt": ["a", "b"]} | own("text")), 400)["message"]


def test_one_turn_at_a_time(llm: LLM, slow: None):
    with running(llm) as made:
        holding = Holding(made, body=ENDLESS | {"max_tokens": 120, "forerun": ENDLESS["forerun"] | {"session": "one"}})
        found = error(made.post(CHAT, ASKED | own("one")), 409)
        assert found["code"] == "session_busy" and found["type"] == "conflict_error" and "'one'" in found["message"]
        with pytest.raises(openai.ConflictError):
            made.client().chat.completions.create(**ASKED, extra_body=own("one"))
        assert delete(made, "one") == 409
        assert made.post(CHAT, ASKED | own("another")).status_code == 200
        assert holding.join().endswith("data: [DONE]\n\n")
        wait_for(lambda: made.app.state.admission.num_open == 0)
        assert told(made, ASKED | {"messages": [USER]} | own("one"))["forerun"]["session"]["turn"] == 2


def delete(made: Running, name: str, **options: Any) -> int:
    return httpx.delete(f"{made.url}/forerun/sessions/{name}", **options).status_code


def test_a_failed_turn_is_rolled_back(llm: LLM):
    patch, _ = slowed(llm)
    with running(llm, max_request_s=1.0) as made:
        endless = ENDLESS | {"forerun": ENDLESS["forerun"] | {"session": "late"}}
        assert "longer than this server allows" in made.post(CHAT, endless).text
        wait_for(lambda: made.app.state.admission.num_open == 0)
        assert "late" not in names(made)  # it never came to an answer
        patch.undo()
        first = told(made, ASKED | own("late"))
        patch, _ = slowed(llm)
        error(made.post(CHAT, endless | {"stream": False}), 408)
        error(made.post(CHAT, ASKED | own("late") | {"max_tokens": 0}), 400)
        error(made.post(CHAT, ASKED | own("late") | {"messages": [USER | {"content": "ship " * 4000}]}), 400)
        patch.undo()
        second = told(made, ASKED | {"messages": [USER]} | own("late"))
        assert second["forerun"]["session"]["turn"] == 2
        assert content(told(made, ASKED | own("in time"))) == content(first)
        assert content(told(made, ASKED | {"messages": [USER]} | own("in time"))) == content(second)
    patch.undo()


def test_a_disconnect_rolls_the_turn_back(llm: LLM):
    patch, _ = slowed(llm)
    with running(llm) as made:
        told(made, ASKED | own("left"))
        endless = ENDLESS | {"messages": [USER], "forerun": ENDLESS["forerun"] | {"session": "left"}}
        with httpx.stream("POST", made.url + CHAT, json=endless, timeout=30) as response:
            next(response.iter_text())
        wait_for(lambda: made.app.state.admission.num_open == 0 and not made.app.state.context.sessions.busy, 3)
        wait_for(lambda: llm.engine.idle, 3)
        patch.undo()
        assert told(made, ASKED | {"messages": [USER]} | own("left"))["forerun"]["session"]["turn"] == 2
    patch.undo()


def test_every_key_has_sessions_of_its_own(llm: LLM):
    lines = [f"{name} {hashlib.sha256(name.encode()).hexdigest()}" for name in ("ann", "ann/x")]
    ann, other = ({"authorization": f"Bearer {name}"} for name in ("ann", "ann/x"))
    with running(llm, keys=ApiKeys.parse("\n".join(lines), "here")) as made:
        told(made, ASKED | own("x mine"), headers=ann)
        told(made, ASKED | {"messages": [USER]} | own("mine"), headers=other)
        assert told(made, ASKED | {"messages": [USER]} | own("x mine"), headers=ann)["forerun"]["session"]["turn"] == 2
        again = told(made, ASKED | own("x mine"), headers=other)["forerun"]["session"]
        assert again["turn"] == 1
        missing = ASKED | own({"name": "secret", "create": False})
        found = error(made.post(CHAT, missing, headers=other), 404)
        assert found["code"] == "session_not_found" and "x mine" not in str(found)
        assert names(made, headers=ann) == ["x mine"] and names(made, headers=other) == ["mine", "x mine"]
        assert delete(made, "mine", headers=ann) == 404
        assert delete(made, "mine", headers=other) == 200
        assert names(made, headers=other) == ["x mine"]


@pytest.mark.parametrize(
    "session",
    [
        "",
        " ",
        "x" * 129,
        "a\nb",
        "..",
        "\ud800",
        5,
        {"name": "a", "ttl": 0},
        {"name": "a", "ttl": 1e9},
        {"ttl": 5},
        {"nam": ""},
    ],
)
def test_names_and_times_that_are_refused(served: Running, session: Any):
    body = json.dumps(ASKED | own(session))
    assert (
        "session"
        in error(served.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)["message"]
    )


def test_sessions_that_are_gone_leave_no_figures_behind(served: Running):
    before = served.get("/forerun/stats").json()["sessions"]
    told(served, ASKED | own("brief"))
    assert served.get("/forerun/stats").json()["sessions"] == before + 1
    for number in range(6):  # whose first turn comes to nothing
        cut_off = ENDLESS | {"forerun": ENDLESS["forerun"] | {"session": f"cut off {number}"}}
        with httpx.stream("POST", served.url + CHAT, json=cut_off, timeout=30) as response:
            next(response.iter_text())
        wait_for(lambda: served.llm.engine.idle and not served.app.state.context.sessions.busy, 3)  # pages are free
    assert delete(served, "brief") == 200
    assert served.get("/forerun/stats").json()["sessions"] == before


def test_what_does_not_go_with_a_session(served: Running):
    assert "n is 2" in error(served.post(CHAT, ASKED | {"n": 2} | own("many")), 400)["message"]
    assert "cache" in error(served.post(CHAT, ASKED | own("many", cache=False)), 400)["message"]
    assert "many" not in names(served)


@pytest.fixture
def kept(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[[], LLM]]:
    def opened() -> LLM:
        return LLM(
            str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True, disk=tmp_path, kv_cache_tokens=8192
        )

    yield opened


def test_expired_sessions_are_closed_and_stored_on_disk(kept: Callable[[], LLM]):
    with kept() as llm, running(llm, max_sessions=2) as made:
        told(made, ASKED | own({"name": "short", "ttl": 0.01}))
        for name in ("a", "b", "c"):
            told(made, ASKED | own(name))
        assert set(names(made)) == {"short", "a", "b", "c"} and len(made.app.state.context.sessions._used) == 2
        assert told(made, ASKED | {"messages": [USER]} | own("short"))["forerun"]["session"]["turn"] == 2
    with kept() as llm, running(llm) as made:
        again = told(made, ASKED | {"messages": [USER]} | own({"name": "a", "create": False}))["forerun"]["session"]
        assert again["turn"] == 2 and again["served"]["disk"] > 0
        assert delete(made, "b") == 200 and "b" not in names(made)
        error(made.post(CHAT, ASKED | own({"name": "b", "create": False})), 404)


def test_a_session_moves_between_servers_that_share_a_folder(kept: Callable[[], LLM]):
    with kept() as one, kept() as two, running(one) as here, running(two) as there:
        told(here, ASKED | own("moving"))
        told(there, ASKED | {"messages": [USER]} | own("moving"))
        third = told(here, ASKED | {"messages": [USER]} | own("moving"))
        assert third["forerun"]["session"]["turn"] == 3
        patch, _ = slowed(one)
        holding = Holding(here, ENDLESS | {"messages": [USER]} | own("moving"))
        found = error(there.post(CHAT, ASKED | {"messages": [USER]} | own("moving")), 409)
        assert found["code"] == "session_busy"
        patch.undo()
        holding.join()
        assert told(there, ASKED | {"messages": [USER]} | own("moving"))["forerun"]["session"]["turn"] == 5


def test_without_a_disk_nothing_is_closed_before_its_time(tiny_folder: Callable[[str], Path]):
    llm = LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True)
    with llm, running(llm, max_sessions=1) as made:
        told(made, ASKED | own({"name": "a", "ttl": 0.5}))
        response = made.post(CHAT, ASKED | own("b"))
        assert error(response, 429)["code"] == "session_limit" and int(response.headers["retry-after"]) > 0
        assert told(made, ASKED | {"messages": [USER]} | own("a"))["forerun"]["session"]["turn"] == 2
        wait_for(lambda: made.post(CHAT, ASKED | own("b")).status_code == 200)
        assert names(made) == ["b"]


def test_a_turn_that_could_not_be_written_is_reported_and_not_continued(
    kept: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with kept() as llm, running(llm) as made:
        assert "saved" not in told(made, ASKED | own("full"))["forerun"]["session"]
        monkeypatch.setattr("forerun.sharing.session_registry.os.fsync", full)
        lost = told(made, ASKED | {"messages": [USER]} | own("full"))
        assert lost["forerun"]["session"]["saved"] is False and lost["forerun"]["session"]["turn"] == 2
        assert "forerun_unsaved_turns_total 1.0" in made.get("/metrics").text
        refused = made.post(CHAT, ASKED | {"messages": [USER]} | own("full"))
        assert error(refused, 507)["code"] == "session_not_saved" and refused.headers["x-should-retry"] == "false"
        asked = ASKED | {"messages": [USER]} | own({"name": "full", "allow_unsaved": True})
        assert told(made, asked)["forerun"]["session"]["turn"] == 3
        monkeypatch.undo()  # there is room again: what is in memory is written, and the session goes on
        again = told(made, ASKED | {"messages": [USER]} | own("full"))["forerun"]["session"]
        assert again["turn"] == 4 and "saved" not in again
    with kept() as llm, running(llm) as made:
        assert told(made, ASKED | {"messages": [USER]} | own("full"))["forerun"]["session"]["turn"] == 5


def test_a_session_with_an_unwritten_turn_is_not_closed(kept: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch):
    """Closed, it would be read again without that turn, as if there had been none."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with kept() as llm, running(llm, max_sessions=1) as made:
        told(made, ASKED | own({"name": "full", "ttl": 0.01}))
        monkeypatch.setattr("forerun.sharing.session_registry.os.fsync", full)
        assert told(made, ASKED | {"messages": [USER]} | own("full"))["forerun"]["session"]["saved"] is False
        refused = made.post(CHAT, ASKED | own("another"))  # neither by its time nor for its place
        assert error(refused, 429)["code"] == "session_limit"
        assert error(made.post(CHAT, ASKED | {"messages": [USER]} | own("full")), 507)["code"] == "session_not_saved"
        monkeypatch.undo()
        told(made, ASKED | own("another"))
        assert told(made, ASKED | {"messages": [USER]} | own("full"))["forerun"]["session"]["turn"] == 3
