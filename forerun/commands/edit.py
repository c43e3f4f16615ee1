"""`forerun edit`: a file changed as an instruction says, as text, as a diff, or in place."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from forerun.commands import options as opt
from forerun.commands.stats import usage_lines
from forerun.errors import BadRequest
from forerun.params import SamplingParams, Speculation

if TYPE_CHECKING:
    from forerun.recipes.edit import EditMode


@opt.grouped
def edit(
    opened: opt.ModelOptions,
    file: Annotated[Path, typer.Argument(help="The file to edit, UTF-8.")],
    instruction: Annotated[str, typer.Argument(help="What to change.")],
    diff: Annotated[bool, typer.Option("--diff", help="Print a unified diff instead of the new text.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the file, and print the diff.")] = False,
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            help="copy: a program over numbered lines; replace: old and new lines; rewrite: the whole file, with "
            "copied drafts; auto: what the model can write.",
        ),
    ] = "auto",
    speculation: opt.Drafter = Speculation.drafter,
    stats: opt.Stats = False,
    as_json: opt.AsJson = False,
) -> None:
    """Edit a file as an instruction says. Without --write the file stays as it is.

    The model writes only what changes where it can, else the whole file with drafts that are copied from it; stderr
    says which.

    [bold]Examples[/bold]

    forerun edit depot.py "Fix the bug in total." --diff -m qwen2.5-coder-1.5b-instruct

    forerun edit README.md "Rename the project to Lantern." --write --mode replace
    """
    from forerun.recipes.edit import Edited, read_file
    from forerun.recipes.edit import edit as edit_whole

    if diff and write:
        raise BadRequest("--diff and --write", "leave one of them out: --write prints the diff")
    text, params, asked = read_file(file), SamplingParams(speculation=speculation), cast("EditMode", mode)
    if write:
        check_writable(file)
    with opened.open() as llm:
        if write or as_json:
            done = edit_whole(llm, file, instruction, text=text, mode=asked, params=params)
        else:
            found: Edited | None = None
            for piece in llm.stream_edit(file, instruction, text=text, mode=asked, params=params):
                sys.stdout.write(piece.diff if diff else piece.text)
                sys.stdout.flush()
                found = piece.result
            done = cast(Edited, found)
    if write and done.changed:
        if read_file(file) != text:
            raise BadRequest(f"{file} has changed since the model read it, and was not written", "run the edit again")
        replace_file(file, done.text)
    if write and not as_json:
        sys.stdout.write(done.diff)
    if as_json:
        print(json.dumps({"text": done.text, "diff": done.diff, "used": done.used, "why": done.why}))
    way_out = "" if done.used == "rewrite" else ": say more, or use --mode rewrite"
    print(f"used: {done.used} ({done.why}){'' if done.changed else '; nothing changed' + way_out}", file=sys.stderr)
    if stats:
        print(usage_lines(done.usage, "stop"), file=sys.stderr)


def check_writable(path: Path) -> None:
    """Before the model is asked. The folder is what a new file needs; one without any right to write is to stay."""
    target = path.resolve()
    if not target.stat().st_mode & 0o222 or not os.access(target, os.W_OK):
        raise BadRequest(f"{path} is read-only", "chmod u+w it, or leave --write out")
    if not os.access(target.parent, os.W_OK):
        raise BadRequest(f"cannot write {path}: its folder is read-only", "leave --write out")


def replace_file(path: Path, text: str) -> None:
    """Write a file as a whole or not at all, with its permissions, through symbolic links."""
    target = path.resolve()
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as made:
                made.write(text.encode("utf-8"))
            os.chmod(name, target.stat().st_mode & 0o7777)
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BadRequest(f"cannot write {path}: {error}", "check the folder's permissions") from None
