"""Edits of a file: the model writes what changes, as a program or as replacements, or the whole file again.

Three ways, of which the first two are short answers under a grammar:
- `copy`: a program of copied and new lines over numbered lines; a copied span runs in one forward, not token by token;
- `replace`: old lines and the new ones in their place; nothing runs for what stays;
- `rewrite`: the whole file, drafted from the old one (the copying drafter).
Models differ in which they can write. `auto` takes what gets a few edits with known results right, tried once for each
opened model, and `rewrite` where neither does. The new text and a unified diff come while the model writes. Knows `LLM`
and its public methods, no engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from forerun.core import Usage
from forerun.errors import BadRequest, ForerunError
from forerun.inputs import Messages
from forerun.llm import LLM
from forerun.params import Grammar, SamplingParams
from forerun.text.edit_program import ProgramReader, SourceLines, oracle, program_text
from forerun.text.edit_replace import BlockReader, ReplaceReader, fence_for, replace_grammar, replacements
from forerun.text.line_diff import DiffStream

EditMode = Literal["auto", "copy", "replace", "rewrite"]
EditWay = Literal["copy", "replace", "rewrite"]
EDIT_MODES = ("auto", "copy", "replace", "rewrite")
EXTRA_TOKENS = 512  # that an answer may have beside the file's own
SHORT_WAYS: tuple[EditWay, ...] = ("replace", "copy")  # the first is taken where both are as good: it runs less

SYSTEMS: dict[EditWay, str] = {
    "copy": """You edit files. You get a file with numbered lines and an instruction. Answer with a program that \
writes the new file from top to bottom:
<copy A-B> keeps lines A to B as they are,
<new> ... </new> writes new lines,
<copy A-end> keeps everything from line A to the end and finishes.
Lines that are not copied are removed. Copy as much as you can and write only what changes.""",
    "replace": """You edit files. You get a file and an instruction. Answer with the changes alone: for each the old \
lines exactly as they are in the file, and the new lines that replace them. To insert lines, repeat the line before \
them in both. Lines that you do not mention stay as they are.""",
    "rewrite": """You edit files. You get a file and an instruction. Answer with the whole new file in one code block, \
without explanations. Keep everything that the instruction does not change exactly as it is.""",
}

# (file, instruction, new file): in each prompt, with different places and kinds of change
EXAMPLES = (
    (
        "import math\n\n\ndef area(width, height):\n    return width + height\n\n\ndef name():\n    return 'box'\n",
        "Fix the bug in area.",
        "import math\n\n\ndef area(width, height):\n    return width * height\n\n\ndef name():\n    return 'box'\n",
    ),
    (
        "colour = 'red'\nsize = 12\nbold = False\n",
        "Make it blue and remove bold.",
        "colour = 'blue'\nsize = 12\n",
    ),
    (
        "# Ships\n\n- Aurora\n- Castor\n- Drift\n- Ember\n- Fjord\n- Gale\n",
        "Add Vesper after Drift, and rename Gale to Storm.",
        "# Ships\n\n- Aurora\n- Castor\n- Drift\n- Vesper\n- Ember\n- Fjord\n- Storm\n",
    ),
)
# Of the same form: they show which ways a model can write
PROBES = (
    (
        "def first(items):\n    return items[1]\n\n\ndef last(items):\n    return items[-1]\n",
        "first must return items[0].",
        "def first(items):\n    return items[0]\n\n\ndef last(items):\n    return items[-1]\n",
    ),
    (
        "host = 'localhost'\nport = 8000\ndebug = False\nworkers = 2\ntimeout = 30\n",
        "Set debug to True.",
        "host = 'localhost'\nport = 8000\ndebug = True\nworkers = 2\ntimeout = 30\n",
    ),
    (
        "# Shopping\n\n- bread\n- milk\n- tea\n- lamp oil\n",
        "Remove the line with tea.",
        "# Shopping\n\n- bread\n- milk\n- lamp oil\n",
    ),
)
MIN_PROBES_RIGHT = 2
_PROBE_TOKENS = 96  # of an answer; the longest right one has 40
_probed: weakref.WeakKeyDictionary[LLM, dict[EditWay, int]] = weakref.WeakKeyDictionary()  # probes that were right


class BrokenEdit(ForerunError):
    """The model's answer did not end within the limits of its request, or names lines that the file does not have."""


