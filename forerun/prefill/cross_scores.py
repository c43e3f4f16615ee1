"""Tail attention of a draft model of another tokenizer or family, as scores of the target's tokens.

It reads the same text in its own tokens; the attention of its tail over them is carried over by their byte ranges in
the text. Its K/V is of no use to the target: it only scores which tokens to recompute. `TokenAlignment` is the text in
both tokenizers, `CrossScores` runs the model, on pages it borrows while it reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.retoken import counterpart
from forerun.errors import BadRequest, OutOfPages
from forerun.models.execution.runner import Span
from forerun.prefill.choosers import TailAttention
from forerun.prefill.state import PrefillState
from forerun.text.tokenizer import Tokenizer

CHUNK_TOKENS = 512  # of one forward
_STRAY = re.compile("[\udc80-\udcff]")  # bytes that are no part of a character, as Python spells them


class TokenAlignment:
    """The target's and the draft's tokens of one text, and the byte range of each.

    A control token takes one byte. One that the draft does not have has an empty range, and so has the BOS token that
    the draft expects where the target has none.
    """

    def __init__(self, tokens: Sequence[int], target: Tokenizer, draft: Tokenizer) -> None:
        self._target, self._draft = target, draft
        self.ids: list[int] = []
        self._edges: list[tuple[int, int]] = []  # of the draft's tokens
        self._own = np.zeros((len(tokens), 2), dtype=np.float64)  # of the target's
        self._length = 0
        start = 0
        for n, token in enumerate(tokens):
            if token in target.special_ids:
                self._text(tokens, start, n)
                self._control(token, n)
                start = n + 1
        self._text(tokens, start, len(tokens))
        if draft.add_bos and draft.bos_id is not None and self.ids[:1] != [draft.bos_id]:
            self.ids.insert(0, draft.bos_id)
            self._edges.insert(0, (0, 0))

    def _control(self, token: int, n: int) -> None:
        other = counterpart(token, self._target, self._draft)
        if other is not None:
            self.ids.append(other)
            self._edges.append((self._length, self._length + 1))
            self._length += 1
        self._own[n] = (self._length - (other is not None), self._length)

    def _text(self, tokens: Sequence[int], lo: int, hi: int) -> None:
        """Tokens lo .. hi, none of which is a control token."""
        parts = [self._target.token_bytes(token) for token in tokens[lo:hi]]
        read = b"".join(parts).decode("utf-8", "surrogateescape")
        text = _STRAY.sub("\ufffd", read)
        places = np.cumsum([0, *map(len, parts)]).astype(np.float64)
        if text != read:  # a stray byte became a character of three
            was = np.cumsum([0, *(len(char.encode("utf-8", "surrogateescape")) for char in read)])
            places = np.interp(places, was, np.cumsum([0, *(len(char.encode()) for char in text)]))
        self._own[lo:hi] = self._length + np.stack((places[:-1], places[1:]), axis=1)
        data = text.encode()
        if data:
            ids = self._draft.encode(text)
            self.ids += ids
            self._edges += [(self._length + a, self._length + b) for a, b in self._places(ids, data)]
        self._length += len(data)

    def _places(self, ids: list[int], data: bytes) -> list[tuple[int, int]]:
        """Byte ranges of the draft's tokens in a text, of at least one byte each."""
        parts = [self._draft.token_bytes(i) for i in ids]
        joined = b"".join(parts)
        ends = np.cumsum([0, *map(len, parts)])
        if joined == b" " + data:  # a space that the tokenizer puts before every text
            ends = ends - 1
        elif joined != data:  # the tokenizer normalises: approximately
            ends = np.rint(ends * (len(data) / max(1, len(joined))))
        ends = np.clip(ends, 0, len(data)).astype(np.int64)
        first = np.minimum(ends[:-1], len(data) - 1)
        return list(zip(first.tolist(), np.maximum(ends[1:], first + 1).tolist(), strict=True))

    def carry(self, scores: np.ndarray) -> np.ndarray:
        """Scores of the draft's tokens, spread evenly over their bytes and gathered by the target's tokens: [T].

        The sum stays the same, but for empty ranges.
        """
        edges = np.array(self._edges, dtype=np.int64).reshape(-1, 2)
        lengths = edges[:, 1] - edges[:, 0]
        here = lengths > 0
        rates = scores[here].astype(np.float64) / lengths[here]
        change = np.zeros(self._length + 1)
        np.add.at(change, edges[here, 0], rates)
        np.add.at(change, edges[here, 1], -rates)
        before = np.concatenate(([0.0], np.cumsum(np.cumsum(change[:-1]))))  # score of the text before each place
        at = np.arange(self._length + 1)
        found = np.interp(self._own[:, 1], at, before) - np.interp(self._own[:, 0], at, before)
        return np.maximum(found, 0.0)  # rounding may leave sums a little below zero

    def last_read(self) -> np.ndarray:
        """[T] of each of the target's tokens the last of the draft's that ends where it ends, or before; -1: none."""
        ends = np.array([end for _, end in self._edges], dtype=np.float64)
        return np.searchsorted(ends, self._own[:, 1], side="right") - 1

    def tokens_before(self, token: int) -> int:
        """How many of the draft's tokens end before this one of the target's begins."""
        place = self._own[token, 0] if token < len(self._own) else self._length
        return int(np.searchsorted([end for _, end in self._edges], place, side="right"))


