"""The chat loop with a scripted user and a scripted model: what is kept, forgotten, stopped."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forerun.commands import chat as chat_command
from forerun.commands.chat import ChatLoop
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


def talk(
    monkeypatch: pytest.MonkeyPatch,
    llm: ScriptedLLM,
    *lines: str,
    system: str | None = None,
    documents: list[str] | None = None,
) -> str:
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
    console = Console(file=err, width=400)
    ChatLoop(llm, SamplingParams(), system, False, console, None, documents).run()  # type: ignore[arg-type]
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
    said = talk(monkeypatch, llm, "/what", "/helpme now", "/help")
    assert "no command /what" in said and "no command /helpme" in said
    assert said.count("/reset") == said.count("/file PATH") == said.count("/quit") == 3
    assert llm.asked == []


def test_a_path_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["a folder"], ["text"])
    talk(monkeypatch, llm, "/usr/bin: what is it?", "/reset\nis the first line of this text")
    assert [m["content"] for m in llm.asked[0]] == ["/usr/bin: what is it?"]
    assert llm.asked[1][-1]["content"] == "/reset\nis the first line of this text"


def test_files_go_before_the_next_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note = tmp_path / "my note.txt"
    note.write_text("The lamp turns.")
    llm = ScriptedLLM(["twelve"], ["b"])
    said = talk(
        monkeypatch, llm, f"/file {note}", "How often?", "/file", "/file none.txt", "Sure?", documents=["A keeper."]
    )
    assert [m["content"] for m in llm.asked[0]] == ["A keeper.\n\nThe lamp turns.\n\nHow often?"]
    assert llm.asked[1][-1]["content"] == "Sure?"
    assert "/file needs the path of a text file" in said
    assert "3 words, goes with the next message" in said and "error: cannot read none.txt" in said and "hint: " in said


PASTED = "\x1b[200~first line\rsecond line\x1b[201~\r"


def test_a_pasted_text_is_one_message() -> None:
    """In a terminal of its own: the text as a terminal pastes it, and a line that is typed after it."""
    code = "from forerun.commands.chat import enable_editing, read_message as read; enable_editing();"
    code += "print('ready', flush=True); print(repr(read('> ')), repr(read('> ')), flush=True)"
    main, other = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=other, stdout=other, stderr=subprocess.PIPE)
    os.close(other)
    try:
        shown = _read_until(main, b"> ")
        os.write(main, PASTED.encode())
        shown += _read_until(main, b"> ")
        os.write(main, b"typed\r")
        shown += _read_until(main, b"'typed'")
    finally:
        child.kill()
        child.wait()
        os.close(main)
    assert b"'first line\\nsecond line' 'typed'" in shown


def _read_until(terminal: int, wanted: bytes) -> bytes:
    seen, end = b"", time.monotonic() + 30
    while wanted not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 4096)
    assert wanted in seen, seen
    return seen


def test_lines_that_wait_belong_to_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "two", "three"])
    waits = iter([True, True, False])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(chat_command, "_line_waits", lambda: next(waits))
    assert chat_command.read_message("> ") == "one\ntwo\nthree"


def test_a_pipe_is_one_message_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert chat_command.read_message("") == "one" and chat_command.read_message("") == "two"


def test_any_expected_error_leaves_the_conversation_open(monkeypatch: pytest.MonkeyPatch):
    llm = ScriptedLLM([OutOfPages("the prompt has 900 tokens", "shorten it")], ["fine"])
    assert "900 tokens" in talk(monkeypatch, llm, "a very long question", "a short one")
    assert [m["content"] for m in llm.asked[1]] == ["a short one"]
