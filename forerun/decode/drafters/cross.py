"""A draft model with another tokenizer: it continues the text in its own tokens, which are retokenized to the target's.

The result is a deterministic draft, so any verifier stays lossless whatever the two vocabularies are. Its K/V lies on
free pages (`spare`), because the same text has another number of tokens here. Knows no verifier and no target;
`retoken` translates between the tokenizers.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

import torch

from forerun.core import Draft
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import MAX_CATCH_UP_TOKENS, Drafter, DraftRequest, DraftRound, register
from forerun.decode.drafters.retoken import Transcript, counterpart, retokenise, split_probs, whole_characters
from forerun.decode.drafters.spare import SparePages
from forerun.errors import BadRequest
from forerun.models.execution.runner import Span

TOP_TOKENS = 3  # of each round: the first is drafted on, the others become side branches of one token
MIN_SIDE_PROB = 0.05  # of a side branch: less probable ones are left out
EXTRA_ROUNDS = 4  # beyond the requested depth, as one token of the target may take several of the draft model's


@dataclass
class _State:
    """What the draft model has computed of one sequence."""

    id: int
    transcript: Transcript
    pages: array[int] = field(default_factory=lambda: array("i"))
    ran: list[int] = field(default_factory=list)  # tokens whose K/V lies in the entries 0, 1, ...


@dataclass
class _CrossDraft:
    """A draft while it grows: a chain of the draft model's tokens, and the same text in the target's tokens."""

    request: DraftRequest
    state: _State
    rounds: int  # at most
    drafted: list[int] = field(default_factory=list)
    text: bytes = b""  # of all of `drafted`
    parts: list[tuple[int, float]] = field(default_factory=list)  # bytes and probability of each
    path: float = 1.0
    tokens: list[int] = field(default_factory=list)  # of the target
    others: list[tuple[int, int, float]] = field(default_factory=list)  # (drafted tokens before it, token, probability)
    ended: bool = False


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
        if ctx.draft is not None and ctx.draft.same_tokens:
            problem = f"the tokens of {ctx.draft.source} are the target's own, there is nothing to translate"
            return BadRequest(problem, "use the drafter `model`")
        return ctx.draft_problem(f"the drafter {cls.name!r}", through_text=True)

    # -- the contract --------------------------------------------------------------------------------------------------

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        chains = [_CrossDraft(request, self._state(request), request.max_depth + EXTRA_ROUNDS) for request in requests]
        ready = self._catch_up(chains)
        self.rounds = []
        while ready := [chain for chain in ready if self._should_continue(chain)]:
            start = time.perf_counter()
            spans = [Span(chain.drafted[-1:], len(chain.state.ran), chain.state.pages, (0,)) for chain in ready]
            self._run(ready, spans)
            self.rounds.append(DraftRound(len(ready), len(ready), time.perf_counter() - start))
        return [self._finished(chain) for chain in chains]

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
        """What the draft model has computed of the text as it is now; accepted drafts stay."""
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

    def _catch_up(self, chains: list[_CrossDraft]) -> list[_CrossDraft]:
        """Run what is missing, a long prompt in parts; returns the chains that are complete, with their first token."""
        running, spans = [], []
        for chain in chains:
            state, ids = chain.state, chain.state.transcript.ids
            entries = len(ids) + chain.rounds
            if not ids or entries > self.max_context:
                continue
            if not self._spare.extend(state.id, state.pages, self._pool.pages_for(entries)):
                continue
            new = ids[len(state.ran) : len(state.ran) + MAX_CATCH_UP_TOKENS]
            complete = len(state.ran) + len(new) == len(ids)
            span = Span(new, len(state.ran), state.pages, [len(new) - 1] if complete else ())
            if complete:
                running.append(chain)
                spans.append(span)
            else:
                self._runner.forward([span])
                state.ran += new
        if spans:
            self._run(running, spans)
        return running

    # -- growing -------------------------------------------------------------------------------------------------------

    def _should_continue(self, chain: _CrossDraft) -> bool:
        if chain.ended or len(chain.drafted) >= chain.rounds or len(chain.tokens) >= chain.request.max_depth:
            return False
        return chain.request.keep_drafting is None or chain.request.keep_drafting(chain.path, max(1, len(chain.tokens)))

    def _run(self, running: list[_CrossDraft], spans: list[Span]) -> None:
        """One forward, and the most probable next tokens of each."""
        logits = self._runner.forward(spans).logits
        params = [chain.request.context.params for chain in running]
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        probs = torch.softmax(logits / torch.tensor(temperatures, device=logits.device)[:, None], -1)
        top = probs.topk(TOP_TOKENS, -1)
        for chain, span, tokens, probs in zip(running, spans, top.indices.tolist(), top.values.tolist(), strict=True):
            chain.state.ran += span.ids
            found = [(len(chain.drafted), token, min(1.0, p)) for token, p in zip(tokens, probs, strict=True)]
            self._extend(chain, tokens[0], found[0][2])
            chain.others += [other for other in found[0 if chain.ended else 1 :] if other[2] >= MIN_SIDE_PROB]

    def _extend(self, chain: _CrossDraft, token: int, prob: float) -> None:
        """Append the most probable token, unless it ends the answer or contradicts the target's last bytes."""
        part = self._bytes(token)
        if not part or not self._fits(chain, chain.text + part):
            chain.ended = True
            return
        chain.drafted.append(token)
        chain.text += part
        chain.parts.append((len(part), prob))
        chain.path *= prob
        chain.tokens = self._cut(chain, chain.text)

    def _bytes(self, token: int) -> bytes:
        """Of a token that is text; b"" for one that ends the answer or has none."""
        return b"" if token in self._ends else self._draft.token_bytes(token)

    @staticmethod
    def _fits(chain: _CrossDraft, text: bytes) -> bool:
        """Whether a text can continue a character of which the target has written the first bytes."""
        rest = chain.state.transcript.rest
        return text[: len(rest)] == rest[: len(text)]

    def _cut(self, chain: _CrossDraft, text: bytes) -> list[int]:
        """Drafted text as tokens of the target that continue the sequence."""
        new = whole_characters(text)[len(chain.state.transcript.rest) :]
        return retokenise(self._target, chain.request.tokens, new) if new else []

    # -- the draft -----------------------------------------------------------------------------------------------------

    def _finished(self, chain: _CrossDraft) -> Draft:
        """The target's tokens with their part of the probabilities, and one token for each side branch."""
        limit = chain.request.max_nodes
        path = chain.tokens[:limit]
        draft = Draft.chain(path, self._probs(chain, chain.parts, path), self.name)
        known = set(zip(draft.parents, draft.tokens, strict=True))
        for place, token, prob in chain.others:
            tokens, probs = self._other(chain, place, token, prob)
            same = next((i for i, (a, b) in enumerate(zip(tokens, path, strict=False)) if a != b), len(path))
            if same >= len(tokens) or same > len(path) or (same - 1, tokens[same]) in known or len(draft) >= limit:
                continue
            known.add((same - 1, tokens[same]))
            draft.add(tokens[same], same - 1, probs[same], self.name)
        return draft

    def _other(self, chain: _CrossDraft, place: int, token: int, prob: float) -> tuple[list[int], list[float]]:
        """The target's tokens where this token of the draft model follows its first `place`; their probabilities."""
        parts = chain.parts[:place]
        text, part = chain.text[: sum(length for length, _ in parts)], self._bytes(token)
        if not self._fits(chain, text + part):
            return [], []
        parts = [*parts, (len(part), prob)] if part else parts
        tokens = self._cut(chain, text + part)
        probs = self._probs(chain, parts, tokens)
        end = None if part else counterpart(token, self._draft, self._target)
        if end is not None and self._length(tokens) + len(chain.state.transcript.rest) == len(text):
            return [*tokens, end], [*probs, prob]
        return tokens, probs

    def _probs(self, chain: _CrossDraft, parts: list[tuple[int, float]], tokens: list[int]) -> list[float]:
        lengths = [len(self._target.token_bytes(token)) for token in tokens]
        return split_probs(parts, [len(chain.state.transcript.rest), *lengths])[1:] if tokens else []

    def _length(self, tokens: list[int]) -> int:
        return sum(len(self._target.token_bytes(token)) for token in tokens)
