"""The chat loop with a scripted user and a scripted model: what is kept, forgotten, stopped."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from forerun.commands.chat import Conversation
from forerun.core import SamplingParams
from forerun.engine.sequence import Event
from forerun.errors import BadRequest, OutOfPages


class ScriptedLLM:
    """Answers from a list; an exception in it is raised after the text before it was sent."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.asked: list[list[dict[str, str]]] = []

    def stream(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[Event]:
        self.asked.append([dict(message) for message in messages])
        for piece in self.answers.pop(0):
            if not isinstance(piece, str):
                raise piece
            yield Event(0, 0, piece)


def talk(monkeypatch: pytest.MonkeyPatch, llm: ScriptedLLM, *lines: str, system: str | None = None) -> str:
    """Run a conversation until the script ends (as Ctrl-D does); returns what was printed on stderr."""
    script = iter(lines)

    def read(prompt: str) -> str:
        try:
            line = next(script)
        except StopIteration:
            raise EOFError from None
        if line == "^C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)
    err = io.StringIO()
    Conversation(llm, SamplingParams(), system, False, Console(file=err, width=200)).run()  # type: ignore[arg-type]
    return err.getvalue()


def test_the_conversation_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = ScriptedLLM(["Hel", "lo"], ["Fine"])
    talk(monkeypatch, llm, "hi", "", "how are you?", "/quit", "never asked", system="be brief")
    assert [(m["role"], m["content"]) for m in llm.asked[1]] == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "Hello"),
        ("user", "how are you?"),
    ]
    assert len(llm.asked) == 2
    assert "Hello\n" in capsys.readouterr().out


def test_reset_forgets_all_but_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["a"], ["b"])
    talk(monkeypatch, llm, "one", "/reset", "two", system="be brief")
    assert [m["content"] for m in llm.asked[1]] == ["be brief", "two"]


def test_ctrl_c_stops_the_answer_and_keeps_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["half an", KeyboardInterrupt()], ["b"])
    err = talk(monkeypatch, llm, "one", "two")
    assert "stopped" in err
    assert [m["content"] for m in llm.asked[1]] == ["one", "half an", "two"]


def test_ctrl_c_at_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["half", KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        talk(monkeypatch, llm, "one", "^C")


def test_a_bad_request_does_not_end_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM([BadRequest("the prompt has 9 tokens, the context holds 8", "shorten it")], ["b"])
    err = talk(monkeypatch, llm, "too long", "short")
    assert "error: the prompt has 9 tokens" in err and "hint: shorten it" in err
    assert [m["content"] for m in llm.asked[1]] == ["short"]


def test_unknown_commands_show_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM()
    assert "/reset" in talk(monkeypatch, llm, "/what")
    assert llm.asked == []


def test_any_expected_error_leaves_the_conversation_open(monkeypatch: pytest.MonkeyPatch):
    llm = ScriptedLLM([OutOfPages("the prompt has 900 tokens", "shorten it")], ["fine"])
    assert "900 tokens" in talk(monkeypatch, llm, "a very long question", "a short one")
    assert [m["content"] for m in llm.asked[1]] == ["a short one"]
