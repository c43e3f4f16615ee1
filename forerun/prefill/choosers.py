"""Which tokens of a prompt the target recomputes: choosers give every token a score, `select` takes the best.

A score is how much the tail of the prompt attends to a token (`TailAttention`, collected while a model reads the tail,
averaged over layers and heads, attention sinks left in), or a stand-in for that. What the tail repeats is added to it
(copy matching): a question about a text quotes it, an answer that copies continues where the quote ends, and drafted
K/V is at its worst just there, as induction heads match tokens exactly and a draft blurs what they match.

Knows no budget and no source: scores that a source measures while it reads come from its own `scores`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import slots_of
from forerun.core.batch import send
from forerun.errors import BadRequest
from forerun.models.execution.runner import Runner, Span
from forerun.params import PREFILL_CHOOSERS
from forerun.prefill.recompute import RaggedDepthPass, Rows
from forerun.prefill.state import PrefillState

if TYPE_CHECKING:
    from forerun.prefill.sources import KVSource

COMPARED_TOKENS = 16  # last ones of the tail: two rounds are compared by their distributions
Chooser = Callable[[PrefillState, "KVSource", Runner], "np.ndarray | None"]  # scores [len(state.tokens)], if any


def by_source(state: PrefillState, source: KVSource, runner: Runner) -> np.ndarray | None:
    """What the source measured while reading: draft attention, attention of lower layers, deviation of copied K/V."""
    return source.scores(state)


def by_tail(state: PrefillState, source: KVSource, runner: Runner) -> np.ndarray:
    """What the tail repeats, then what the target's own tail attends to over the drafted K/V."""
    repeated = copy_scores(state.ids, state.end)  # first, while a device may still be reading the prompt
    state.attention = tail_attention(runner, state, source.base)
    return state.attention + repeated


def by_start(state: PrefillState, source: KVSource, runner: Runner) -> np.ndarray:
    """First tokens first: of each span that was copied from elsewhere, else of the prompt."""
    copied = source.scores(state) if source.name == "chunk" else None
    return -np.arange(len(state.tokens), dtype=np.float64) if copied is None else copied


def at_random(state: PrefillState, source: KVSource, runner: Runner) -> np.ndarray:
    """The baseline: the same for every prompt of a length."""
    return np.random.default_rng(len(state.tokens)).random(len(state.tokens))


# Beside these there is `cross`: scores of a draft model of another tokenizer (`cross_scores.py`)
CHOOSERS: dict[str, Chooser] = {
    "draft": by_source,
    "lower": by_source,
    "deviation": by_source,
    "tail": by_tail,
    "start": by_start,
    "random": at_random,
}
OFFERED_BY = {"draft": ("draft",), "lower": ("self",), "deviation": ("chunk",)}  # others go with any source


def chooser_for(asked: str) -> str:
    """`auto`: the attention of the target's own tail is the best predictor."""
    return "tail" if asked == "auto" else asked


def chooser_problem(name: str, source: str, has_cross: bool) -> BadRequest | None:
    """Why a chooser does not go with a source, if that is so."""
    if name not in PREFILL_CHOOSERS:
        return BadRequest(f"the chooser of prefill is {name!r}", f"use one of {', '.join(PREFILL_CHOOSERS)}")
    if name == "cross" and not has_cross:
        hint = "open the model with such a draft, or use chooser=auto"
        return BadRequest("the chooser 'cross' needs a draft model of another tokenizer, and none is open", hint)
    if source not in OFFERED_BY.get(name, (source,)):
        offered = " or ".join(OFFERED_BY[name])
        return BadRequest(f"the chooser {name!r} goes with the source {offered}, not {source}", "use chooser=auto")
    return None


def select(scores: np.ndarray, candidates: np.ndarray, count: int) -> np.ndarray:
    """The `count` candidates with the best scores, in their order, which is by position; of equals the first ones."""
    count = min(count, len(candidates))
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    first, last = candidates[0], candidates[-1]
    mine = scores[first : last + 1] if last - first == len(candidates) - 1 else scores[candidates]
    return candidates[top_mask(mine, count)].astype(np.int64)


def tail_rows(state: PrefillState, base: int, want: int = 0) -> Rows:
    """The tail through all layers, or from `base` on where the source has run it through those below; `want`: of so
    many of its last tokens logits."""
    entries, x = np.arange(state.end, len(state.tokens)), None
    if state.x is not None and state.x.shape[0] == len(state.tokens) - state.first:
        x = state.x[state.end - state.first :]
    wanted, depths = range(max(0, len(entries) - want), len(entries)), np.full(len(entries), state.layers)
    return Rows(state.ids[state.end :], entries, state.pages, depths, wanted, x=x, first=0 if x is None else base)


