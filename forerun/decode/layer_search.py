"""Which blocks of a model are enough to draft its own next token: a short search, once per model, its result on disk.

Candidates are scored on the model's own greedy answers to shipped prompts: how often the argmax of the remaining blocks
is the full model's. As when drafting, everything before a token has exact K/V, so one forward scores a candidate. Knows
decoders and texts; not how drafts grow or are verified. Blocks are numbered as in `Decoder`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.core import KV, HostBatch, TokenBatch
from forerun.core.progress import track
from forerun.data import read_prompts
from forerun.models.attention import AttentionBackend
from forerun.models.decoder import Decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.fetch.store import home, write_whole
from forerun.models.linear import Linear, Norm
from forerun.text.tokenizer import Tokenizer

VERSION = 1  # of the search: results of an older one are not used
NUM_PROMPTS, MAX_PROMPT_TOKENS, ANSWER_TOKENS = 8, 64, 24
NESTED_CANDIDATES, EXIT_CANDIDATES, MUTATIONS = 4, 4, 16  # candidates of each kind
GAPS = tuple((size, start) for size in (0.3, 0.45, 0.6) for start in (0.15, 0.25, 0.35, 0.5, 0.7))  # layers left out
VERIFY_TOKEN_SHARE = 0.05  # of a forward: what one more token in a verification costs
MAX_DEPTH = 8  # of the drafts that a candidate is scored for
MAX_COST_SHARE = 0.75  # of a forward: above it no agreement can pay


@dataclass(frozen=True)
class BlockSelection:
    """Blocks to run, and the share of tokens on which they alone agreed with the whole model."""

    blocks: tuple[int, ...]
    agreement: float


def find_blocks(runner: Runner, tokenizer: Tokenizer, max_context: int) -> BlockSelection:
    """The stored result for this very model, or that of a new search."""
    path = home() / "layers" / f"{_checksum(runner.decoder)}.json"
    found = _read(path, 2 * runner.decoder.config.num_layers)
    if found is None:
        found = search(GreedyReplay(runner, tokenizer, max_context), runner.decoder)
        _write(path, found)
    return found


def search(replay: GreedyReplay, decoder: Decoder, quiet: bool = False) -> BlockSelection:
    """The best of a few families of candidates, then of small changes to the best so far."""
    costs = block_costs(decoder)
    best, best_score = BlockSelection((), 0.0), 0.0
    candidates = _candidates(replay.influence(), lambda: best.blocks)
    seen: set[tuple[int, ...]] = set()
    for _ in track(range(NESTED_CANDIDATES + EXIT_CANDIDATES + len(GAPS) + MUTATIONS), "finding layers to skip", quiet):
        blocks = next(candidates)
        cost = sum(costs[b] for b in blocks) + costs[-1]
        if blocks in seen or cost > MAX_COST_SHARE:
            continue
        seen.add(blocks)
        agreement = replay.agreement(blocks)
        score = speedup(agreement, cost)
        if score > best_score:
            best, best_score = BlockSelection(blocks, agreement), score
    return best


def speedup(agreement: float, cost: float) -> float:
    """Tokens per pass of the target's time at the best depth, where a round costs this share of it.

    Below 1, where no depth pays, the share of its cost that the first round gains: comparing times would then prefer
    the cheapest round, however useless.
    """
    step = VERIFY_TOKEN_SHARE + cost
    if agreement <= step:
        return agreement / step
    best, path, tokens = 0.0, 1.0, 1.0
    for depth in range(1, MAX_DEPTH + 1):
        path *= agreement
        tokens += path
        best = max(best, tokens / (1.0 + depth * step))
    return best


def block_costs(decoder: Decoder) -> list[float]:
    """The share of each block in a forward of one token, the head's last: by bytes of weights, which is what such a
    forward reads, and the same on a busy machine and an idle one."""
    sizes = [sum(m.nbytes for m in part) for w in decoder.layers for part in ((w.qkv, w.o), (w.gate_up, w.down))]
    total = sum(sizes) + decoder.head.nbytes
    return [size / total for size in (*sizes, decoder.head.nbytes)]


def _candidates(influence: list[float], best: Callable[[], tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Fixed families first, then endless mutations of the best so far; the same for the same model."""
    count = len(influence)
    order = sorted(range(count), key=lambda b: influence[b])  # what changes the stream least goes first
    for n in range(NESTED_CANDIDATES):
        dropped = set(order[: (n + 2) * count // (NESTED_CANDIDATES + 3)])
        yield tuple(b for b in range(count) if b not in dropped)
    for n in range(EXIT_CANDIDATES):
        yield tuple(range((n + 2) * count // (EXIT_CANDIDATES + 2) // 2 * 2))
    for share, place in GAPS:  # layers side by side, from a share of the room before them; the last layer stays
        size = int(count * share) // 2 * 2
        start = min(int((count - size) * place) // 2 * 2, count - 2 - size)
        yield tuple(b for b in range(count) if not start <= b < start + size)
    draw = random.Random(0)
    weakest = order[: max(2, count * 3 // 4)]
    while True:
        blocks = set(best())
        for _ in range(draw.randint(1, 3)):
            blocks ^= {draw.choice(weakest)}
        yield tuple(sorted(blocks))


class GreedyReplay:
    """The model's own greedy answers with their K/V, and a decoder that predicts them again with any blocks.

    Its K/V lies outside the engine's pool: the search must not evict the pages of requests.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, max_context: int) -> None:
        self._decoder, self._runner = runner.decoder, runner
        prompts = _prompts(tokenizer, max_context)
        size = runner.pool.page_size
        each = -(-(max(map(len, prompts)) + ANSWER_TOKENS) // size)
        config = self._decoder.config
        self._kv = PagePool(config, each * len(prompts), size, self._decoder.dtype, self._decoder.device).kv
        pages = [array("i", range(i * each, (i + 1) * each)) for i in range(len(prompts))]
        answers = self._answer(prompts, pages)
        self._labels = torch.tensor([token for answer in answers for token in answer])
        spans = [
            Span([prompt[-1], *answer[:-1]], len(prompt) - 1, own, range(len(answer)))
            for prompt, answer, own in zip(prompts, answers, pages, strict=True)
        ]
        host = runner.batch(spans)
        self._batch = host.to(self._decoder.device)
        self._scorer = dataclasses.replace(self._decoder, attention=_ExactBefore(self._decoder, self._kv, host))

    def agreement(self, blocks: tuple[int, ...]) -> float:
        """Share of the answers' tokens that these blocks alone predict, each after the true ones before it."""
        logits = self._scorer.forward(self._batch, self._kv, blocks=blocks).logits
        return float((logits.argmax(-1).cpu() == self._labels).float().mean())

    @torch.inference_mode()
    def influence(self) -> list[float]:
        """How much each block turns the residual stream: one minus the cosine between what enters and what leaves."""
        scorer, found = self._scorer, []
        scorer.attention.plan(self._batch)
        x = scorer.embed(self._batch.tokens)
        for block in range(2 * scorer.config.num_layers):
            y = scorer.run_blocks(x, self._kv, [block])
            found.append(1.0 - float(torch.cosine_similarity(x.float(), y.float(), dim=-1).mean()))
            x = y
        return found

    def _answer(self, prompts: list[list[int]], pages: list[array[int]]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        spans = [Span(p, 0, own, [len(p) - 1]) for p, own in zip(prompts, pages, strict=True)]
        for _ in range(ANSWER_TOKENS):
            batch = self._runner.batch(spans).to(self._decoder.device)
            tokens = self._decoder.forward(batch, self._kv).logits.argmax(-1).tolist()
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
            spans = [Span([a[-1]], s.first + len(s.ids), s.pages, [0]) for a, s in zip(answers, spans, strict=True)]
        return answers


class _ExactBefore(AttentionBackend):
    """Attention in which tokens see the full model's K/V of what is before them, and their own K/V of themselves."""

    def __init__(self, decoder: Decoder, kv: KV, batch: HostBatch) -> None:
        self.config, self.device = decoder.config, decoder.device
        self._inner, self._kv = decoder.attention, kv
        self._own = (torch.zeros_like(kv[0][0]), torch.zeros_like(kv[0][1]))  # any layer's: one runs at a time
        entries = [(s, e) for s, context in enumerate(batch.seq_lens) for e in range(context)]  # [C] all there is
        slots = [int(batch.pages[s][e // batch.page_size]) * batch.page_size + e % batch.page_size for s, e in entries]
        self._slots = torch.tensor(slots, device=self.device)
        owner, entry = torch.tensor(entries).T
        rows = torch.arange(len(batch.seq_lens)).repeat_interleave(torch.tensor(batch.cu_seqlens).diff())  # [T]
        distance = torch.from_numpy(batch.kv_lens).long()[:, None] - 1 - entry  # [T, C] entries back
        self._distance = distance.masked_fill_(rows[:, None] != owner, 0).to(self.device)

    def plan(self, batch: TokenBatch) -> None:
        self._rows = batch.slot_mapping
        self._inner.plan(batch)

    def store(self, qkv: Tensor, layer: int, kv: tuple[Tensor, Tensor], norms: tuple[Norm, Norm] | None) -> Tensor:
        return self._inner.store(qkv, layer, self._own, norms)

    def attend(self, q: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> Tensor:
        c, count = self.config, q.shape[0]
        k, v = (cache[self._slots].float() for cache in self._kv[layer])  # [C, Hkv, D]
        own_k, own_v = (cache[self._rows].float() for cache in self._own)  # [T, Hkv, D]
        heads = q.float().reshape(count, c.num_kv_heads, -1, c.head_dim) * c.scale  # [T, Hkv, group, D]
        window = c.windows[layer]
        visible = (self._distance > 0) & (self._distance < (window or 1 << 30))  # [T, C]
        before = torch.einsum("thgd,chd->thgc", heads, k).masked_fill_(~visible[:, None, None], float("-inf"))
        itself = torch.einsum("thgd,thd->thg", heads, own_k)
        weights = torch.cat((before, itself[..., None]), -1).softmax(-1)
        out = torch.einsum("thgc,chd->thgd", weights[..., :-1], v) + weights[..., -1:] * own_v[:, :, None]
        return out.reshape(count, -1).to(q.dtype)


def _prompts(tokenizer: Tokenizer, max_context: int) -> list[list[int]]:
    """The shortest shipped prompts, in the chat template; long ones are cut at their beginning."""
    texts = sorted((prompt.text for prompt in read_prompts()), key=len)[:NUM_PROMPTS]
    limit = max(1, min(MAX_PROMPT_TOKENS, max_context - ANSWER_TOKENS))
    if tokenizer.has_chat_template:
        ids = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    else:
        ids = [tokenizer.encode(text, add_special=True) for text in texts]
    return [i[-limit:] for i in ids]


# -- on disk -----------------------------------------------------------------------------------------------------------


def _checksum(decoder: Decoder) -> str:
    """Of the configuration, the precision, and some weights of the embedding and of three layers."""
    config = decoder.config
    rows = torch.linspace(0, config.vocab_size - 1, 32).long().to(decoder.device)
    weights = [decoder.embed(rows)]
    for i in sorted({0, config.num_layers // 2, config.num_layers - 1}):
        weights += [_column(linear, decoder) for linear in (decoder.layers[i].qkv, decoder.layers[i].down)]
    digest = hashlib.sha256(f"{VERSION} {config!r} {decoder.dtype} {type(decoder.head).__name__}".encode())
    for weight in weights:
        digest.update(weight.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


@torch.inference_mode()
def _column(linear: Linear, decoder: Decoder) -> Tensor:
    """The middle column of a matrix in whatever form it is stored: a product with one 1 rounds nothing."""
    x = torch.zeros(1, linear.in_features, dtype=decoder.dtype, device=decoder.device)
    x[0, linear.in_features // 2] = 1.0
    return linear(x)


def _read(path: Path, count: int) -> BlockSelection | None:
    """The stored result; None where there is none or it is malformed."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = BlockSelection(tuple(stored["blocks"]), float(stored["agreement"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    fine = all(type(b) is int and 0 <= b < count for b in found.blocks) and sorted(set(found.blocks)) == [*found.blocks]
    return found if fine and 0.0 <= found.agreement <= 1.0 else None


def _write(path: Path, found: BlockSelection) -> None:
    write_whole(path, json.dumps({"blocks": found.blocks, "agreement": found.agreement}))
