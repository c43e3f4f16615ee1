"""`forerun chat`: a conversation in the terminal. Each turn reuses the K/V of the turns before it."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from forerun import interrupt
from forerun.commands import options as opt
from forerun.commands.generate import asking, read_text
from forerun.commands.screen import Screen
from forerun.commands.stats import load_line, usage_lines
from forerun.errors import ForerunError

if TYPE_CHECKING:
    from rich.console import Console

    from forerun import LLM, SamplingParams
    from forerun.engine.sequence import Event
    from forerun.sharing.session import Session

HELP = (
    "/file PATH puts a text file before the next message, /reset forgets the conversation, /help shows this, "
    "/quit leaves. Ctrl-C stops an answer; Ctrl-C at the prompt leaves."
)

PASTE_PAUSE_S = 0.05  # lines of a paste arrive sooner than this after each other; typed ones do not

Message = dict[str, str]


@opt.grouped
def chat(
    opened: opt.ModelOptions,
    answer: opt.ChatAnswerOptions,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="A text file to put before the first message; repeatable.")
    ] = None,
    system: opt.System = None,
    session: opt.SessionName = None,
    stats: opt.Stats = False,
) -> None:
    """Talk to a model. /file PATH adds a text, /reset starts over, /quit leaves, Ctrl-C stops an answer.

    A text that is pasted is one message, however many lines it has.

    [bold]Examples[/bold]

    forerun chat

    forerun chat --model qwen2.5-coder-0.5b-instruct --system "You review Python code." --temperature 0 --stats

    forerun chat --model qwen2.5-coder-1.5b-instruct --draft-model qwen2.5-coder-0.5b-instruct

    forerun chat --file handbook.txt

    forerun chat --session garden --disk ~/forerun-kv
    """
    opened.check_session(session)
    answer.params()  # refuses wrong values before a model is loaded
    documents = [read_text(path) for path in file or ()]
    enable_editing()
    from rich.console import Console

    with opened.open() as llm:
        params = answer.params_for(llm)
        llm.prepare(params)
        console = Console(stderr=True, highlight=False)
        console.print(f"{opened.model}. {HELP}", style="dim", markup=False)
        if stats:
            console.print(load_line(llm.load_report), style="dim", markup=False)
        kept = None if session is None else llm.session(session)
        if kept is not None and kept.messages:
            console.print(f"session {session!r} goes on after {kept.turns} answers", style="dim", markup=False)
        ChatLoop(llm, params, system, stats, console, kept, documents).run()


class ChatLoop:
    """The messages so far, its own or a session's, and the loop around them."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        stats: bool,
        console: Console,
        session: Session | None = None,
        documents: list[str] | None = None,
    ) -> None:
        self.llm, self.params, self.stats, self.console, self.session = llm, params, stats, console, session
        self.opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)
        self.documents = documents or []  # texts that go before the next message

    def run(self) -> None:
        interrupt.only_raise()  # Ctrl-C ends an answer
        while True:
            try:
                line = read_message("> ").strip()
            except EOFError:
                print()
                return
            except UnicodeDecodeError as error:
                self.console.print(f"error: that line is not UTF-8 text ({error})", markup=False)
                continue
            name = line.split(maxsplit=1)[0] if line else ""
            if name == "/quit":
                return
            if name.startswith("/") and "/" not in name[1:] and "\n" not in line:  # /usr/bin is no command
                self.command(name, line[len(name) :].strip())
            elif line:
                self.turn("\n\n".join([*self.documents, line]))
                self.documents = []

    def command(self, name: str, rest: str) -> None:
        if name == "/reset":
            self.reset()
            self.console.print("forgotten", style="dim")
        elif name == "/file" and not rest:
            self.console.print("/file needs the path of a text file: /file notes.txt", style="dim", markup=False)
        elif name == "/file":
            try:
                self.documents.append(read_text(Path(rest).expanduser()))
            except ForerunError as error:
                self.console.print(f"error: {error}\nhint: {error.hint}", markup=False)
                return
            words = len(self.documents[-1].split())
            self.console.print(f"{rest}, {words:,} words, goes with the next message", style="dim", markup=False)
        elif name == "/help":
            self.console.print(HELP, style="dim", markup=False)
        else:
            self.console.print(f"there is no command {name}; known are: {HELP}", style="dim", markup=False)

    def reset(self) -> None:
        self.messages, self.documents = list(self.opening), []
        if self.session is not None and self.session.turns:
            self.session.rewind(turns=self.session.turns)

    def turn(self, line: str) -> None:
        """One question and its answer. An answer that was stopped stays in the conversation as far as it came; a
        session keeps whole answers only."""
        try:
            if self.session is not None:
                self._session_turn(self.session, {"role": "user", "content": line})
            else:
                self._own_turn({"role": "user", "content": line})
        except ForerunError as error:
            self.console.print(f"error: {error}\nhint: {error.hint or 'start over with /reset'}", markup=False)

    def _own_turn(self, message: Message) -> None:
        self.messages.append(message)
        try:
            answer = self._answer(self.llm.stream(self.messages, self.params))
        except ForerunError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer})

    def _session_turn(self, session: Session, message: Message) -> None:
        with asking(session, [message] if session.messages else [*self.opening, message]):
            self._answer(session.stream(self.params))

    def _answer(self, events: Iterator[Event]) -> str:
        screen = Screen(sys.stdout)
        stream = cast("Generator[Event, None, None]", events)
        try:
            for event in stream:
                screen.show(event)
                if event.usage is not None and self.stats:
                    self.console.print("\n" + usage_lines(event.usage, event.finish_reason), style="dim", end="")
        except KeyboardInterrupt:
            # Closing the stream cancels the request; its pages go back to the pool before the next question.
            stream.close()
            self.console.print(" (stopped)", style="dim", end="")
        print()
        return screen.text


def enable_editing() -> None:
    """Line editing and history for `input()`; a terminal then marks what is pasted, and its line breaks stay in it."""
    with contextlib.suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def read_message(prompt: str) -> str:
    """One message. Where pasted lines arrive one by one, those that are there already belong to it."""
    lines = [input(prompt)]
    with contextlib.suppress(EOFError):
        while _line_waits():
            lines.append(input(""))
    return "\n".join(lines)


def _line_waits() -> bool:
    """Whether a terminal holds another line; input from a pipe is one message a line."""
    try:
        return sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], PASTE_PAUSE_S)[0])
    except (OSError, ValueError):  # no file, or none that can be waited for
        return False
