"""Which files are text, which are held out, and that sections together are the whole."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from forerun.errors import BadRequest
from forerun.prefill.calibration import files
from forerun.prefill.calibration.files import Section, find_files, split_held_out


def write(folder: Path, sizes: dict[str, int]) -> list[Path]:
    for name, size in sizes.items():
        (folder / name).write_text("x" * size)
    return [folder / name for name in sizes]


def test_folders_give_their_text_and_leave_out_the_rest(tmp_path: Path) -> None:
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    for name in ("b.md", "a.py", "deep/c.txt", "deep/naïve"):
        (tmp_path / name).write_text("some text, größer")
    (tmp_path / "deep" / ".git" / "config").write_text("hidden")
    (tmp_path / ".env").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    (tmp_path / "zeros").write_bytes(b"text\0text")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "other.jsonl").write_text('{"prompt": "no text here"}\n')
    found = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path, tmp_path / "a.py"])]
    assert found == ["a.py", "b.md", "deep/c.txt", "deep/naïve"]


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("none.txt", None, "No such file"),
        ("empty.txt", b"\n", "it is empty"),
        ("latin.txt", b"caf\xe9 au lait", "not UTF-8 text (byte 3)"),
        ("zeros.txt", b"ab\0", "zero bytes"),
        ("bad.jsonl", b'{"prompt": 1}\n', "`text` field"),
        ("worse.jsonl", b"[1, 2\n", "`text` field"),
    ],
)
def test_a_named_file_must_be_text(tmp_path: Path, name: str, data: bytes | None, why: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(BadRequest) as error:
        find_files([tmp_path / name])
    assert name in str(error.value) and why in str(error.value) and error.value.hint


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no text to calibrate on"):
        find_files([])
    with pytest.raises(BadRequest, match="no text file in the folder"):
        find_files([tmp_path])


def test_a_character_cut_where_the_sample_ends_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_SNIFF_BYTES", 3)
    (tmp_path / "a.txt").write_text("aßb größer")
    (tmp_path / "b.txt").write_text("abß")
    assert len(find_files([tmp_path])) == 2


def test_held_out_files_are_whole_and_of_about_that_share(tmp_path: Path) -> None:
    paths = write(tmp_path, {f"{i}.txt": 1000 for i in range(40)})
    train, held = split_held_out(paths, 0.1, random.Random(0))
    assert not {s.path for s in train} & {s.path for s in held}
    assert len(train) + len(held) == 40 and len(held) == 4
    again = split_held_out(paths, 0.1, random.Random(0))
    other = split_held_out(paths, 0.1, random.Random(1))
    assert again == (train, held) and {s.path for s in other[1]} != {s.path for s in held}


def test_no_held_out_file_takes_nearly_everything(tmp_path: Path) -> None:
    paths = write(tmp_path, {"large.txt": 100_000, "small.txt": 900, "tiny.txt": 100})
    for seed in range(8):
        train, _ = split_held_out(paths, 0.1, random.Random(seed))
        assert "large.txt" in {s.path.name for s in train}
    _, held = split_held_out(paths[:2], 0.001, random.Random(0))
    assert {s.path.name for s in held} == {"small.txt"}  # none is small enough, so the smallest


def test_one_file_is_cut_in_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SECTION_BYTES", 64)
    (path,) = write(tmp_path, {"a.txt": 1000})
    train, held = split_held_out([path], 0.2, random.Random(0))
    assert max(s.end for s in train) == min(s.start for s in held) == 800
    assert sum(s.end - s.start for s in train + held) == 1000


@pytest.mark.parametrize("size", [7, 50, 10_000])
def test_lines_are_read_once_wherever_sections_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(files, "SECTION_BYTES", size)
    texts = [f"text {i} " + "wörter " * (i % 5) for i in range(20)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + "\n\n")
    train, held = split_held_out([path], 0.3, random.Random(0))
    ordered = sorted(train + held, key=lambda s: s.start)
    assert [text for section in ordered for text in section.texts()] == texts


def test_conversations_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    said = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}]
    path.write_text(json.dumps({"messages": said}) + '\n{"text": "plain"}\n')
    assert find_files([path]) == [path]
    section = Section(path, 0, 1000)
    assert list(section.documents()) == [said, "plain"]
    assert list(section.texts()) == ["what?\n\nthat", "plain"]
    for bad in ([], [{"role": "user"}], [7], {"role": "user", "content": "a"}):
        path.write_text(json.dumps({"messages": bad}))
        with pytest.raises(BadRequest, match="`messages`"):
            find_files([path])


def test_a_bad_line_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": 7}\n')
    with pytest.raises(BadRequest, match=r"a\.jsonl, byte 17: not a JSON object"):
        list(Section(path, 0, 100).texts())


def test_a_section_of_plain_text_may_cut_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("aßb")
    assert list(Section(path, 0, 2).texts()) == ["a"]
    assert list(Section(path, 2, 4).texts()) == ["b"]
