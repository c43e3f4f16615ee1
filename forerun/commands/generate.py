"""`forerun generate`: one prompt, one streamed answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from forerun.commands import options as opt
from forerun.commands.screen import Screen
from forerun.commands.stats import load_line, threads_line, usage_lines
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from forerun import LLM, Completion, SamplingParams
    from forerun.engine.sequence import Event
    from forerun.sharing.session import Session


@opt.grouped
def generate(
    opened: opt.ModelOptions,
    answer: opt.AnswerOptions,
    prompt: Annotated[str | None, typer.Argument(help="The text; `-` reads it from standard input.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A text file to put before PROMPT (or instead of it).")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="As a user message, or as text to continue.")] = True,
    system: opt.System = None,
    session: opt.SessionName = None,
    n: opt.Choices = 1,
    logprobs: opt.Logprobs = None,
    stats: opt.Stats = False,
    as_json: opt.AsJson = False,
) -> None:
    """Answer a prompt and stream the answer.

    [bold]Examples[/bold]

    forerun generate "Why is the sky blue?" --stats

    forerun generate "Who keeps the light?" --file handbook.txt --max-tokens 64

    forerun generate "def fibonacci(n):" --raw --stop "\\n\\n" --model ./qwen2.5-coder-0.5b.gguf

    forerun generate "Fix the bug." -f depot.py -m qwen2.5-coder-1.5b-instruct -d qwen2.5-coder-0.5b-instruct --stats

    forerun generate "Who keeps the light?" -f handbook.txt --prefill speculative --quality 0.95 --stats

    forerun generate "A ship, as JSON." --json-schema ship.json --speculation grammar+lookup

    cat notes.txt | forerun generate - --system "Summarise in one sentence." --json

    forerun generate "And in winter?" --session light --disk ~/forerun-kv --stats
    """
    opened.check_session(session)
    if logprobs is not None and not as_json:
        raise BadRequest("--logprobs are part of the JSON output only", "add --json, or leave --logprobs out")
    asked = _asked(read_prompt(prompt, file), chat, system)
    params = answer.params(n=n, logprobs=logprobs)  # refuses wrong values before a model is loaded
    if answer.sampling == "greedy" or answer.temperature is not None:
        opt.check_choices(params)
    with opened.open() as llm, _source(llm, asked, session) as source:
        if stats:
            print(load_line(llm.load_report), file=sys.stderr)
        params = answer.params_for(llm, n=n, logprobs=logprobs)
        if as_json or n > 1:
            _whole(source, params, stats, as_json, session)
        else:
            _streamed(source, params, stats)
        if stats:
            print(threads_line(llm.thread_stats()), file=sys.stderr)


class Plain:
    """One question to a model; sessions have the same two methods."""

    def __init__(self, llm: LLM, asked: Any) -> None:
        self.llm, self.asked = llm, asked

    def stream(self, params: SamplingParams) -> Iterator[Event]:
        return self.llm.stream(self.asked, params)

    def answer(self, params: SamplingParams) -> Completion:
        ask = self.llm.generate if isinstance(self.asked, str) else self.llm.chat
        return ask(self.asked, params)[0]


@contextmanager
def _source(llm: LLM, asked: Any, name: str | None) -> Iterator[Plain | Session]:
    """Where the answer comes from."""
    if name is None:
        yield Plain(llm, asked)
        return
    session = llm.session(name)
    begun = bool(session.tokens or session.messages)
    if begun and not isinstance(asked, str) and asked[0]["role"] == "system":
        hint = "leave it out, or name another session"
        raise BadRequest(f"session {name!r} has begun, --system comes too late", hint)
    with asking(session, asked):
        yield session


@contextmanager
def asking(session: Session, asked: Any) -> Iterator[None]:
    """A question that was not answered is not part of its session."""
    turns = session.turns
    session.append(asked)
    try:
        yield
    finally:
        if session.turns == turns:
            session.rewind(turns=1)


def _asked(text: str, chat: bool, system: str | None) -> str | list[dict[str, Any]]:
    """What the model gets: messages, or raw text to continue."""
    if not chat:
        if system is not None:
            raise typer.BadParameter("--system needs --chat: raw text has no messages")
        return text
    opening = [{"role": "system", "content": system}] if system is not None else []
    return [*opening, {"role": "user", "content": text}]


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The file, then the prompt; at least one of them must be there."""
    if prompt is None and file is None:
        raise typer.BadParameter("give a PROMPT, a --file, or both")
    parts = []
    if file is not None:
        parts.append(read_text(file))
    if prompt is not None:
        parts.append(read_text(Path(prompt)) if prompt == "-" else prompt)
    text = "\n\n".join(parts)
    if not text.strip():
        raise BadRequest("the prompt is empty", "give at least one word of text")
    return text


def read_text(path: Path) -> str:
    """`-`: standard input."""
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        named = "standard input" if str(path) == "-" else path
        raise BadRequest(f"cannot read {named}: {error}", "give UTF-8 text") from None


def _streamed(source: Plain | Session, params: SamplingParams, stats: bool) -> None:
    event, screen = None, Screen(sys.stdout)
    stream = cast("Generator[Event, None, None]", source.stream(params))
    try:
        for event in stream:
            screen.show(event)
    finally:
        stream.close()  # Ctrl-C: the request ends before anything else does
        if event is not None:  # an error or Ctrl-C before the first token leaves no empty line
            sys.stdout.write("\n")
    if stats and event is not None and event.usage is not None:
        print(usage_lines(event.usage, event.finish_reason), file=sys.stderr)


def _whole(
    source: Plain | Session, params: SamplingParams, stats: bool, as_json: bool, session: str | None = None
) -> None:
    completion = source.answer(params)
    if as_json:
        choices = [
            {"text": c.text, "token_ids": list(c.token_ids), "finish_reason": c.finish_reason, "logprobs": c.logprobs}
            for c in completion.choices
        ]
        record: dict[str, Any] = {"choices": choices, "usage": completion.usage.record()}
        if session is not None:
            record["session"] = session
        escape = sys.stdout.encoding.lower() not in ("utf-8", "utf8")  # what the terminal cannot show stays readable
        print(json.dumps(record, ensure_ascii=escape, default=asdict))
        return
    for number, choice in enumerate(completion.choices, 1):
        print(f"[{number}] {choice.text}")
    if stats:
        print(usage_lines(completion.usage, completion.finish_reason), file=sys.stderr)
