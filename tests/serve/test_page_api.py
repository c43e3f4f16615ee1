"""The page's own endpoints: what a server offers, what the prefix tree holds, how text is tokenised."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun import LLM
from tests.serve.common import ASKED, CHAT, NAME, Running, error, running

SECRET = "The vault opens at nine and the key hangs behind the clock, as all of us here know by heart."


def say(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_about_tells_what_may_be_asked_for(served: Running):
    told = served.get("/forerun/about").json()
    assert told["model"] == NAME and told["context"] == served.llm.engine.config.max_model_len
    assert told["prefill"]["exact"] is None and "profile" in told["prefill"]["provisional"]
    assert told["speculation"][:2] == ["auto", "off"] and told["shows_prompts"] is False
    for name in told["speculation"]:
        asked = ASKED | {"max_tokens": 1, "forerun": {"speculation": name}}
        assert served.post(CHAT, asked).status_code == 200


def test_the_tree_has_counts_for_all_and_text_only_of_the_own_prefix(served: Running):
    served.llm.clear_cache()
    for _ in range(3):
        served.post(CHAT, ASKED | say(SECRET) | {"max_tokens": 2})
    told = served.get("/forerun/tree").json()
    assert sum(run["reads"] * run["tokens"] for run in told["runs"]) > 0 == told["left_out"]
    assert "vault" not in served.get("/forerun/tree").text and all("text" not in run for run in told["runs"])
    mine = served.post("/forerun/tree", say(SECRET)).json()["runs"]
    assert mine[0]["shared"] and "vault" in mine[0]["text"]
    other = served.post("/forerun/tree", say("Where does the key hang?"))
    assert "vault" not in other.text
    guess = served.post("/forerun/tree", say(SECRET[:40] + "and that is all I know. " * 3)).text
    assert "vault" in guess and "clock" not in guess and "behind" not in guess


def test_a_server_may_be_started_so_that_words_are_shown(llm: LLM):
    with running(llm, show_prompts=True) as made:
        llm.clear_cache()
        made.post(CHAT, ASKED | say(SECRET) | {"max_tokens": 2})
        assert "vault" in made.get("/forerun/tree").text and made.get("/forerun/about").json()["shows_prompts"]


def test_tokens_are_those_of_the_request(served: Running):
    text = "Naïve café 🦊 <|im_end|> done"
    told = served.post("/forerun/tokens", say(text)).json()
    ids = served.llm.encode(say(text)["messages"])
    assert told["tokens"] == len(ids) == len(told["pieces"])
    assert "".join(told["pieces"]) == served.llm.tokenizer.decode(ids, skip_special=False)
    usage = served.post(CHAT, ASKED | say(text)).json()["usage"]
    assert usage["prompt_tokens"] == told["tokens"]
    long = served.post("/forerun/tokens", say("tide " * 9000)).json()
    assert long["tokens"] > long["context"] and long["pieces"] == []


def test_stats_are_those_of_the_library(served: Running):
    served.post(CHAT, ASKED)
    told, mine = served.get("/forerun/stats").json(), served.llm.stats()
    assert told["answers"] == mine.answers and told["served"] == mine.served
    assert told["open"] == 0 and isinstance(told["sessions"], int)


@pytest.mark.parametrize("path", ["/forerun/tree", "/forerun/tokens"])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        say("x") | {"more": 1},
        say("\ud800"),
        [1],
    ],
)
def test_what_is_no_conversation_is_refused(served: Running, path: str, body: Any):
    sent = {"content": json.dumps(body), "headers": {"content-type": "application/json"}}
    assert error(served.post(path, **sent), 400)["type"] == "invalid_request_error"


def test_steps_are_counted_live_where_asked_for(served: Running):
    asked = ASKED | {"stream": True}
    client = served.client()
    chunks = list(client.chat.completions.create(**asked, extra_body={"forerun": {"statistics": "steps"}}))
    counts = [chunk.forerun["tokens"] for chunk in chunks if chunk.choices and hasattr(chunk, "forerun")]
    figures = chunks[-1].forerun["statistics"]
    assert counts == sorted(counts) and counts[-1] == figures["completion_tokens"] == 8
    assert len(figures["timeline"]) == figures["steps"] and sum(step[1] for step in figures["timeline"]) == 8
    plain = list(client.chat.completions.create(**asked, extra_body={"forerun": {"statistics": True}}))
    assert plain[-1].forerun["statistics"]["timeline"] == []
    assert all(not hasattr(chunk, "forerun") for chunk in plain[:-1])


def test_a_request_may_want_no_cache(served: Running):
    asked = ASKED | say(SECRET * 3)
    served.post(CHAT, asked)
    assert served.post(CHAT, asked).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    cold = served.post(CHAT, asked | {"forerun": {"cache": False}}).json()
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    error(served.post(CHAT, asked | {"forerun": {"cache": 0}}), 400)
