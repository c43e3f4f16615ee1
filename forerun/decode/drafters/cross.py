"""A draft model of another tokenizer: it continues the text in its own tokens, which are cut into the target's.

What it proposes is a plain guess at tokens, so any verifier stays lossless whatever the two vocabularies are. Its K/V
lies on pages that are free (`spare`), because the same text has another number of tokens here. Knows no verifier and no
target; text between the tokenizers is `retoken`'s.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core import Draft
from forerun.decode.drafters.base import Ask, Drafter, register
from forerun.decode.drafters.retoken import Transcript, counterpart, retokenise, shares, whole_characters
from forerun.decode.drafters.spare import SparePages
from forerun.decode.workshop import Workshop
from forerun.errors import BadRequest
from forerun.models.runner import Span

CATCH_UP = 512  # tokens of a prompt that are prefilled in one step at most, so that others do not wait for all of it
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

    ask: Ask
    state: _State
    rounds: int
    drafted: list[int] = field(default_factory=list)
    text: bytes = b""  # of all of `drafted`
    parts: list[tuple[int, float]] = field(default_factory=list)  # bytes and chance of each
    path: float = 1.0
    tokens: list[int] = field(default_factory=list)  # of the target
    end: tuple[int, float] | None = None  # the target's token for the end of the answer, where the draft ends it
    over: bool = False


@register
class CrossDrafter(Drafter):
    name = "cross"
    free = False

    def __init__(self, workshop: Workshop) -> None:
        draft, runner = workshop.draft, workshop.draft_runner
        assert draft is not None and runner is not None
        assert workshop.tokenizer is not None and draft.tokenizer is not None
        self._runner, self._pool = runner, workshop.pool
        self._target, self._draft = workshop.tokenizer, draft.tokenizer
        self._ends = {*draft.decoder.config.eos_ids, *draft.tokenizer.eos_ids, *draft.tokenizer.special_ids}
        self._limit = min(workshop.max_context, draft.decoder.config.max_context)
        self._spare = SparePages(workshop.pool, next(p for p in workshop.pool.planes if p.kv is runner.kv))
        self._states: dict[int, _State] = {}

    @classmethod
    def problem(cls, workshop: Workshop) -> BadRequest | None:
        if workshop.draft is None:
            return BadRequest(f"the drafter {cls.name!r} needs a draft model", "open the model with draft=...")
        if workshop.draft.same_tokens:
            return BadRequest(
                f"the tokens of {workshop.draft.source} are the target's own, there is nothing to translate",
                "use the drafter `model`",
            )
        if workshop.tokenizer is None or workshop.draft.tokenizer is None:
            missing = "the target" if workshop.tokenizer is None else workshop.draft.source
            return BadRequest(f"the drafter {cls.name!r} goes through the text, and {missing} has no tokenizer")
        return None

    # -- the contract --------------------------------------------------------------------------------------------------

    def propose(self, asks: list[Ask]) -> list[Draft]:
        grown = [_Growth(ask, self._state(ask), ask.depth + EXTRA) for ask in asks]
        ready = self._catch_up(grown)
        while ready := [g for g in ready if self._goes_on(g)]:
            self._run(ready, [Span(g.drafted[-1:], len(g.state.ran), g.state.pages, (0,)) for g in ready])
        return [self._finished(g) for g in grown]

    def behind(self, ask: Ask) -> int:
        state = self._state(ask)
        return len(state.transcript.ids) - len(state.ran)

    def time_round(self, tokens: int, context: int) -> float:
        return self._runner.time_forward(tokens, context, repeats=2)

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._spare.drop(state.id, state.pages)

    # -- catching up with the target -----------------------------------------------------------------------------------

    def _state(self, ask: Ask) -> _State:
        """What the draft model has of the text as it is now: drafts that came true stay."""
        state = self._states.get(ask.id)
        if state is None:
            state = self._states[ask.id] = _State(ask.id, Transcript(self._target, self._draft))
        state.transcript.follow(ask.tokens)
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
            if not ids or entries > self._limit:
                continue
            if not self._spare.extend(state.id, state.pages, self._pool.pages_for(entries)):
                continue
            new = ids[len(state.ran) : len(state.ran) + CATCH_UP]
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
        if g.over or len(g.drafted) >= g.rounds or len(g.tokens) >= g.ask.depth:
            return False
        return g.ask.worth is None or g.ask.worth(g.path, max(1, len(g.tokens)))

    def _run(self, growing: list[_Growth], spans: list[Span]) -> None:
        """One forward, and the likeliest next token of each."""
        logits = self._runner.forward(spans).logits
        heat = [1.0 if g.ask.context.params.greedy else g.ask.context.params.temperature for g in growing]
        scaled = logits / torch.tensor(heat, device=logits.device)[:, None]
        tokens, chances = _likeliest(scaled)
        for g, span, token, chance in zip(growing, spans, tokens, chances, strict=True):
            g.state.ran += span.ids
            self._take(g, token, chance)

    def _take(self, g: _Growth, token: int, chance: float) -> None:
        part = b"" if token in self._ends else self._draft.token_bytes(token)
        if not part:
            other = counterpart(token, self._draft, self._target)
            g.end, g.over = None if other is None else (other, chance), True
            return
        g.drafted.append(token)
        g.text += part
        g.parts.append((len(part), chance))
        g.path *= chance
        rest = g.state.transcript.rest
        if g.text[: len(rest)] != rest[: len(g.text)]:  # another character than the one that has begun
            g.tokens, g.over = [], True
            return
        new = whole_characters(g.text)[len(rest) :]
        g.tokens = retokenise(self._target, g.ask.tokens, new) if new else []

    def _finished(self, g: _Growth) -> Draft:
        """The target's tokens with their share of the chances."""
        rest = g.state.transcript.rest
        lengths = [len(rest), *(len(self._target.token_bytes(token)) for token in g.tokens)]
        chances = shares(g.parts, lengths)[1:] if g.tokens else []
        tokens = list(g.tokens)
        if g.end is not None and sum(lengths) == len(g.text) and g.end[0] < self._target.vocab_size:
            tokens.append(g.end[0])
            chances.append(g.end[1])
        most = g.ask.nodes
        return Draft.chain(tokens[:most], chances[:most], self.name)


def _likeliest(logits: Tensor) -> tuple[list[int], list[float]]:
    """The likeliest token of each row and its probability."""
    values, tokens = logits.max(-1)
    return tokens.tolist(), (values - logits.logsumexp(-1)).exp().clamp_max_(1.0).tolist()