class CrossScores:
    """Attention of a draft model of another tokenizer."""

    def __init__(self, ctx: DraftContext) -> None:
        if (problem := ctx.draft_problem("the chooser 'cross'", through_text=True)) is not None:
            raise problem
        draft, runner = ctx.draft, ctx.draft_runner
        assert draft is not None and runner is not None and ctx.tokenizer is not None and draft.tokenizer is not None
        self._ctx, self._runner, self._pool = ctx, runner, ctx.pool
        self._target, self._draft = ctx.tokenizer, draft.tokenizer
        self.max_tokens = min(ctx.max_context, draft.decoder.config.max_context)
        self._cost = draft.decoder.config.macs / ctx.runner.decoder.config.macs

    def cost(self, tokens: int) -> float:
        """In tokens of the target's prefill; as if the text had as many tokens here."""
        return self._cost * tokens

    def scores(self, state: PrefillState) -> np.ndarray:
        """[len(state.tokens)] how much the prompt's tail attends to each token."""
        return self.score_tokens(state.tokens, len(state.tokens) - state.end)

    def score_tokens(self, tokens: Sequence[int], tail: int) -> np.ndarray:
        """[len(tokens)] how much the last `tail` of them attend to each."""
        alignment = TokenAlignment(tokens, self._target, self._draft)
        count = len(alignment.ids)
        if count > self.max_tokens:
            problem = f"the prompt has {count} tokens of the draft model, which reads at most {self.max_tokens}"
            raise BadRequest(problem, "shorten it, or use another chooser")
        if count == 0:
            return np.zeros(len(tokens))
        return alignment.carry(self._read(alignment.ids, min(alignment.tokens_before(len(tokens) - tail), count - 1)))

    def _read(self, ids: list[int], tail: int) -> np.ndarray:
        """[len(ids)] attention of the entries from `tail` on."""
        count, make_room = self._pool.pages_for(len(ids)), self._ctx.make_room
        if count > self._pool.free and not (make_room is not None and make_room(count)):
            raise OutOfPages(
                f"reading the prompt with the draft model needs {count} pages, {self._pool.free} are free",
                "ask again when fewer requests run, raise kv_cache_tokens, or use another chooser",
            )
        with self._pool.borrow(len(ids)) as pages:  # its own, so that no other borrower of free pages uses them
            tail_attention = TailAttention(self._runner, pages, tail, len(ids))
            for lo in range(0, len(ids), CHUNK_TOKENS):
                hi, first = min(lo + CHUNK_TOKENS, len(ids)), max(lo, tail)

                def watch(
                    layer: int, x: Tensor, q: Tensor | None, _: Tensor | None, lo: int = lo, first: int = first
                ) -> None:
                    if q is not None and first < lo + q.shape[0]:
                        tail_attention.add(layer, q[first - lo :], first)

                self._runner.forward([Span(ids[lo:hi], lo, pages, ())], watch=watch)
            return tail_attention.reduce()
