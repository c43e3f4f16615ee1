"""Answers that are edit programs (`Grammar.edit`): which tokens may follow, and what a copy puts into the sequence.

A program is decoded part by part, each under a regex of its own: a copy up to its hyphen, the end of its range, a new
step. When a copy is complete, its lines follow in the sequence without being sampled, so that the model goes on from
the text as it is now; they run in one forward. A copy to the end ends the program, and nothing runs for it. A step's
tokens end with the part they are in, as what was drafted beyond was drafted without the copied lines. Knows no engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from forerun.decode.drafters.grammar import spell
from forerun.decode.grammar import AnswerGrammar, GrammarCompiler
from forerun.params import Grammar
from forerun.text.edit_program import END_NEW, NEW, CopyStep, SourceLines, range_pattern, step_pattern

_COPY_BEGUN, _RANGE = re.compile(rb"<copy (\d+)-(end>\n)?"), re.compile(rb"(\d+|end)>\n")
_NEW, _END_NEW = f"{NEW}\n".encode(), f"\n{END_NEW}\n".encode()


class EditAnswer(AnswerGrammar):
    """As an `AnswerGrammar`: the part that the program is in. `copied`: tokens that follow the program so far."""

    def __init__(self, grammar: Grammar, compiler: GrammarCompiler) -> None:
        self.source, self._compiler = SourceLines(grammar.source), compiler
        self.copied: list[int] = []
        self._next_line = 1  # the first that may still be copied
        self._copies_from: int | None = None  # of a copy whose end is not known yet
        self._begin_step(may_end=False)

    def until_part_end(self, tokens: Sequence[int]) -> int:
        """How many of the tokens belong to the part that the program is in."""
        text = self.text
        for i, token in enumerate(tokens):
            text += self.vocabulary.tokens[token]
            if self._completes(text):
                return i + 1
        return len(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """At most to the end of the part."""
        super().advance(tokens)
        self.copied = []
        if not self._completes(self.text):
            return
        if self._copies_from is not None:
            self._finish_copy()
        elif (begun := _COPY_BEGUN.fullmatch(self.text)) and begun[2]:
            self._end()
        elif begun:
            self._copies_from = int(begun[1])
            self._begin(range_pattern(self._copies_from, len(self.source.lines)))
        else:
            self._begin_step(may_write=False)

    def _completes(self, text: bytes) -> bool:
        if self._copies_from is not None:
            return _RANGE.fullmatch(text) is not None
        return _COPY_BEGUN.fullmatch(text) is not None or (text.startswith(_NEW) and text.endswith(_END_NEW))

    def _finish_copy(self) -> None:
        assert self._copies_from is not None
        last = self.text[: -len(b">\n")]
        if last == b"end":
            self._end()
            return
        lines = self.source.span(CopyStep(self._copies_from, int(last)))
        text = "".join(line + "\n" for line in lines)
        tokenizer = self.vocabulary.tokenizer
        # a tokenizer that normalises text has no tokens for some of it: then what it makes of it is what is shown
        self.copied = spell(tokenizer, self.tokens[-1:], text.encode()) or tokenizer.encode(text)
        self._next_line, self._copies_from = int(last) + 1, None
        self._begin_step()

    def _begin_step(self, may_write: bool = True, may_end: bool = True) -> None:
        """Two new steps in a row are one: after the last line and a new step there is nothing left to do."""
        if not may_write and self._next_line > len(self.source.lines):
            self._end()
            return
        self._begin(step_pattern(self._next_line, len(self.source.lines), may_write, may_end))

    def _begin(self, pattern: str) -> None:
        part = Grammar.regex(pattern)
        super().__init__(part, self._compiler.parser(part), self._compiler.vocabulary)

    def _end(self) -> None:
        """Only an end may follow, as after an end."""
        self._bits.clear()
        self.tokens = [self.vocabulary.eos_token_id]
