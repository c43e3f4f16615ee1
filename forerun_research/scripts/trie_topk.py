"""`llm.topk` over a catalogue of 100,000 items against masked decoding and against exhaustive scoring.

Catalogues: `titles` are product titles put together from words, `numbers` are all five-digit numbers, `codes` are ids
that are no text, three tokens each out of 256. Masked decoding for the k best is beam search in the trie: each level is
one forward over the same tree of tokens, and a row may go on to the children of its node only. Three beams are timed:

- of width k, which is not exact, and does not know whether it is;
- the narrowest (of k times 1, 2, 4, ...) that happens to find the same items: its width is known only afterwards;
- one that proves its items to be the best: the width is doubled until no beginning that was dropped scores above the
  k-th item. It is the masked decoding that returns what `topk` returns, and the one that `topk` is compared with.

`--transformers` times masked decoding as others have it beside: `generate` of transformers with `num_beams` and
`prefix_allowed_tokens_fn`, on the same weights in float32, of width k and doubled until the same items are found
(catalogues whose items have one length; `--dtype float32` has both sides compute the same scores).

`known items` is what no method can undercut: the ten items are given, and one forward over all of their beginnings
scores them. `one answer` is a single greedy answer under the trie's mask through the
engine. Exhaustive scoring runs all inner nodes of the trie for the first prompts (`--exhaustive`, minutes), in parts,
as the pages of one tree do not hold them all.

    python -m forerun_research.scripts.trie_topk --catalogue numbers --exhaustive 2
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun import LLM, Grammar
from forerun.core import ROOT, SamplingParams
from forerun.decode.trie import TokenTrie, open_trie
from forerun.errors import BadRequest
from forerun.models.fetch.store import resolve
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.runtime import answer_tree
from forerun.runtime.answer_tree import AnswerTree
from forerun.runtime.look_ahead import LookAhead
from forerun.sharing import top_items
from forerun_research.bench.peers.hf_model import hf_from_checkpoint

PROMPTS = [
    "For the living room we recommend a",
    "The customer looked for a birthday present and bought a",
    "Best seller in the garden department: the",
    "To write letters on a train you need a",
]
NUMBER_PROMPTS = [
    "Article number",
    "The post code of the town is",
    "He counted the seeds and wrote down",
    "The bill came to a total of EUR",
]
CODES, CODE_TOKENS = 256, 3
MAX_OTHER_BEAM = 320
EXHAUSTIVE_ITEMS = 2000  # of a part: its tree has at most some thousand nodes
WORDS = {
    "colour": "red blue green black white yellow brown grey golden silver purple orange pink dark light",
    "material": "wooden leather cotton steel glass plastic paper silk woollen stone rubber copper ceramic linen bamboo",
    "thing": "chair table lamp sofa shelf carpet mirror clock vase desk bench cushion blanket curtain basket spade "
    "rake wheelbarrow notebook pen pencil diary backpack suitcase mug umbrella scarf coat shirt hat boots doll",
    "purpose": "children adults gardeners travellers writers beginners families cooks sailors teachers winter summer",
}


def titles(count: int) -> list[str]:
    words = {name: text.split() for name, text in WORDS.items()}
    draw, found = random.Random(0), dict[str, None]()
    while len(found) < count:
        colour, material, thing, purpose = (draw.choice(words[name]) for name in WORDS)
        number = draw.choice(["", "", f" no. {draw.randint(1, 99)}"])
        found[f" {colour} {material} {thing} for {purpose}{number}"] = None
    return list(found)


def codes(count: int, vocab_size: int) -> list[list[int]]:
    """Different sequences of `CODE_TOKENS` tokens out of `CODES`."""
    draw, found = random.Random(0), dict[tuple[int, ...], None]()
    tokens = draw.sample(range(1000, vocab_size), CODES)
    while len(found) < count:
        found[tuple(draw.choices(tokens, k=CODE_TOKENS))] = None
    return [list(ids) for ids in found]


def catalogue(llm: LLM, kind: str, count: int) -> tuple[list[list[int]], list[str]]:
    """Prompts as ids, items as ids, names."""
    if kind == "codes":
        items = codes(count, llm.config.vocab_size)
        return items, [" ".join(map(str, ids)) for ids in items]
    names = titles(count) if kind == "titles" else [f" {n:05d}" for n in range(count)]
    return [llm.tokenizer.encode(name) for name in names], names


def score_known(llm: LLM, ids: list[int], trie: TokenTrie, paths: list[list[int]]) -> list[float]:
    """Scores of given items: the prompt, and one forward over the tree of their beginnings."""
    part = TokenTrie.build(paths)
    inner = [node for node in range(1, len(part)) if part.starts[node + 1] > part.starts[node]]
    places, parents = {0: ROOT} | {node: n for n, node in enumerate(inner)}, part.parents()
    with llm.driver.lease() as lease:
        tree = AnswerTree(lease, ids)
        rows = [tree.root_logits]
        if inner:
            rows.append(tree.run([places[int(parents[n])] for n in inner], part.tokens[inner].tolist()))
        logits = torch.cat(rows).float()
        logprobs = (logits - torch.logsumexp(logits, -1, keepdim=True)).cpu()  # [1 + inner, V]
    scores = np.zeros(len(part))
    for node in range(1, len(part)):
        above = int(parents[node])
        scores[node] = scores[above] + float(logprobs[1 + places[above], int(part.tokens[node])])
    ends = np.flatnonzero(part.items >= 0)
    return [float(scores[n]) for n in ends[np.argsort(part.items[ends])]]


def proven_beam(llm: LLM, ids: list[int], trie: TokenTrie, k: int) -> tuple[list[int], int]:
    """The k best items by masked decoding alone, and the width that proved it."""
    width, proven = k, False
    while not proven:
        found = llm.topk(ids, trie, k, beam=width)
        proven = found.proven
        width *= 2
    return [ranked.item for ranked in found.items], width // 2


def transformers_beams(
    model: Any, ids: list[int], trie: TokenTrie, ours: list[int], seconds: float, spent: int
) -> None:
    """`generate` with beams of k, 2 k and so on, until it returns the items of `topk`, which took `seconds`."""
    known: dict[tuple[int, ...], int] = {(): 0}  # beginnings -> nodes
    k, length = len(ours), len(trie.path(int(np.flatnonzero(trie.items >= 0)[0])))

    def node_of(tokens: list[int]) -> int:
        key = tuple(tokens)
        if key not in known:
            known[key] = trie.child(node_of(tokens[:-1]), tokens[-1]) or 0
        return known[key]

    def allowed(batch: int, sent: torch.Tensor) -> list[int]:
        found: list[int] = trie.tokens[trie.children(node_of(sent[len(ids) :].tolist()))].tolist()
        return found

    def beams(width: int) -> list[int]:
        with torch.inference_mode():
            made = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                num_beams=width,
                num_return_sequences=k,
                max_new_tokens=length,
                prefix_allowed_tokens_fn=allowed,
                length_penalty=0.0,  # the score is the sum of log-probabilities, as an item's
                do_sample=False,
                pad_token_id=0,
            )
        return [int(trie.items[node_of(row[len(ids) :].tolist())]) for row in made]

    width, shared = k, 0
    while shared < k and width <= MAX_OTHER_BEAM:
        shared = len(set(beams(width)) & set(ours))  # the first run of a width is not timed
        took = timed(partial(beams, width), spent if width == k else 1)
        print(
            f"  transformers, beam of {width}: {1000 * took:.0f} ms ({took / seconds:.2f}x), {shared} of {k} the same",
            flush=True,
        )
        width *= 2


def exhaustive(llm: LLM, ids: list[int], items: list[list[int]], k: int) -> tuple[list[int], list[float]]:
    """The k best items by running every inner node, and their scores."""
    ranked: list[tuple[float, int]] = []
    order = sorted(range(len(items)), key=items.__getitem__)
    for at in range(0, len(order), EXHAUSTIVE_ITEMS):
        numbers = order[at : at + EXHAUSTIVE_ITEMS]
        part = TokenTrie.build([items[n] for n in numbers])
        scores, look = np.zeros(len(part)), LookAhead(llm.driver, ids, SamplingParams(temperature=1.0))
        look.end_ids = []
        with llm.driver.lease() as lease:
            for node, row in look._rows(AnswerTree(lease, ids), part):
                children = part.children(node)
                tokens = torch.from_numpy(part.tokens[children].astype(np.int64))
                scores[children] = scores[node] + row.cpu()[tokens].double().numpy()
        ends = np.flatnonzero(part.items >= 0)
        ranked += [(float(scores[n]), numbers[int(part.items[n])]) for n in ends[np.argsort(-scores[ends])][:k]]
        ranked = sorted(ranked, key=lambda found: (-found[0], found[1]))[:k]
    return [item for _, item in ranked], [score for score, _ in ranked]


def timed(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def compare(llm: LLM, ids: list[int], trie: TokenTrie, k: int, repeats: int, other: Any = None) -> list[float]:
    """Seconds of a beam of k, of the narrowest beam that finds the same, and of one that proves it, over `topk`'s."""
    found = llm.topk(ids, trie, k)  # also brings the prompt into the cache
    ours = [ranked.item for ranked in found.items]
    seconds = timed(lambda: llm.topk(ids, trie, k), repeats)
    print(f"  topk: {1000 * seconds:.0f} ms, {found.forwards} forwards, {found.scored_tokens} tokens", flush=True)
    paths = [ranked.token_ids for ranked in found.items]
    known = timed(lambda: score_known(llm, ids, trie, paths), repeats)
    print(f"  known items: {1000 * known:.0f} ms", flush=True)
    if other is not None:
        transformers_beams(other, ids, trie, ours, seconds, repeats)
    ratios: list[float] = []
    width, same = k, False
    while not same:
        items = [ranked.item for ranked in llm.topk(ids, trie, k, beam=width).items]
        same, shared = items == ours, len(set(items) & set(ours))
        spent = timed(partial(llm.topk, ids, trie, k, beam=width), repeats if width == k else 1)
        ratios.append(spent / seconds)
        print(
            f"  beam of {width}: {1000 * spent:.0f} ms ({ratios[-1]:.2f}x; known items {spent / known:.2f}x), "
            f"{shared} of {k} the same",
            flush=True,
        )
        width *= 2
    start = time.perf_counter()
    items, width = proven_beam(llm, ids, trie, k)
    spent = time.perf_counter() - start
    verdict = "the same" if items == ours else "DIFFERENT"
    print(f"  beam that proves it (of {width}): {1000 * spent:.0f} ms ({spent / seconds:.2f}x), {verdict}", flush=True)
    return [ratios[0], ratios[-1], spent / seconds]


