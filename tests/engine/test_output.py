"""Text as it comes: stop strings across any token boundary, nothing shown too early, nothing lost."""

from __future__ import annotations

import itertools

import pytest

from forerun.engine.output import TextStream


class Letters:
    """A stand-in detokenizer whose tokens are pieces of text given in advance."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self.pieces, self.tail = pieces, tail

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return self.tail


def feed(pieces: list[str], stop: tuple[str, ...], tail: str = "") -> tuple[list[str], bool]:
    stream = TextStream(Letters(pieces, tail), stop)  # type: ignore[arg-type]
    shown = []
    for token in range(len(pieces)):
        shown.append(stream.push(token))
        if stream.stopped:
            return shown, True
    shown.append(stream.flush())
    return shown, stream.stopped


def cuts(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    out = []
    for marks in itertools.product([0, 1], repeat=len(text) - 1):
        pieces, start = [], 0
        for i, mark in enumerate(marks, 1):
            if mark:
                pieces.append(text[start:i])
                start = i
        out.append([*pieces, text[start:]])
    return out


@pytest.mark.parametrize("stop", [("cde",), ("e",), ("bcdef", "d")])
def test_a_stop_string_is_found_however_the_text_is_cut(stop: tuple[str, ...]):
    text = "abcdefg"
    for pieces in cuts(text):
        shown, stopped = feed(pieces, stop)
        assert stopped
        # the stop that completes first ends the text; what was before it is all there
        assert "".join(shown) in {text[: text.index(s)] for s in stop}


def test_text_that_only_begins_like_a_stop_string_comes_out_later():
    shown, stopped = feed(["ab", "<", "e", "x"], ("<end>",))
    assert shown == ["ab", "", "", "<ex", ""] and not stopped


def test_what_was_held_back_comes_out_at_the_end():
    shown, stopped = feed(["ab", "<en"], ("<end>",))
    assert "".join(shown) == "ab<en" and not stopped


def test_the_end_of_the_stream_can_complete_a_stop_string():
    shown, stopped = feed(["ab<en"], ("<end>",), tail="d>")
    assert "".join(shown) == "ab" and stopped


def test_without_stop_strings_text_passes_at_once():
    assert feed(["a", "b"], ())[0] == ["a", "b", ""]
