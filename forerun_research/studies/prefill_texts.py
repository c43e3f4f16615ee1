"""Texts that studies cut their prompts from: folders, files, the shipped documents, and Python's own standard library.

`stdlib` is code that every machine has. One file in eight of it, by a checksum of its name, is kept for measuring
(`held_out`): calibrate on the others. `tables`, `logs` and `base64` are made from a seed. A file of JSON lines is the
text of its records, one after the other. Knows names and tokenizers; no model.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun import data
from forerun.errors import BadRequest
from forerun.text.tokenizer import Tokenizer

STDLIB, SHIPPED = "stdlib", "shipped"
MADE_LINES = 12000  # of each text that is made from a seed
SUFFIXES = (".txt", ".md", ".py", ".rst")
_HELD_OUT_EVERY = 8


def held_out(path: Path) -> bool:
    """Whether a file of code is kept for measuring."""
    return zlib.crc32(path.name.encode()) % _HELD_OUT_EVERY == 0


def _table_row(draw: random.Random, number: int) -> str:
    place, ware = (
        draw.choice(("Aldermouth", "Lerwick", "Skagen", "Bergen")),
        draw.choice(("rope", "oil", "salt", "tar")),
    )
    return f"{number},{place},{ware},{draw.randrange(1, 900)},{draw.uniform(1, 99):.2f},{draw.random() < 0.3}"


def _log_line(draw: random.Random, number: int) -> str:
    at = f"2024-05-{1 + number // 900 % 28:02} {number // 60 % 24:02}:{number % 60:02}:{draw.randrange(60):02}"
    what = draw.choice(("connected", "timed out after 30 s", "sent 512 bytes", "retry 2 of 5", "checksum mismatch"))
    level, unit = draw.choice(("INFO", "INFO", "WARN", "ERROR")), draw.choice(("pump", "radio", "beacon", "store"))
    return f"{at} {level} [{unit}-{draw.randrange(16)}] peer 10.0.{draw.randrange(256)}.{draw.randrange(256)} {what}"


def _base64_line(draw: random.Random, number: int) -> str:
    return base64.b64encode(draw.randbytes(54)).decode()


MADE_TEXTS = {"tables": _table_row, "logs": _log_line, "base64": _base64_line}


def _strings(value: Any) -> list[str]:
    """All texts in a JSON value, in order."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _strings(part)]


class StudyTexts:
    """Whole documents by the name of a collection, and pieces of them in tokens."""

    def __init__(self, folder: Path | None, tokenizer: Tokenizer) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self._pieces: dict[tuple[str, int, int], list[list[int]]] = {}

    def documents(self, name: str) -> list[str]:
        """Texts of a collection: `stdlib`, `shipped`, or a file or folder in the data folder."""
        if name == SHIPPED:
            return [data.text(f"documents/{file}") for file in ("handbook.txt", "depot.py")]
        if name in MADE_TEXTS:
            draw = random.Random(name)
            return ["\n".join(MADE_TEXTS[name](draw, number) for number in range(MADE_LINES))]
        if name.endswith(".jsonl"):
            return ["\n".join(_strings(record)) for record in self.records(name, ())]
        if name == STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            files = [path for path in sorted(root.glob("*.py")) if held_out(path)]
        else:
            path = self.path(name)
            inside = path.rglob("*") if path.is_dir() else [path]
            files = sorted(p for p in inside if p.is_file() and p.suffix in SUFFIXES)
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
        if not texts:
            raise BadRequest(f"{name} has no text file", f"give a folder with {', '.join(SUFFIXES)} files")
        return texts

    def path(self, name: str) -> Path:
        path = Path(name) if self.folder is None else self.folder / name
        if not path.exists():
            raise BadRequest(f"there is no {path}", "name the folder with the data: --data DIR")
        return path

    def records(self, name: str, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Objects of a file of JSON lines, plain or .gz, each with these keys."""
        path = self.path(name)
        try:
            raw = path.read_bytes()
            lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8").splitlines()
            found = [json.loads(line) for line in lines if line.strip()]
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise BadRequest(f"cannot read {path}: {error}", "give a UTF-8 file of JSON lines, plain or .gz") from None
        for number, record in enumerate(found, 1):
            missing = [key for key in keys if not isinstance(record, dict) or key not in record]
            if missing:
                raise BadRequest(f"{path}, object {number} has no {', '.join(missing)}", "give the file it should be")
        return found

    def pieces(self, name: str, length: int, seed: int = 0) -> list[list[int]]:
        """Pieces of `length` tokens, none of which overlap, each within one document where documents are long enough;
        short documents are joined. The order is drawn from the seed."""
        key = (name, length, seed)
        if key not in self._pieces:
            self._pieces[key] = self._cut(self.documents(name), length)
            random.Random(seed).shuffle(self._pieces[key])
        if not self._pieces[key]:
            raise BadRequest(f"{name} has no {length} tokens of text", "use shorter prompts, or more text")
        return self._pieces[key]

    def _cut(self, documents: Sequence[str], length: int) -> list[list[int]]:
        found, short = [], list[int]()
        for text in documents:
            ids = self.tokenizer.encode(text)
            cuts = [ids[lo : lo + length] for lo in range(0, len(ids) - length + 1, length)]
            found += cuts
            if not cuts:
                short += ids
        return found + [short[lo : lo + length] for lo in range(0, len(short) - length + 1, length)]

    def mixed(self, names: Sequence[str], length: int, count: int, seed: int = 0) -> list[tuple[str, list[int]]]:
        """`count` pieces, collections taking turns: (collection and number, ids)."""
        queues = {name: list(self.pieces(name, length, seed)) for name in names}
        found: list[tuple[str, list[int]]] = []
        turn = 0
        while len(found) < count:
            having = [name for name in names if turn < len(queues[name])]
            if not having:
                raise BadRequest(
                    f"{', '.join(names)} have {len(found)} pieces of {length} tokens, {count} are asked for",
                    "ask for fewer prompts, or give more text",
                )
            found += [(f"{name} {turn}", queues[name][turn]) for name in having]
            turn += 1
        return found[:count]
