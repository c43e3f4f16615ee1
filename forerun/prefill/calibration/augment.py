"""Windows made to copy and to recall: common uses of long prompts, and what drafted K/V loses first.

`echo`: the end of the prompt begins to repeat an earlier span, and the continuation goes on with it. `recall`: made-up
facts stand at random places of the prompt, a question about them at its end, and the continuation is the answer, all in
the model's own chat format. Lengths stay as they are to the token. Knows a tokenizer, but no model.
"""

from __future__ import annotations

import random

from forerun.text.tokenizer import Tokenizer

_FIRST = ("amber", "quiet", "northern", "velvet", "hollow", "silver", "crooked", "distant", "golden", "patient")
_SECOND = ("harbour", "lantern", "orchard", "falcon", "bridge", "meadow", "archive", "compass", "glacier", "mill")
_THINGS = ("special number", "access code", "lucky number", "room number", "serial number", "page count")
_MIN_LEAD_TOKENS = 16  # of the repetition that stand in the prompt: enough to identify the span


class Augmenter:
    def __init__(self, tokenizer: Tokenizer, prompt: int, continuation: int) -> None:
        self._tokenizer, self._prompt, self._continuation = tokenizer, prompt, continuation
        self._first = 1 if tokenizer.bos_id is not None and tokenizer.add_bos else 0

    def augment(self, rows: list[list[int]], echo: float, recall: float, rng: random.Random) -> list[str]:
        """Change shares of the rows in place, spread evenly over them; returns the kind of each."""
        kinds = []
        for i, row in enumerate(rows):
            # A low-discrepancy sequence: the shares hold for any number of rows, however few
            place = (i * 0.6180339887 + 0.5) % 1.0
            kind = "echo" if place < echo else "recall" if place >= 1.0 - recall else "plain"
            made = {"echo": self.with_copy, "recall": self.with_recall}[kind](row, rng) if kind != "plain" else None
            if made is None:  # plain, or too short to hold it
                kind = "plain"
            else:
                rows[i] = made
            kinds.append(kind)
        return kinds

    def with_copy(self, row: list[int], rng: random.Random) -> list[int] | None:
        """The row with its end replaced by an earlier span of itself."""
        lead = rng.randint(_MIN_LEAD_TOKENS, 3 * _MIN_LEAD_TOKENS)
        span = lead + self._continuation
        room = self._prompt - lead - span  # starts that leave the span whole before its repetition
        if room < self._first:
            return None
        at = rng.randint(self._first, room)
        return row[: self._prompt - lead] + row[at : at + span]

    def with_recall(self, row: list[int], rng: random.Random) -> list[int] | None:
        """Facts in the row, a question about them, and the answer as its continuation."""
        encode = self._tokenizer.encode
        thing = rng.choice(_THINGS)
        names = [f"{a} {b}" for a, b in zip(rng.sample(_FIRST, 10), rng.sample(_SECOND, 10), strict=True)]
        facts: list[tuple[str, str]] = []
        answer: list[int] = []
        while len(answer) < self._continuation:  # as many facts as the answer needs to be long enough
            if len(facts) == len(names):
                return None
            name = names[len(facts)]
            facts.append((name, f"The {thing} of the {name} is {rng.randint(1000, 9999999)}."))
            answer = encode(" ".join(sentence for _, sentence in facts))
        asked = [name for name, _ in facts]
        listed = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
        before, after = self._frame(f"What is the {thing} of the {listed}? Answer in whole sentences.")
        inserts = [encode(f"\n{sentence}\n") for _, sentence in facts]
        room = self._prompt - len(before) - len(after) - sum(map(len, inserts))
        if room < len(row) // 4:
            return None
        body = row[self._first : self._first + room]
        for ids in rng.sample(inserts, len(inserts)):
            at = rng.randint(0, len(body))
            body[at:at] = ids
        return before + body + after + answer[: self._continuation]

    def _frame(self, question: str) -> tuple[list[int], list[int]]:
        """What stands before and after a document that a question follows. Found by rendering two documents: what is
        the same in both is the frame, whatever the template."""
        one, other = (self._rendered(f"{document}\n\n{question}") for document in ("7", "document"))
        shorter = min(len(one), len(other))
        before = next((i for i in range(shorter) if one[i] != other[i]), shorter)
        after = next((i for i in range(shorter - before) if one[-1 - i] != other[-1 - i]), shorter - before)
        return one[:before], one[len(one) - after :]

    def _rendered(self, text: str) -> list[int]:
        if self._tokenizer.has_chat_template:
            return self._tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return self._tokenizer.encode(f"{text}\nAnswer:", add_special=True)
