"""Writes the tables of docs/structure.md: each module in one line, the first sentence of its docstring.

    python -m forerun_research.scripts.structure [--check]

Text outside the tables is kept: each folder has a heading (`## forerun/engine/`) and sentences of its own. A folder
without a heading is added at the end. With `--check` nothing is written; exit status 1 where a line is out of date.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "structure.md"
PACKAGES = ("forerun", "forerun_research")
HEAD = "| module | what it does |\n|---|---|\n"
_SECTION = re.compile(r"^## (\S+/)$", re.MULTILINE)


def modules() -> dict[str, dict[str, str]]:
    """By folder: module name and its line. An `__init__.py` counts where it has a docstring."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if "documents" in path.parts:  # texts for models to read
            continue
        line = first_sentence(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
        if line or path.name != "__init__.py":
            found.setdefault(f"{path.parent.relative_to(ROOT)}/", {})[path.name] = line
    return found


def first_sentence(docstring: str) -> str:
    """Of the first paragraph; a question is followed by its answer."""
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(docstring.split("\n\n")[0].split()))
    end = next((i for i, sentence in enumerate(sentences, 1) if not sentence.endswith("?")), len(sentences))
    return " ".join(sentences[:end]).replace("|", "\\|")


def render(page: str) -> str:
    """The page with its tables made anew."""
    parts = _SECTION.split(page)  # text before, then folder and text of each section
    folders = dict(zip(parts[1::2], parts[2::2], strict=True))
    found = modules()
    text = parts[0]
    for folder, body in folders.items():
        kept = "\n".join(line for line in body.splitlines() if not line.startswith("|")).strip()
        text += _section(folder, kept, found.pop(folder, {}))
    return text + "".join(_section(folder, "", lines) for folder, lines in found.items())


def _section(folder: str, kept: str, lines: dict[str, str]) -> str:
    table = HEAD + "".join(f"| `{name}` | {line} |\n" for name, line in lines.items()) if lines else ""
    blocks = [f"## {folder}", kept, table.strip()]
    return "\n\n".join(block for block in blocks if block) + "\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a line is out of date")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    made = render(page).rstrip() + "\n"
    if not args.check:
        PAGE.write_text(made, encoding="utf-8")
    return int(args.check and made != page)


if __name__ == "__main__":
    raise SystemExit(main())