def other_model(name: str, lengths: int) -> Any:
    """transformers' model of the same weights, in float32; `lengths`: how many lengths items have."""
    if lengths > 1:
        raise BadRequest("items have several lengths", "give --catalogue numbers or codes: no token ends items there")
    model = hf_from_checkpoint(open_checkpoint(Path(resolve(name))))
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--catalogue", choices=("titles", "numbers", "codes"), default="titles")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--exhaustive", type=int, default=0, help="prompts for which the whole trie is scored")
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--transformers", action="store_true", help="also masked beams of transformers, float32")
    parser.add_argument("--forward-nodes", type=int, help="of one forward of the search, where it shall be another")
    given = parser.parse_args()
    if given.forward_nodes:
        top_items.FORWARD_NODES, answer_tree.MAX_FORWARD_NODES = given.forward_nodes, max(128, given.forward_nodes)
    ratios: list[list[float]] = []
    opened: dict[str, Any] = {"quiet": True, "kv_cache_tokens": 32768}
    with (
        LLM(given.model, dtype=given.dtype, threads=given.threads, device=given.device, **opened) as llm,
        tempfile.TemporaryDirectory() as folder,
    ):
        start = time.perf_counter()
        items, names = catalogue(llm, given.catalogue, given.items)
        path = Path(folder) / "items.trie"
        TokenTrie.build(items, names).save(path)
        trie = open_trie(path)
        print(f"{trie.num_items} items, {len(trie)} nodes, built in {time.perf_counter() - start:.1f} s")
        other = other_model(given.model, len({len(ids) for ids in items})) if given.transformers else None
        prompts = (NUMBER_PROMPTS if given.catalogue == "numbers" else PROMPTS)[: given.prompts]
        for number, prompt in enumerate(prompts):
            print(prompt)
            ids = llm.encode(prompt)
            ratios.append(compare(llm, ids, trie, given.k, given.repeats, other))
            one = timed(partial(llm.generate, [ids], max_tokens=24, grammar=Grammar.trie(path)), given.repeats)
            print(f"  one answer under the mask: {1000 * one:.0f} ms", flush=True)
            if number < given.exhaustive:
                check_exhaustive(llm, ids, items, trie, given.k)
    for name, column in zip(("of k", "that finds the same", "that proves it"), zip(*ratios, strict=True), strict=True):
        print(f"topk against the beam {name}: {min(column):.2f}x to {max(column):.2f}x")


def check_exhaustive(llm: LLM, ids: list[int], items: list[list[int]], trie: TokenTrie, k: int) -> None:
    start = time.perf_counter()
    best, scores = exhaustive(llm, ids, items, k)
    spent, found = time.perf_counter() - start, llm.topk(ids, trie, k)
    error = max(abs(a.score - b) for a, b in zip(found.items, scores, strict=True))
    same = [ranked.item for ranked in found.items] == best
    print(f"  exhaustive: {spent:.1f} s, {'the same' if same else 'DIFFERENT'}, scores to {error:.1g}", flush=True)


if __name__ == "__main__":
    main()
