"""Provisional words on a terminal: dim, then gone."""

from __future__ import annotations

import io

import pytest

from forerun.commands.screen import Screen, rows
from forerun.engine.sequence import Event


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


EVENTS = [
    Event(0, 0, "The sky", provisional=True),
    Event(0, 0, "", provisional=True),
    Event(0, 0, " is\nred", provisional=True),
    Event(0, 0, "The sky is", confirmed=3, retracted=1),
    Event(0, 0, " blue", finish_reason="stop"),
]


def test_a_terminal_shows_it_dim_and_takes_it_back() -> None:
    out = Terminal()
    screen = Screen(out)
    for event in EVENTS:
        screen.show(event)
    assert out.getvalue() == (
        "\x1b[2mThe sky\x1b[22m\x1b[2m is\nred\x1b[22m"  # two lines
        "\r\x1b[1A\x1b[JThe sky is blue"
    )
    assert screen.text == "The sky is blue"


SEVERAL = [
    Event(0, 0, "The sky", [1, 2], provisional=True),
    Event(0, 0, " is\nred", [3, 4, 5], provisional=True),
    Event(0, 0, "The", [1], confirmed=1),
    Event(0, 0, " sky is", [2, 3], confirmed=2),
]
SHOWN = "\x1b[2mThe sky\x1b[22m\x1b[2m is\nred\x1b[22m"


@pytest.mark.parametrize(
    ("rest", "written"),
    [
        ([Event(0, 0, " blue", [6], retracted=2), Event(0, 0, "!", [7])], "The sky is blue!"),
        ([Event(0, 0, "\nred", [4, 5], confirmed=2), Event(0, 0, "!", [7])], "The sky is\nred!"),
        ([Event(0, 0, "", [4], confirmed=1, retracted=1, finish_reason="stop")], "The sky is"),
        ([Event(0, 0, "", finish_reason="cancelled")], "The sky is"),
    ],
    ids=["taken back", "all stand", "ends", "cancelled"],
)
def test_words_that_stand_stay_until_all_are_settled(rest: list[Event], written: str) -> None:
    out, plain = Terminal(), io.StringIO()
    screens = Screen(out), Screen(plain)
    for event in SEVERAL:
        for screen in screens:
            screen.show(event)
    assert out.getvalue() == SHOWN and screens[0].text == "The sky is" == plain.getvalue()
    for event in rest:
        for screen in screens:
            screen.show(event)
    assert out.getvalue() == SHOWN + "\r\x1b[1A\x1b[J" + written
    assert plain.getvalue() == screens[0].text == screens[1].text == written


def test_anything_else_gets_the_answer_only() -> None:
    out = io.StringIO()
    screen = Screen(out)
    for event in EVENTS:
        screen.show(event)
    assert out.getvalue() == screen.text == "The sky is blue"


def test_without_provisional_words_nothing_is_moved() -> None:
    out = Terminal()
    for event in EVENTS[3:]:
        Screen(out).show(event)
    assert out.getvalue() == "The sky is blue"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 1),
        ("a" * 10, 1),
        ("a" * 11, 2),
        ("a\nb", 2),
        ("a" * 25 + "\n", 4),
        ("光" * 6, 2),
        ("\ta\tb", 2),
        ("\n\n", 3),
    ],
)
def test_rows_of_a_text(text: str, expected: int) -> None:
    assert rows(text, 10) == expected
