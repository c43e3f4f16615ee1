"""`forerun trie`: lists of allowed answers as files, and the best of them after a prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.commands import options as opt
from forerun.commands.generate import read_text
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from forerun.text.tokenizer import Tokenizer

DEFAULT_K = 10

app = typer.Typer(no_args_is_help=True, help="Lists of allowed answers: make their files, and rank them.")


@app.command()
def build(
    items: Annotated[Path, typer.Argument(help="A text a line, or .jsonl: texts, lists of token ids, or objects.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file that is written.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    before: Annotated[str, typer.Option("--before", help="Text before each item, often a space after raw text.")] = "",
) -> None:
    """Write a trie of items: for `forerun generate --trie`, `forerun trie top` and `llm.topk`.

    An object of a .jsonl file has "text" or "ids", and perhaps a "name". Token ids need no tokenizer.

    Example: forerun trie build products.txt -o products.trie --before " "
    """
    from rich.console import Console

    from forerun.core.progress import status
    from forerun.decode.remote.protocol import vocabulary_digest
    from forerun.decode.trie import TokenTrie
    from forerun.models.fetch.store import resolve
    from forerun.models.formats.checkpoint import open_checkpoint

    found: list[Tokenizer] = []  # opened for the first text

    def encode(text: str) -> list[int]:
        if not found:
            found.append(open_checkpoint(resolve(model)).tokenizer())
        return found[0].encode(before + text)

    with status(f"reading {items.name}", Console(stderr=True)):
        names, sequences, repeated = read_items(items, encode)
        trie = TokenTrie.build(sequences, names)
        trie.vocabulary = vocabulary_digest(found[0]).hex() if found else ""
        trie.save(out)
    left_out = f"; repeated lines left out: {repeated:,}" if repeated else ""
    print(f"{out}: {trie.num_items:,} items, {len(trie):,} nodes, {out.stat().st_size / 1e6:.1f} MB{left_out}")


@app.command()
@opt.grouped
def top(
    opened: opt.ModelOptions,
    file: Annotated[Path, typer.Argument(help="A file of `forerun trie build`.")],
    prompt: Annotated[str, typer.Argument(help="The text before the items.")],
    k: Annotated[int | None, typer.Option("-k", min=1, help="How many items; default: 10, or all of fewer.")] = None,
    beam: Annotated[
        int | None,
        typer.Option("--beam", min=1, help="Quicker: so many beginnings of one length go on; the best may be missed."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="As a user message, or as text to continue.")] = True,
    as_json: opt.AsJson = False,
) -> None:
    """The best items of a trie after a prompt, with the log-probabilities of their tokens.

    Example: forerun trie top products.trie "Customers who bought a lamp also bought a" --raw
    """
    from forerun.decode.trie import open_trie

    trie = open_trie(file)  # before the model: what is wrong with it is known at once
    with opened.open() as llm:
        asked = [{"role": "user", "content": prompt}] if chat else prompt
        found = llm.topk(asked, trie, min(DEFAULT_K, trie.num_items) if k is None else k, beam=beam)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    for ranked in found.items:
        print(f"{ranked.score:9.3f}  {ranked.name}")
    if not found.proven:
        print("other items may score higher: --beam left beginnings out", file=sys.stderr)


def read_items(path: Path, encode: Callable[[str], list[int]]) -> tuple[list[str], list[list[int]], int]:
    """Names and token ids of the items in a file, each once, and how many lines repeated another."""
    names, sequences, seen, repeated = [], [], set[str](), 0
    for number, ended in enumerate(read_text(path).split("\n"), 1):  # other separators may be part of an item
        line = ended.removesuffix("\r")
        if not line.strip():
            continue
        if line in seen:
            repeated += 1
            continue
        seen.add(line)
        name, ids = _item(line, encode, f"{path.name}, line {number}") if path.suffix == ".jsonl" else (line, None)
        ids = encode(line) if ids is None else ids
        if not ids:
            raise BadRequest(f"{path.name}, line {number}: the item has no tokens", "remove it")
        names.append(name)
        sequences.append(ids)
    return names, sequences, repeated


def _item(line: str, encode: Callable[[str], list[int]], where: str) -> tuple[str, list[int]]:
    hint = 'write a text, a list of token ids, or {"text" or "ids": ..., "name": ...}'
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise BadRequest(f"{where} is not JSON: {error}", hint) from None
    fields = value if isinstance(value, dict) else {"text" if isinstance(value, str) else "ids": value}
    text, ids = fields.get("text"), fields.get("ids")
    if isinstance(text, str) and ids is None:
        return str(fields.get("name", text)), encode(text)
    if isinstance(ids, list) and text is None and all(type(token) is int for token in ids):
        return str(fields.get("name", " ".join(map(str, ids)))), ids
    raise BadRequest(f"{where} is {line:.60}", hint)
