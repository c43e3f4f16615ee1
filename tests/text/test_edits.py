"""Edit programs, replacements and diffs: any text can be made of any other, as it comes and at once."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from forerun.text.edit_program import (
    CopyStep,
    NewStep,
    ProgramReader,
    SourceLines,
    apply_program,
    number_pattern,
    oracle,
    program_text,
    range_pattern,
    step_pattern,
)
from forerun.text.edit_replace import BlockReader, Markers, ReplaceReader, fence_for, replace_grammar, replacements
from forerun.text.line_diff import DiffStream

OLD = "".join(f"line {i}\n" for i in range(1, 31))


def changed(text: str, rng: random.Random) -> str:
    """A text with some lines replaced, removed and inserted."""
    lines = text.splitlines(keepends=True)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines))
        lines[at : at + rng.randint(0, 2)] = [f"new {rng.randint(0, 9)}\n" for _ in range(rng.randint(0, 3))]
    return "".join(lines) or "one\n"


def in_grammar(source: SourceLines, text: str) -> bool:
    """Whether the grammar of replacements allows a text, byte by byte, and an end after it."""
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(replace_grammar(source)))
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def applied(diff: str, old: str, file: Path) -> str:
    """What git makes of a text and a diff of it."""
    file.write_bytes(old.encode())
    if diff:
        apply = ["git", "apply", "--whitespace=nowarn", "-"]
        subprocess.run(apply, input=diff.encode(), cwd=file.parent, check=True)
    return file.read_bytes().decode() if file.exists() else ""


@pytest.mark.parametrize("seed", range(40))
def test_programs_replacements_and_diffs_give_the_new_text(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    old = OLD if seed % 2 else "".join(rng.choice(["a\n", "b\n", "\n"]) for _ in range(20))
    new = changed(old, rng)
    if seed % 5 == 0:
        old, new = old.rstrip("\n") + "end", new.rstrip("\n") + "end"  # no line end at the end
    if seed % 7 == 0:
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    source, lines = SourceLines(old), SourceLines(new).lines
    assert source.join(lines) == new and source.join(source.lines) == old
    program = program_text(oracle(source, lines))
    assert apply_program(source, program) == new

    reader, found = ProgramReader(source), []
    for char in program:
        found += reader.push(char)
    assert reader.complete and found == lines and reader.steps == oracle(source, lines)

    blocks, by_content = ReplaceReader(source), replacements(source, lines)
    assert source.join([*blocks.push(by_content), *blocks.flush()]) == new
    assert not by_content or in_grammar(source, by_content)

    stream = DiffStream(source, "text")
    diff = "".join(stream.push([line]) for line in lines) + stream.finish()
    assert (diff == "") == (old == new)
    assert applied(diff, old, tmp_path / "text") == new


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("old", "new"),
    [("a|b", "a|b|c"), ("a|b", "a"), ("a|b", ""), ("a|b", "x|a|b"), ("a", "b"), ("", "a|b|"), ("a|b|", "a|b|c|")],
)
def test_a_diff_applies_whether_or_not_the_last_line_ends(end: str, old: str, new: str, tmp_path: Path):
    before = SourceLines(old.replace("|", end))
    stream = DiffStream(before, "my text")
    lines = SourceLines(new.replace("|", end)).lines
    diff = stream.push(lines) + stream.finish()
    assert applied(diff, old.replace("|", end), tmp_path / "my text") == before.join(lines)


def test_hunks_come_before_the_text_ends():
    source = SourceLines(OLD)
    lines = [*source.lines]
    lines[3] = "changed"
    stream = DiffStream(source, "text")
    assert stream.push(lines[:9]) == ""
    assert stream.push(lines[9:10]).splitlines()[2:] == [
        "@@ -1,7 +1,7 @@",
        *(f" line {i}" for i in (1, 2, 3)),
        "-line 4",
        "+changed",
        *(f" line {i}" for i in (5, 6, 7)),
    ]
    assert stream.push(lines[10:]) == stream.finish() == ""


def test_an_oracle_copies_what_stays():
    lines = SourceLines(OLD).lines
    assert oracle(SourceLines(OLD), [*lines[:9], "x", *lines[11:]]) == [
        CopyStep(1, 9),
        NewStep(("x",)),
        CopyStep(12, None),
    ]
    with pytest.raises(ValueError, match="</new>"):
        oracle(SourceLines(OLD), ["</new>"])


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 9), (3, 27), (17, 17), (98, 1203), (5, 40), (1, 10000)])
def test_number_patterns(low: int, high: int):
    pattern = re.compile(number_pattern(low, high))
    near = [*range(max(0, low - 30), low + 30), *range(max(0, high - 30), high + 30)]
    assert all((pattern.fullmatch(str(n)) is not None) == (low <= n <= high) for n in near)
    assert not pattern.fullmatch(f"0{low}")


def test_patterns_of_steps():
    begins, closes = re.compile(step_pattern(4, 12, True, True)), re.compile(range_pattern(9, 12))
    for text in ("<copy 4-", "<copy 12-end>\n", "<new>\n</new>\n", "<new>\n</ne\n <\n\n</new>\n", ""):
        assert begins.fullmatch(text), text
    for text in ("<copy 3-", "<copy 13-", "<new>\n</new>x\n</new>\n", "<new></new>\n", "<copy 4-5>\n"):
        assert not begins.fullmatch(text), text
    assert closes.fullmatch("9>\n") and closes.fullmatch("end>\n") and not closes.fullmatch("8>\n")
    assert re.fullmatch(step_pattern(13, 12, True, False), "<new>\n</new>\n")


def test_a_program_that_is_none():
    with pytest.raises(ValueError, match="no step"):
        ProgramReader(SourceLines(OLD)).push("copy 1-3\n")
    with pytest.raises(ValueError, match="inside a step"):
        apply_program(SourceLines(OLD), "<new>\nx\n")


def test_markers_are_longer_than_the_lines_of_the_text():
    source = SourceLines("Title\n=========\n\n>>>>>>> REPLACE\n```\n````\n")
    marks = Markers(source)
    assert marks.divider == "=" * 10 and fence_for(source) == "`" * 5
    text = replacements(source, ["Name", "=========", "", ">>>>>>> REPLACE", "```"])
    reader = ReplaceReader(source)
    assert [*reader.push(text), *reader.flush()] == ["Name", "=========", "", ">>>>>>> REPLACE", "```"]


@pytest.mark.parametrize(
    ("old", "allowed"),
    [("a\nb\n", True), ("b\n", True), ("a\na\n", False), ("b\na\n", False), ("c\n", False), ("", False), ("a", False)],
)
def test_the_grammar_names_lines_that_follow_each_other_in_the_text(old: str, allowed: bool):
    source = SourceLines('a\nb\n"c\\\n')
    text = f"<<<<<<< SEARCH\n{old}=======\nnew\n\n>>>>>>> REPLAC\n>>>>>>> REPLACE\n"
    assert in_grammar(source, text) == allowed
    assert in_grammar(source, text + text) == allowed and not in_grammar(source, "")
    assert in_grammar(source, '<<<<<<< SEARCH\n"c\\\n=======\n>>>>>>> REPLACE\n')


def test_replacements_of_lines_that_are_not_there():
    reader = ReplaceReader(SourceLines("a \nb\n"))
    with pytest.raises(ValueError, match="not in the text"):
        reader.push("<<<<<<< SEARCH\nc\n=======\n")
    reader = ReplaceReader(SourceLines("a \nb\n"))
    assert [*reader.push("<<<<<<< SEARCH\na\n=======\nc\n>>>>>>> REPLACE\n"), *reader.flush()] == ["c", "b"]


@pytest.mark.parametrize(
    ("answer", "lines"),
    [
        ("```python\na\nb\n```\nDone.", ["a", "b"]),
        ("Here:\n```\na\n```", ["a"]),
        ("a\nb", ["a", "b"]),
        ("```\na\nb", ["a", "b"]),
    ],
)
def test_the_first_block_of_an_answer(answer: str, lines: list[str]):
    reader, found = BlockReader(SourceLines("")), []
    for char in answer:
        found += reader.push(char)
    assert [*found, *reader.flush()] == lines
