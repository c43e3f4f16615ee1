"""Text files for calibration: which there are, which are held out, and their text, section by section.

A section is a range of bytes, so that a file of any size is read only as far as it is needed. A line of a .jsonl file
is a text or a conversation. Knows no tokens.
"""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import BadRequest

SECTION_BYTES = 256 * 1024
_SNIFF_BYTES = 64 * 1024  # read to find out whether a file is text
_FIELDS = "a `text` field or a list of `messages`"
_HINT = "give UTF-8 text files or folders of them: --text notes.txt --text src/"
_PROSE = {".txt", ".md", ".rst", ".tex", ".adoc", ""}
_DATA = {".json", ".jsonl", ".csv", ".tsv", ".log", ".xml", ".html", ".yaml", ".yml", ".toml", ".ini", ".cfg"}

CHAT = "chat"  # the kind of conversations
Conversation = list[dict[str, str]]  # messages: role and content


def text_kind(path: Path) -> str:
    """By its name: prose, data, or code, which has the most suffixes."""
    suffix = path.suffix.lower()
    return "prose" if suffix in _PROSE else "data" if suffix in _DATA else "code"


@dataclass(frozen=True)
class Section:
    path: Path
    start: int
    end: int

    def texts(self) -> Iterator[str]:
        """Its documents, of conversations what was said."""
        for document in self.documents():
            if isinstance(document, str):
                yield document
            else:
                yield "\n\n".join(message["content"] for message in document)

    def documents(self) -> Iterator[str | Conversation]:
        """Those that begin in it: lines of a .jsonl file, else all of it."""
        if self.path.suffix == ".jsonl":
            yield from self._lines()
            return
        with self.path.open("rb") as file:
            file.seek(self.start)
            yield file.read(self.end - self.start).decode("utf-8", errors="ignore")  # its ends may cut a character

    def _lines(self) -> Iterator[str | Conversation]:
        with self.path.open("rb") as file:
            if self.start:
                file.seek(self.start - 1)
                file.readline()  # this line began in the section before
            while file.tell() < self.end:
                line = file.readline()
                if not line:
                    return  # the file ends before the section does
                if not line.strip():
                    continue
                document = _document(line)
                if document is None:
                    where = f"{self.path}, byte {file.tell() - len(line)}"
                    raise BadRequest(f"{where}: not a JSON object with {_FIELDS}", 'one a line: {"text": "..."}')
                yield document


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The text files among the paths and below them. What is named must be text; in folders other files are left out,
    and hidden ones too."""
    if not paths:
        raise BadRequest("there is no text to calibrate on", _HINT)
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if not _hidden(p.relative_to(path)) and p.is_file()]
            texts = [p for p in inside if _why_not_text(p) is None]
            if not texts:
                raise BadRequest(f"there is no text file in the folder {path}", _HINT)
            found |= dict.fromkeys(texts)
        else:
            reason = _why_not_text(path)
            if reason is not None:
                raise BadRequest(f"cannot read {path}: {reason}", _HINT)
            found[path] = None
    return list(found)


def split_held_out(files: list[Path], share: float, rng: random.Random) -> tuple[list[Section], list[Section]]:
    """Sections to fit on and held-out ones: of different files, or of different ends where there is only one file."""
    sizes = {path: path.stat().st_size for path in files}
    if len(sizes) == 1:
        [(path, size)] = sizes.items()
        cut = int(size * (1.0 - share))
        train, held = _sections(path, 0, cut), _sections(path, cut, size)
    else:
        held_out = _held_out_files(sizes, share, rng)
        train = [s for path, size in sizes.items() if path not in held_out for s in _sections(path, 0, size)]
        held = [s for path, size in sizes.items() if path in held_out for s in _sections(path, 0, size)]
    rng.shuffle(train)
    rng.shuffle(held)
    return train, held


def _held_out_files(sizes: dict[Path, int], share: float, rng: random.Random) -> set[Path]:
    """Files with about that share of the bytes, none so large that little is left to fit on."""
    total, taken = sum(sizes.values()), 0
    held_out: set[Path] = set()
    for path in rng.sample(list(sizes), len(sizes)):
        if taken < share * total and taken + sizes[path] <= 2 * share * total:
            held_out.add(path)
            taken += sizes[path]
    return held_out or {min(sizes, key=lambda path: sizes[path])}


def _sections(path: Path, start: int, end: int) -> list[Section]:
    return [Section(path, at, min(at + SECTION_BYTES, end)) for at in range(start, end, SECTION_BYTES)]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _why_not_text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            start = file.read(_SNIFF_BYTES)
            file.seek(0)
            first = file.readline() if path.suffix == ".jsonl" else b""
    except OSError as error:
        return error.strerror or str(error)
    if not start.strip():
        return "it is empty"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # a character cut at the end is allowed
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 text (byte {error.start})"
    if b"\0" in start:
        return "it holds zero bytes, so it is not text"
    if path.suffix == ".jsonl" and _document(first) is None:
        return f"its first line is not a JSON object with {_FIELDS}"
    return None


def _document(line: bytes) -> str | Conversation | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    found = record.get("text", record.get("messages")) if isinstance(record, dict) else None
    if isinstance(found, str):
        return found
    return found if isinstance(found, list) and found and all(map(_is_message, found)) else None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