def tail_attention(runner: Runner, state: PrefillState, base: int) -> np.ndarray:
    """[len(state.tokens)] attention of the tail's rows over what lies in the prompt's pages, mean over heads and the
    layers they run.

    The last layer is left out: rows without logits leave the pass before they attend there. A device with a recorded
    pass and sums does both at once, in all layers. Where rounds are compared by the tail, its logits are kept; else
    what it attends to is all that counts, and attention may be computed as for drafts.
    """
    seen = runner.tail_attention(Span(state.ids[state.end :].tolist(), state.end, state.pages, ()))
    if seen is not None:
        return seen
    compared, decoder = COMPARED_TOKENS if state.compares_tail else 0, runner.decoder
    if not compared:
        decoder = replace(decoder, attention=decoder.attention.for_drafts())
    tail_attention = TailAttention(runner, state.pages, state.end, len(state.tokens))
    sums: list[Tensor] = []  # of layers that the device weighs at once: [len(state.tokens)] each

    def watch(layer: int, x: Tensor, q: Tensor | None, a: Tensor | None) -> None:
        if q is None or q.shape[0] != len(state.tokens) - state.end:
            return
        given = decoder.attention.entry_weights(q, layer, runner.kv[layer])
        if given is None:
            tail_attention.add(layer, q, state.end)
        else:
            sums.append(given / (q.shape[0] * q.shape[1]))

    out = RaggedDepthPass(runner, decoder).run(tail_rows(state, base, compared), watch)
    if compared:
        state.tail_logits = out.logits.clone()
    return torch.stack(sums).mean(0).numpy() if sums else tail_attention.reduce()


def warm_up(runner: Runner, tail: int) -> None:
    """Have a device compile and capture the pass that the first prompt's tail would otherwise wait for; needs pages for
    that tail."""
    pool = runner.pool
    if runner.graphs is None or pool.pages_for(tail) > pool.free:
        return
    with pool.borrow(tail) as pages:
        runner.tail_attention(Span([0] * tail, 0, pages, ()))


# Attention weights computed at a time: all those of a long prompt would be large, and on a CPU what leaves its caches
# takes twice as long (27 layers of 12 heads, 64 x 2,048: 250 to 125 ms)
MAX_WEIGHTS, MAX_CPU_WEIGHTS = 1 << 25, 1 << 19


