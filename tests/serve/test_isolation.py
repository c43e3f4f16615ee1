"""One request's grammar, text or failure never ends, delays or changes another: streams beside it are compared with the
library."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from forerun import LLM, SamplingParams
from forerun.decode.grammar import AnswerGrammar
from forerun.engine.output import OutputWriter
from forerun.errors import BadRequest
from forerun.params import Grammar
from forerun.serve import preparation
from forerun.serve.preparation import PIECE_CHARS, PromptLimit
from forerun.text.tokenizer import Tokenizer
from tests.serve.common import ASKED, CHAT, Running, error, wait_for

TOKENS = 60
QUESTIONS = [f"Who counts the ships of pier {number}?" for number in range(3)]


def schema(body: Any) -> dict[str, Any]:
    return ASKED | {"response_format": {"type": "json_schema", "json_schema": {"schema": body}}}


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def ambiguous() -> dict[str, Any]:
    """Compiles, and then has more alternatives than the parser allows."""
    options = [{"type": "object", "properties": {f"k{j}": {"type": "string"} for j in range(i)}} for i in range(60)]
    return {"anyOf": options}


@contextmanager
def streams(made: Running) -> Iterator[None]:
    """Streams that are open while the block runs; each has to be what the library answers."""
    texts, gaps = [""] * len(QUESTIONS), [0.0] * len(QUESTIONS)
    begun = [threading.Event() for _ in QUESTIONS]
    release = threading.Event()
    step = made.llm.engine.step

    def held() -> bool:
        """Steps stay slow until the block is over, so that the streams are open all the while."""
        if not release.is_set():
            release.wait(0.01)
        return step()

    def read(number: int) -> None:
        messages = [{"role": "user", "content": QUESTIONS[number]}]
        body = ASKED | {"messages": messages, "max_tokens": TOKENS, "stream": True, "forerun": {"ignore_eos": True}}
        last = time.monotonic()
        with httpx.stream("POST", made.url + CHAT, json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    gaps[number] = max(gaps[number], time.monotonic() - last)
                    last = time.monotonic()
                    found = json.loads(line[6:])
                    assert "error" not in found, found
                    texts[number] += "".join(c["delta"].get("content") or "" for c in found["choices"])
                    begun[number].set()

    patch = pytest.MonkeyPatch()
    patch.setattr(made.llm.engine, "step", held)
    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(QUESTIONS))]
    try:
        for thread in threads:
            thread.start()
        assert all(one.wait(20) for one in begun)
        yield
    finally:
        release.set()
        for thread in threads:
            thread.join(60)
        patch.undo()
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for number, question in enumerate(QUESTIONS):
        assert texts[number] == made.llm.chat([{"role": "user", "content": question}], params)[0].text
    assert max(gaps) < 5


HOSTILE: list[tuple[dict[str, Any], str]] = [
    (schema(optional(500)), "500 optional properties"),
    (schema({"type": "array", "items": optional(20_000)}), "optional properties"),
    (schema({"type": "object", "properties": {f"o{i}": optional(400) for i in range(20)}}), "sum of their squares"),
    (schema(ambiguous()), "too complex"),
    (schema({"allOf": [{"anyOf": [{"const": [i, j]} for j in range(9)]} for i in range(9)]}), "grammar"),
    (schema({"type": "string", "pattern": "(?=a)b"}), "grammar"),
    (schema({"type": "nothing"}), "grammar"),
    (ASKED | {"logit_bias": {"true": 1}}, "no token id"),
    (ASKED | {"logit_bias": {"999999999": 1}}, "not in the vocabulary"),
    (ASKED | {"messages": [{"role": "user", "content": "tide " * 1_000_000}]}, "characters"),
    (ASKED | {"messages": [{"role": "user", "content": "a"}] * 20_000}, "messages"),
]


@pytest.mark.parametrize(("body", "reason"), HOSTILE, ids=[str(number) for number in range(len(HOSTILE))])
def test_a_hostile_request_is_refused_alone(served: Running, body: dict[str, Any], reason: str):
    with streams(served):
        start = time.monotonic()
        assert reason in error(served.post(CHAT, body), 400)["message"]
        assert time.monotonic() - start < 10
    assert served.llm.engine.idle and not served.app.state.admission.num_open


def test_boolean_token_ids_are_refused_by_the_library():
    with pytest.raises(BadRequest, match="True"):
        SamplingParams(logit_bias={True: 1.0})


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (AnswerGrammar, "allowed"),
        (AnswerGrammar, "advance"),
        (AnswerGrammar, "certain_text"),
        (AnswerGrammar, "accepts"),
        (OutputWriter, "append"),
        (OutputWriter, "finish"),
    ],
)
def test_an_exception_of_one_sequence_is_its_own(
    served: Running, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
):
    """Whatever raises, and with whatever: here only for the sequence with a grammar."""
    work: Callable[..., Any] = getattr(owner, name)

    def broken(self: Any, *args: Any) -> Any:
        if owner is AnswerGrammar or args[0].grammar is not None:
            raise RuntimeError("a secret of the prompt")
        return work(self, *args)

    served.post(CHAT, ASKED | {"response_format": {"type": "json_object"}})  # compiled, before anything raises
    with streams(served):
        monkeypatch.setattr(owner, name, broken)
        answer = served.post(CHAT, ASKED | {"response_format": {"type": "json_object"}})
        monkeypatch.undo()
        assert answer.status_code in (200, 500) and "secret" not in answer.text
        if name in ("certain_text", "accepts"):  # only drafts need these
            assert answer.status_code == 200
        else:
            error(answer, 500)
    wait_for(lambda: served.llm.engine.idle)
    assert served.llm.engine.output.open_texts == 0


def test_a_grammar_that_takes_long_delays_no_prompt(served: Running, monkeypatch: pytest.MonkeyPatch):
    """All threads for grammars are busy: prompts are encoded and answered all the same, and the waiting ends."""
    compiler, release = served.llm.engine.intake.grammars, threading.Event()
    compile_now = compiler.compile

    def slow(grammar: Any) -> None:
        release.wait(20)
        compile_now(grammar)

    monkeypatch.setattr(compiler, "compile", slow)
    monkeypatch.setattr(preparation, "MAX_GRAMMAR_S", 0.2)
    body = schema({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
    try:
        with streams(served):
            answers = [served.post(CHAT, body) for _ in range(preparation.MAX_GRAMMAR_THREADS)]
            assert [error(answer, 400)["code"] for answer in answers] == ["grammar_timeout"] * len(answers)
            assert served.post(CHAT, ASKED).status_code == 200
    finally:
        release.set()


def test_a_long_text_is_refused_after_its_first_pieces(served: Running, monkeypatch: pytest.MonkeyPatch):
    tokenizer = served.llm.tokenizer
    limit, encoded = PromptLimit(tokenizer, 20_000), []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *args: Any, **more: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    limit.check_tokens(["tide " * 1000])
    assert not encoded  # short ones are tokenised once, as prompts
    with pytest.raises(Exception, match="more than .* tokens"):
        limit.check_tokens(["tide " * 100_000])
    assert encoded and sum(encoded) <= 3 * PIECE_CHARS


def test_work_for_a_client_that_is_gone_ends(served: Running, monkeypatch: pytest.MonkeyPatch):
    """Between two pieces of its text; nothing of it is left in a thread."""
    pieces, go_on = [], threading.Event()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, *args: Any, **more: Any) -> list[int]:
        if len(text) == 1000:
            pieces.append(text)
            assert go_on.wait(20)
            return []
        return encode(self, text, *args, **more)

    monkeypatch.setattr(preparation, "PIECE_CHARS", 1000)
    monkeypatch.setattr("forerun.serve.context.PIECE_CHARS", 1000)
    monkeypatch.setattr(Tokenizer, "encode", slow)
    body = ASKED | {"messages": [{"role": "user", "content": "a" * 5000}]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + CHAT, json=body, timeout=0.5)
    wait_for(lambda: served.app.state.admission.num_open == 0)
    go_on.set()
    assert served.post(CHAT, ASKED).status_code == 200
    assert len(pieces) == 1


def test_texts_that_are_counted_delay_no_answer(served: Running, monkeypatch: pytest.MonkeyPatch):
    """However many are sent; they are limited for each key, and those whose clients are gone are not tokenised."""
    encoded, go_on = [], threading.Event()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, *args: Any, **more: Any) -> list[int]:
        if len(text) != 1000:
            return encode(self, text, *args, **more)
        encoded.append(text)
        assert go_on.wait(30)
        return [5]

    statuses = list[int]()

    def count(patience: float) -> None:
        with suppress(httpx.ReadTimeout):
            body = {"prompt": "a" * 1000}
            statuses.append(httpx.post(served.url + "/tokenize", json=body, timeout=patience).status_code)

    monkeypatch.setattr(preparation, "MAX_COUNTED_AT_ONCE", 8000)
    monkeypatch.setattr(Tokenizer, "encode", slow)
    counting = served.app.state.context.pool.counted
    threads = [threading.Thread(target=count, args=(30 if number < 6 else 4,)) for number in range(8)]
    try:
        threads[0].start()
        wait_for(lambda: bool(encoded))  # the one that is tokenised: the others wait for it
        for thread in threads[1:]:
            thread.start()
        wait_for(lambda: counting[""] == 8000)
        assert error(served.post("/tokenize", {"prompt": "a" * 1000}), 429)["code"] == "queue_full"
        assert served.post(CHAT, ASKED).status_code == 200
        wait_for(lambda: counting[""] == 6000)  # two are gone
    finally:
        go_on.set()
        for thread in threads:
            thread.join()
    assert statuses == [200] * 6 and len(encoded) == 6 and counting[""] == 0


def test_integers_end(llm: LLM):
    """A model that repeats itself writes digits without end unless the schema or the default bound them."""
    for kind in ("integer", ["integer", "null"]):
        text = llm.generate("3333", grammar=Grammar.json({"type": kind}), max_tokens=200)[0].text
        assert len(text.lstrip("-")) <= 16
    wide = Grammar.json({"type": "integer", "minimum": 0, "maximum": 10**30})
    assert len(llm.generate("3333", grammar=wide, max_tokens=200)[0].text) > 16