@dataclass(frozen=True)
class Edited:
    """A new text, its unified diff, and how it came about."""

    text: str
    diff: str
    used: EditWay
    why: str  # it was used
    answer: str  # what the model wrote
    usage: Usage

    @property
    def changed(self) -> bool:
        return self.diff != ""


@dataclass(frozen=True)
class EditPiece:
    """What is new: text of the new file, hunks of the diff; with the last piece, the result."""

    text: str
    diff: str
    result: Edited | None = None


def edit(
    llm: LLM,
    file: str | Path,
    instruction: str,
    *,
    text: str | None = None,
    mode: EditMode = "auto",
    params: SamplingParams | None = None,
) -> Edited:
    """See `LLM.edit`. With `auto`, an answer that breaks is replaced by a rewrite."""
    pieces = list(stream_edit(llm, file, instruction, text=text, mode=mode, params=params))
    return cast(Edited, pieces[-1].result)


def stream_edit(
    llm: LLM,
    file: str | Path,
    instruction: str,
    *,
    text: str | None = None,
    mode: EditMode = "auto",
    params: SamplingParams | None = None,
) -> Iterator[EditPiece]:
    """`edit` piece by piece; leaving the loop cancels it. In a way that was named, pieces come while the model writes,
    and an answer that breaks raises `BrokenEdit`: what was emitted before is not taken back. With `auto` the pieces of
    a short way come when its answer is complete; where it breaks, a rewrite comes in its place, as it is written."""
    if mode not in EDIT_MODES:
        raise BadRequest(f"mode is {mode!r:.40}", f"use one of {', '.join(EDIT_MODES)}")
    if not isinstance(instruction, str) or not instruction.strip():
        raise BadRequest("the instruction is empty", "write what to change")
    params = params or SamplingParams()
    if params.grammar is not None or params.n != 1 or not params.prefill.exact:
        raise BadRequest("an edit has one answer and a grammar of its own", "leave grammar, n and prefill out")
    content = read_file(file) if text is None else text
    if mode in SHORT_WAYS and not content:
        raise BadRequest(f"{Path(file).name} is empty: there are no lines to keep", "use mode='rewrite'")
    used, why = _choose(llm, mode, content)
    run = EditRun(llm, shown_name(file), content, instruction, used, why)
    return run.pieces(params) if mode != "auto" or used == "rewrite" else _complete_or_rewritten(run, params)


def _complete_or_rewritten(run: EditRun, params: SamplingParams) -> Iterator[EditPiece]:
    try:
        pieces = list(run.pieces(params))
    except BrokenEdit as broken:
        why = f"{run.used} broke: {broken}"
        yield from EditRun(run.llm, run.name, run.content, run.instruction, "rewrite", why).pieces(params)
        return
    yield from pieces


def _choose(llm: LLM, mode: EditMode, content: str) -> tuple[EditWay, str]:
    if mode != "auto":
        return mode, "asked for"
    if not llm.tokenizer.has_chat_template:
        return "rewrite", "the model is no chat model"
    if not content.strip():
        return "rewrite", "the file is empty"
    right = probe(llm)
    best = max(SHORT_WAYS, key=lambda way: right[way])
    found = ", ".join(f"{way} {right[way]}" for way in SHORT_WAYS)
    return (best if right[best] >= MIN_PROBES_RIGHT else "rewrite"), f"of {len(PROBES)} test edits right: {found}"


def probe(llm: LLM) -> dict[EditWay, int]:
    """How many of a few small edits the model gets right in each short way; tried once for each opened model."""
    if llm not in _probed:
        runs = [EditRun(llm, "probe", old, asked, way, "") for way in SHORT_WAYS for old, asked, _ in PROBES]
        asked = [replace(run.params(SamplingParams()), max_tokens=_PROBE_TOKENS) for run in runs]
        done = llm.chat([run.messages() for run in runs], asked)
        right = [run.result_of(answer.text) for run, answer in zip(runs, done, strict=True)]
        wanted = [new for _, _, new in PROBES] * len(SHORT_WAYS)
        found: dict[EditWay, int] = dict.fromkeys(SHORT_WAYS, 0)
        for run, got, new in zip(runs, right, wanted, strict=True):
            found[run.used] += got == new
        _probed[llm] = found
    return _probed[llm]


