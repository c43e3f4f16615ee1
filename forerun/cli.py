"""The `forerun` command: names the subcommands and turns errors into one line and a hint.

Knows nothing of models: each subcommand lives in `forerun.commands` and imports the engine when it runs, so that
`--help` answers at once. `bench` and `lab` live in `forerun_research` and are loaded when they are named.
"""

from __future__ import annotations

import codecs
import contextlib
import gc
import io
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from forerun import interrupt
from forerun.commands import (
    calibrate,
    chat,
    check,
    classify,
    draft,
    edit,
    generate,
    models,
    serve,
    stats_command,
    train,
    trie,
)
from forerun.commands.extras import install_hint, research
from forerun.errors import BadRequest, ForerunError
from forerun.renamed import COMMAND_OPTIONS

GC_ALLOCATIONS = 50_000  # between two searches for unreachable cycles: importing torch makes objects by the million
PLAIN = {"·": "-", "–": "-", "—": "-", "…": ".", "’": "'", "“": '"', "”": '"', "×": "x", "━": "-", "─": "-", "│": "|"}
RESEARCH = {
    "bench": "Measure Forerun, alone or beside transformers or llama.cpp.",
    "lab": "Run studies written as YAML files.",
    "demo": "Race plain decoding against Forerun on two questions about a long document.",
}


class Subcommands(TyperGroup):
    """Options may have their old names; Ctrl-C leaves with 130, as a shell expects, whatever the version of typer."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(self, Forerun) and name in RESEARCH:
            subcommands = research(f"commands.{name}").app
            subcommands.info.cls = Subcommands
            command = typer.main.get_command(subcommands)
            command.name = name
        return name, command, _with_new_names(command, rest)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupted:
            _leave(str(interrupted) or interrupt.LINE)


class Forerun(Subcommands):
    """All subcommands; those of research are listed without being imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *RESEARCH]

    def get_command(self, ctx: Any, name: str) -> Any:
        return TyperGroup(name=name, help=RESEARCH[name]) if name in RESEARCH else super().get_command(ctx, name)


def _with_new_names(command: Any, args: list[str]) -> list[str]:
    """Arguments with today's option names in place of old ones, each with a warning on stderr."""
    spellings = {option: parameter.opts for parameter in command.params for option in parameter.opts}
    end = args.index("--") if "--" in args else len(args)
    changed, given = list(args), {arg.partition("=")[0] for arg in args[:end]}
    for i, arg in enumerate(args[:end]):
        old, equals, value = arg.partition("=")
        new = COMMAND_OPTIONS.get(old)
        if new is not None and old not in spellings and new in spellings:
            for same in given.intersection(spellings[new]):
                raise BadRequest(f"{old} and {same} are the same option, and both are given", f"leave {old} out")
            print(f"warning: {old} is now {new}; the old name goes with the next release", file=sys.stderr)
            changed[i] = new + equals + value
    return changed


app = typer.Typer(
    name="forerun",
    cls=Forerun,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SINGLE = (generate.generate, chat.chat, edit.edit, classify.classify, serve.serve)
for single in (*_SINGLE, calibrate.calibrate, stats_command.stats):
    app.command()(single)
for name, group in {"models": models, "check": check, "trie": trie, "train": train, "draft": draft}.items():
    app.add_typer(group.app, name=name, cls=Subcommands)


def _version(wanted: bool) -> None:
    if wanted:
        from forerun import __version__

        print(f"forerun {__version__}")
        raise typer.Exit()


@app.callback()
def forerun(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run decoder language models exactly and fast: paged KV cache, prefix tree, continuous batching.

    Start here: [bold]forerun demo[/bold], or [bold]forerun generate "Why is the sky blue?"[/bold].
    The default model is fetched once (about 100 MB) and works offline afterwards.
    """


def main(argv: list[str] | None = None) -> None:
    """Entry point; always leaves by SystemExit: 0 done, 1 an error, 2 wrong usage, 130 Ctrl-C."""
    args, debug = _take_debug(sys.argv[1:] if argv is None else argv)
    if argv is None:
        interrupt.answer_interrupts()
        gc.set_threshold(GC_ALLOCATIONS, *gc.get_threshold()[1:])
    _make_streams_usable()
    try:
        app(args=args, prog_name="forerun")
    except KeyboardInterrupt:
        _leave(interrupt.LINE)
    except BrokenPipeError:
        # The reader of our output has closed it (`| head`): leave quietly, also when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except ForerunError as error:
        _report(str(error), error.hint, debug)
    except ModuleNotFoundError as error:
        hint = install_hint(error.name) or "install it, or run again with --debug to see what imports it"
        _report(f"this command needs {error.name}, which is not installed", hint, debug)
    except Exception as error:
        _report(f"unexpected {type(error).__name__}: {error}", "run again with --debug to see where it happened", debug)
    finally:
        if argv is None:
            gc.freeze()  # the process ends: to search all that was imported for cycles takes a quarter of a second


def _leave(line: str) -> NoReturn:
    with contextlib.suppress(OSError, KeyboardInterrupt):
        sys.stdout.flush()
    if interrupt.answered():
        interrupt.leave(line)
    print(line, file=sys.stderr)
    raise SystemExit(interrupt.EXIT_CODE)


def _make_streams_usable() -> None:
    """Standard streams may be closed, or unable to write every character a model can: neither is a reason to fail."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - open for as long as the process runs
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    codecs.register_error("forerun-plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if not stream.encoding.lower().startswith("utf"):
                stream.reconfigure(errors="forerun-plain")
            elif stream.errors == "strict":
                stream.reconfigure(errors="replace")


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What stands in for characters that a terminal cannot show: one for each, so that tables keep their columns."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _take_debug(args: list[str]) -> tuple[list[str], bool]:
    """`--debug` counts wherever it stands, before or after the subcommand, up to a bare `--`."""
    end = args.index("--") if "--" in args else len(args)
    kept = [arg for arg in args[:end] if arg != "--debug"]
    return kept + args[end:], len(kept) < end


def _report(message: str, hint: str, debug: bool) -> None:
    sys.stdout.flush()
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
