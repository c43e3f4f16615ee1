"""A draft model of another tokenizer: it continues the text in its own tokens, which are cut into the target's.

What it proposes is a plain guess at tokens, so any verifier stays lossless whatever the two vocabularies are. Its K/V
lies on pages that are free (`spare`), because the same text has another number of tokens here. Knows no verifier and no
target; text between the tokenizers is `retoken`'s.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

import torch

from forerun.core import Draft
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import MAX_CATCH_UP_TOKENS, Drafter, DraftRequest, DraftRound, register
from forerun.decode.drafters.retoken import Transcript, counterpart, retokenise, shares, whole_characters
from forerun.decode.drafters.spare import SparePages
from forerun.errors import BadRequest
from forerun.models.execution.runner import Span

CHOICES = 3  # likeliest tokens of a round: the first is drafted on, the others become side branches of one token
LEAST = 0.05  # side branches less likely than this are not worth naming
EXTRA = 4  # rounds beyond the depth asked for, as one token of the target may take several here


@dataclass
class _State:
    """What the draft model has read and computed of one sequence."""

    id: int
    transcript: Transcript
    pages: array[int] = field(default_factory=lambda: array("i"))
    ran: list[int] = field(default_factory=list)  # tokens whose K/V lies in the entries 0, 1, ...


@dataclass
class _Growth:
    """One draft in the making: a chain of the draft model's tokens, and the target's tokens that it amounts to."""

    request: DraftRequest
    state: _State
    rounds: int
    drafted: list[int] = field(default_factory=list)
    text: bytes = b""  # of all of `drafted`
    parts: list[tuple[int, float]] = field(default_factory=list)  # bytes and probability of each
    path: float = 1.0
    tokens: list[int] = field(default_factory=list)  # of the target
    others: list[tuple[int, int, float]] = field(
        default_factory=list
    )  # after so many drafted: a token, its probability
    over: bool = False


@register
class CrossDrafter(Drafter):
    name = "cross"
    free = False

    def __init__(self, ctx: DraftContext) -> None:
        draft, runner = ctx.draft, ctx.draft_runner
        assert draft is not None and runner is not None
        assert ctx.tokenizer is not None and draft.tokenizer is not None
        self._runner, self._pool = runner, ctx.pool
        self._target, self._draft = ctx.tokenizer, draft.tokenizer
        self._ends = {*draft.decoder.config.eos_ids, *draft.tokenizer.eos_ids, *draft.tokenizer.special_ids}
        self.max_context = min(ctx.max_context, draft.decoder.config.max_context)
        assert ctx.draft_kv is not None
        self._spare = SparePages(ctx.pool, ctx.draft_kv, ctx.make_room)
        self.rounds: list[DraftRound] = []
        self._states: dict[int, _State] = {}

    @classmethod
    def problem(cls, ctx: DraftContext) -> BadRequest | None:
        if ctx.draft is None:
            return BadRequest(
                f"the drafter {cls.name!r} needs a draft model",
                "open the model with a draft: draft=..., or --draft on the command line",
            )
        if ctx.draft.same_tokens:
            return BadRequest(
                f"the tokens of {ctx.draft.source} are the target's own, there is nothing to translate",
                "use the drafter `model`",
            )
        if ctx.tokenizer is None or ctx.draft.tokenizer is None:
            missing = "the target" if ctx.tokenizer is None else ctx.draft.source
            return BadRequest(
                f"the drafter {cls.name!r} goes through the text, and {missing} has no tokenizer",
                "use models that come with their tokenizer",
            )
        return None

    # -- the contract --------------------------------------------------------------------------------------------------

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        grown = [_Growth(request, self._state(request), request.max_depth + EXTRA) for request in requests]
        ready = self._catch_up(grown)
        self.rounds = []
        while ready := [g for g in ready if self._goes_on(g)]:
            start = time.perf_counter()
            self._run(ready, [Span(g.drafted[-1:], len(g.state.ran), g.state.pages, (0,)) for g in ready])
            self.rounds.append(DraftRound(len(ready), len(ready), time.perf_counter() - start))
        return [self._finished(g) for g in grown]

    def catch_up_tokens(self, request: DraftRequest) -> int:
        state = self._state(request)
        return len(state.transcript.ids) - len(state.ran)

    def time_round(self, tokens: int, context: int) -> float:
        return self._runner.time_forward(tokens, context, repeats=2)

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._spare.drop(state.id, state.pages)

    # -- catching up with the target -----------------------------------------------------------------------------------

    def _state(self, request: DraftRequest) -> _State:
        """What the draft model has of the text as it is now: drafts that came true stay."""
        state = self._states.get(request.seq_id)
        if state is None:
            state = self._states[request.seq_id] = _State(request.seq_id, Transcript(self._target, self._draft))
        state.transcript.follow(request.tokens)
        ids = state.transcript.ids
        here = self._spare.intact(state.id, state.pages) * self._pool.page_size
        most = max(0, min(len(ids) - 1, len(state.ran), here))  # one token must run, or there would be no logits
        fixed = min(most, state.transcript.fixed)
        first = fixed if ids[:fixed] == state.ran[:fixed] else 0
        common = next((i for i in range(first, most) if ids[i] != state.ran[i]), most)
        del state.ran[common:]
        return state

    def _catch_up(self, grown: list[_Growth]) -> list[_Growth]:
        """Run what is missing, a long prompt in parts; those that are complete have their first token then."""
        running, spans = [], []
        for g in grown:
            state, ids = g.state, g.state.transcript.ids
            entries = len(ids) + g.rounds
            if not ids or entries > self.max_context:
                continue
            if not self._spare.extend(state.id, state.pages, self._pool.pages_for(entries)):
                continue
            new = ids[len(state.ran) : len(state.ran) + MAX_CATCH_UP_TOKENS]
            complete = len(state.ran) + len(new) == len(ids)
            span = Span(new, len(state.ran), state.pages, [len(new) - 1] if complete else ())
            if complete:
                running.append(g)
                spans.append(span)
            else:
                self._runner.forward([span])
                state.ran += new
        if spans:
            self._run(running, spans)
        return running

    # -- growing -------------------------------------------------------------------------------------------------------

    def _goes_on(self, g: _Growth) -> bool:
        if g.over or len(g.drafted) >= g.rounds or len(g.tokens) >= g.request.max_depth:
            return False
        return g.request.keep_drafting is None or g.request.keep_drafting(g.path, max(1, len(g.tokens)))

    def _run(self, growing: list[_Growth], spans: list[Span]) -> None:
        """One forward, and the likeliest next tokens of each."""
        logits = self._runner.forward(spans).logits
        heat = [1.0 if g.request.context.params.greedy else g.request.context.params.temperature for g in growing]
        probs = torch.softmax(logits / torch.tensor(heat, device=logits.device)[:, None], -1)
        top = probs.topk(CHOICES, -1)
        for g, span, tokens, probs in zip(growing, spans, top.indices.tolist(), top.values.tolist(), strict=True):
            g.state.ran += span.ids
            found = [(len(g.drafted), token, min(1.0, p)) for token, p in zip(tokens, probs, strict=True)]
            self._take(g, tokens[0], found[0][2])
            g.others += [other for other in found[0 if g.over else 1 :] if other[2] >= LEAST]

    def _take(self, g: _Growth, token: int, prob: float) -> None:
        """Draft on with the likeliest token, unless it ends the answer or cannot follow."""
        part = self._bytes(token)
        if not part or not self._fits(g, g.text + part):
            g.over = True
            return
        g.drafted.append(token)
        g.text += part
        g.parts.append((len(part), prob))
        g.path *= prob
        g.tokens = self._cut(g, g.text)

    def _bytes(self, token: int) -> bytes:
        """Of a token that is text; b"" for one that ends the answer or stands for nothing."""
        return b"" if token in self._ends else self._draft.token_bytes(token)

    @staticmethod
    def _fits(g: _Growth, text: bytes) -> bool:
        """Whether a text can be the rest of a character that the target has begun."""
        rest = g.state.transcript.rest
        return text[: len(rest)] == rest[: len(text)]

    def _cut(self, g: _Growth, text: bytes) -> list[int]:
        """Drafted text as tokens of the target that continue the sequence."""
        new = whole_characters(text)[len(g.state.transcript.rest) :]
        return retokenise(self._target, g.request.tokens, new) if new else []

    # -- the draft -----------------------------------------------------------------------------------------------------

    def _finished(self, g: _Growth) -> Draft:
        """The target's tokens with their share of the probabilities, and a token for each other way to go on."""
        most = g.request.max_nodes
        chain = g.tokens[:most]
        draft = Draft.chain(chain, self._probs(g, g.parts, chain), self.name)
        known = set(zip(draft.parents, draft.tokens, strict=True))
        for place, token, prob in g.others:
            tokens, probs = self._other(g, place, token, prob)
            same = next((i for i, (a, b) in enumerate(zip(tokens, chain, strict=False)) if a != b), len(chain))
            if same >= len(tokens) or same > len(chain) or (same - 1, tokens[same]) in known or len(draft) >= most:
                continue
            known.add((same - 1, tokens[same]))
            draft.add(tokens[same], same - 1, probs[same], self.name)
        return draft

    def _other(self, g: _Growth, place: int, token: int, prob: float) -> tuple[list[int], list[float]]:
        """The target's tokens where this one of the draft's follows the first `place`, and their probabilities."""
        parts = g.parts[:place]
        text, part = g.text[: sum(length for length, _ in parts)], self._bytes(token)
        if not self._fits(g, text + part):
            return [], []
        parts = [*parts, (len(part), prob)] if part else parts
        tokens = self._cut(g, text + part)
        probs = self._probs(g, parts, tokens)
        end = None if part else counterpart(token, self._draft, self._target)
        if end is not None and self._length(tokens) + len(g.state.transcript.rest) == len(text):
            return [*tokens, end], [*probs, prob]
        return tokens, probs

    def _probs(self, g: _Growth, parts: list[tuple[int, float]], tokens: list[int]) -> list[float]:
        lengths = [len(self._target.token_bytes(token)) for token in tokens]
        return shares(parts, [len(g.state.transcript.rest), *lengths])[1:] if tokens else []

    def _length(self, tokens: list[int]) -> int:
        return sum(len(self._target.token_bytes(token)) for token in tokens)
