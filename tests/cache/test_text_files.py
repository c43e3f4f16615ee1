"""Texts of the disk tier: each once, the longest of those that begin alike, bounded, and nothing that is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.cache import text_files
from forerun.cache.text_files import TextFiles


def test_the_longest_of_those_that_begin_alike_stay(tmp_path: Path):
    texts = TextFiles(tmp_path / "texts")
    assert texts.read() == []
    for data in (b"aaaa", b"bbbb", b"aaaacccc", b"aa"):
        texts.add(data)
    assert sorted(texts.read()) == sorted(TextFiles(tmp_path / "texts").read()) == [b"aaaacccc", b"bbbb"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_does_not_agree_with_its_name_is_not_used(tmp_path: Path):
    texts = TextFiles(tmp_path)
    texts.add(b"aaaa")
    texts.add(b"bbbb")
    next(path for path in tmp_path.iterdir() if path.read_bytes() == b"aaaa").write_bytes(b"aaab")
    assert texts.read() == [b"bbbb"]


def test_they_are_bounded_in_number_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_files, "MAX_TEXTS", 3)
    monkeypatch.setattr(text_files, "MAX_TEXT_BYTES", 20)
    texts = TextFiles(tmp_path)
    for i in range(5):
        texts.add(bytes([i]) * 4)
    assert len(texts.read()) == 3
    texts.add(b"x" * 18)
    assert texts.read() == [b"x" * 18]


def test_a_folder_that_cannot_be_written_ends_it(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    texts = TextFiles(tmp_path / "file" / "texts")
    texts.add(b"aaaa")
    assert texts.off and texts.read() == []