class EditRun:
    """One edit in one way."""

    def __init__(self, llm: LLM, name: str, content: str, instruction: str, used: EditWay, why: str) -> None:
        self.llm, self.name, self.content, self.instruction = llm, name, content, instruction
        self.used, self.why = used, why
        self.source = SourceLines(content)
        self.diff = DiffStream(self.source, name)

    def messages(self) -> Messages:
        messages = [{"role": "system", "content": SYSTEMS[self.used]}]
        if self.used != "rewrite":
            for old, asked, new in EXAMPLES:
                messages.append({"role": "user", "content": self._question(SourceLines(old), asked)})
                messages.append({"role": "assistant", "content": self._answer(SourceLines(old), SourceLines(new))})
        return [*messages, {"role": "user", "content": self._question(self.source, self.instruction)}]

    def _question(self, source: SourceLines, instruction: str) -> str:
        fence, lines = fence_for(source), "\n".join(source.lines)
        shown = source.numbered() if self.used == "copy" else f"{fence}\n{lines}\n{fence}"
        return f"{shown}\n\nInstruction: {instruction}"

    def _answer(self, old: SourceLines, new: SourceLines) -> str:
        return program_text(oracle(old, new.lines), old) if self.used == "copy" else replacements(old, new.lines)

    def params(self, given: SamplingParams) -> SamplingParams:
        ids = self.llm.tokenizer.encode(self.content)
        given = replace(given, max_tokens=max(given.max_tokens, len(ids) + EXTRA_TOKENS))
        if self.used == "rewrite":
            return replace(given, prediction=ids)
        by_line = Grammar.edit(self.content) if self.used == "copy" else Grammar.lark(replace_grammar(self.source))
        return replace(given, grammar=by_line)

    @property
    def _way_out(self) -> str:
        return "use another model" if self.used == "rewrite" else "use mode='rewrite', or another model"

    def reader(self) -> ProgramReader | ReplaceReader | BlockReader:
        if self.used == "copy":
            return ProgramReader(self.source)
        return (ReplaceReader if self.used == "replace" else BlockReader)(self.source)

    def result_of(self, answer: str) -> str | None:
        """The new text that a whole answer makes; None where it makes none."""
        reader = self.reader()
        try:
            lines = [*reader.push(answer), *reader.flush()]
        except ValueError:
            return None
        return self.source.join(lines) if reader.complete else None

    def pieces(self, given: SamplingParams) -> Iterator[EditPiece]:
        reader, lines, answer, text, diff = self.reader(), list[str](), "", "", ""
        for event in self.llm.stream(self.messages(), self.params(given)):
            answer += event.text
            try:
                found = reader.push(event.text)
            except ValueError as error:
                raise BrokenEdit(str(error), self._way_out) from None
            if event.finish_reason is not None:
                if event.finish_reason != "stop" or not reader.complete:
                    tokens = len(self.llm.tokenizer.encode(answer))
                    raise BrokenEdit(f"the answer did not end within {tokens} tokens", self._way_out)
                found = [*found, *reader.flush()]
            # a line's end is emitted with the next line: whether the last one has an end is known at last
            new = "".join(self.source.line_end * bool(lines or i) + line for i, line in enumerate(found))
            hunks = self.diff.push(found)
            lines += found
            if event.usage is not None:
                rest, hunks = self.source.join(lines)[len(text) + len(new) :], hunks + self.diff.finish()
                new += rest
            text, diff = text + new, diff + hunks
            if event.usage is not None:
                done = Edited(text, diff, self.used, self.why, answer, event.usage)
                yield EditPiece(new, hunks, done)
            elif new or hunks:
                yield EditPiece(new, hunks)


def shown_name(file: str | Path) -> str:
    """A file's name in its diff: with the folders that were given, so that `git apply` finds it from here."""
    path = Path(file)
    return path.name if path.is_absolute() or ".." in path.parts else path.as_posix()


def read_file(path: str | Path) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read {path}: {error}", "give a text file in UTF-8") from None