class TailAttention:
    """Attention of the queries at entries `tail`, ... over all entries of a sequence of `tokens`."""

    def __init__(self, runner: Runner, pages: array[int], tail: int, tokens: int) -> None:
        self._config, self._kv = runner.decoder.config, runner.kv
        self.tail, self.tokens = tail, tokens
        slots = slots_of(pages, 0, tokens, runner.pool.page_size)
        together = bool((np.diff(slots) == 1).all())
        self._start = int(slots[0]) if together else None  # pages side by side are read in place
        self._slots = send(slots, runner.decoder.device)
        self._sum = torch.zeros(tokens - tail, tokens, device=runner.decoder.device)  # [Q, tokens]
        self._layers: set[int] = set()
        self._added: set[int] = set()  # entries whose queries were added
        self._mask: tuple[tuple[int, int, int, int | None], Tensor] | None = None

    def add(self, layer: int, q: Tensor, first: int) -> None:
        """Rotated queries [Q, Hq, D] of entries first, first + 1, ... whose K is in the cache already."""
        count, end, window = q.shape[0], first + q.shape[0], self._config.windows[layer]
        lo = 0 if window is None else max(0, first + 1 - window)
        keys = self._keys(layer, lo, end)  # [E, Hkv, D]
        group = q.shape[1] // keys.shape[1]
        rows = q.view(count, -1, group, q.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, group * Q, D]
        rows, hidden = rows * self._config.scale, self._hidden(first, end, lo, window)
        total = self._sum[first - self.tail : end - self.tail, lo:end]
        most = MAX_CPU_WEIGHTS if total.device.type == "cpu" else MAX_WEIGHTS
        together = max(1, most // (rows.shape[1] * (end - lo)))
        for head in range(0, keys.shape[1], together):
            some = keys[:, head : head + together].permute(1, 2, 0)  # [heads, D, E]
            scores = torch.matmul(rows[head : head + together], some.to(rows.dtype)).view(-1, count, end - lo).float()
            scores += hidden
            total.add_(torch.softmax(scores, -1).sum(0), alpha=1.0 / q.shape[1])
        self._layers.add(layer)
        self._added.update(range(first, end))

    def _keys(self, layer: int, lo: int, end: int) -> Tensor:
        cache = self._kv[layer][0]
        if self._start is not None:
            return cache[self._start + lo : self._start + end]
        return cache.index_select(0, self._slots[lo:end])

    def _hidden(self, first: int, end: int, lo: int, window: int | None) -> Tensor:
        """[Q, E], to be added to scores: minus infinity where a query may not attend. The same for most layers."""
        asked = (first, end, lo, window)
        if self._mask is None or self._mask[0] != asked:
            entry = torch.arange(lo, end, device=self._sum.device)
            own = torch.arange(first, end, device=self._sum.device)[:, None]
            masked = entry > own if window is None else (entry > own) | (entry <= own - window)
            mask = torch.zeros(masked.shape, device=self._sum.device).masked_fill_(masked, float("-inf"))
            self._mask = asked, mask
        return self._mask[1]

    @property
    def complete(self) -> bool:
        return len(self._added) == self.tokens - self.tail > 0

    def weights(self) -> Tensor:
        """[Q, tokens] mean over layers and heads: each row sums to one."""
        return self._sum / max(1, len(self._layers))

    def reduce(self) -> np.ndarray:
        """[tokens] float32: mean over the queries."""
        return self.weights().mean(0).cpu().numpy()


NGRAM_TOKENS = 3  # tokens that must be the same
MAX_MATCHES = 8  # of one n-gram: one that is found more often points nowhere
SPAN_TOKENS = 24  # marked from the last token of a match on
CONTINUATION_TOKENS = 160  # marked after the place that matches the end of the prompt: an answer may continue there
MIN_SUFFIX_TOKENS = 4  # that such a place must share with the prompt's end
MAX_SUFFIX_TOKENS = 64  # compared to find the best such place
MAX_SUFFIX_PLACES = 512  # the latest ones
MAX_MARKED_SHARE = 0.1  # of the prompt


def copy_scores(tokens: Sequence[int] | np.ndarray, end: int) -> np.ndarray:
    """[len(tokens)] how many matches of the entries from `end` on mark each entry before it; most are 0."""
    ids = np.asarray(tokens, dtype=np.int64)
    marks = np.zeros(len(ids))
    if end < NGRAM_TOKENS or len(ids) - end < NGRAM_TOKENS:
        return marks
    found, which = _ngram_matches(ids, end)  # starts of what the tail repeats
    found = found[np.bincount(which)[which] <= MAX_MATCHES] if len(found) else found
    steps = np.zeros(len(ids) + 1)
    steps[found] += 1.0
    np.subtract.at(steps, np.minimum(found + NGRAM_TOKENS - 1 + SPAN_TOKENS, end), 1.0)
    marks += np.cumsum(steps)[:-1]
    last = _suffix_match(ids, end)
    if last is not None:
        marks[last + 1 : min(last + 1 + CONTINUATION_TOKENS, end)] += len(ids)  # before all others
    return _strongest(marks, max(1, int(MAX_MARKED_SHARE * end)))


def _ngram_matches(ids: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts of the n-grams before `end` that come again after it, and which n-gram each is."""
    asked = np.lib.stride_tricks.sliding_window_view(ids[end - NGRAM_TOKENS + 1 :], NGRAM_TOKENS)
    found, words = np.arange(end - NGRAM_TOKENS + 1), ids[: end - NGRAM_TOKENS + 1]
    vocab = int(ids.max()) + 1
    for i in range(NGRAM_TOKENS):  # token by token: a table lookup costs much less than comparing all of them
        wanted = np.zeros(vocab, dtype=bool)
        wanted[asked[:, i]] = True
        found = found[wanted[words if i == 0 else ids[found + i]]]
    grams = np.unique(_packed(asked.T))
    text = _packed([ids[found + i] for i in range(NGRAM_TOKENS)])
    which = np.searchsorted(grams, text).clip(max=len(grams) - 1)
    same = grams[which] == text
    return found[same], which[same]


def _packed(words: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """[starts] one number for each n-gram; token ids are below 2 ** 21."""
    return np.bitwise_or.reduce([word << (21 * i) for i, word in enumerate(words)])


def _suffix_match(ids: np.ndarray, end: int) -> int | None:
    """Where the tokens that end the prompt are found before `end`, by their last one: the longest such place, of equals
    the latest."""
    found, length = np.flatnonzero(ids[:end] == ids[-1])[-MAX_SUFFIX_PLACES:], 1
    while length < MAX_SUFFIX_TOKENS:
        longer = found[found >= length]
        longer = longer[ids[longer - length] == ids[-1 - length]]
        if not len(longer):
            break
        found, length = longer, length + 1
    return int(found[-1]) if length >= MIN_SUFFIX_TOKENS else None


def top_mask(values: np.ndarray, count: int) -> np.ndarray:
    """[len(values)] which are the `count` largest, of equals the first ones; NaN comes last."""
    taken = np.zeros(len(values), dtype=bool)
    if count <= 0 or count >= len(values):
        taken[:] = count > 0
        return taken
    least = np.partition(-values, count - 1)[count - 1]  # sorting all of them would take ten times as long
    if np.isnan(least):
        taken[np.argsort(-values, kind="stable")[:count]] = True
        return taken
    np.greater(values, -least, out=taken)
    taken[np.flatnonzero(values == -least)[: count - np.count_nonzero(taken)]] = True
    return taken


def _strongest(marks: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of them, of equals the first ones."""
    return marks if np.count_nonzero(marks) <= count else np.where(top_mask(marks, count), marks, 0.0)
