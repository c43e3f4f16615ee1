"""`llm.topk` over a catalogue of 100,000 items against masked beam search and against exhaustive scoring.

The items are product titles put together from words. Masked decoding for the k best is beam search in the trie: each
level one forward over the same tree of tokens, each row masked to the children of its node. A beam is not exact; so
besides width k the least width (of k times 1, 2, 4, ...) that finds the same items is timed. Exhaustive scoring runs
all inner nodes of the trie, of a part of it with `--exhaustive` items, since the whole takes minutes.

    python -m forerun_research.scripts.trie_topk --items 100000 --exhaustive 4000
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from forerun import LLM
from forerun.core import ROOT, SamplingParams
from forerun.decode.trie import TokenTrie
from forerun.decode.trie_answer import rows_to_score
from forerun.runtime.answer_tree import AnswerTree
from forerun.runtime.look_ahead import LookAhead

PROMPTS = [
    "For the living room we recommend a",
    "The customer looked for a birthday present and bought a",
    "Best seller in the garden department: the",
    "To write letters on a train you need a",
]
WORDS = {
    "colour": "red blue green black white yellow brown grey golden silver purple orange pink dark light",
    "material": "wooden leather cotton steel glass plastic paper silk woollen stone rubber copper ceramic linen bamboo",
    "thing": "chair table lamp sofa shelf carpet mirror clock vase desk bench cushion blanket curtain basket spade "
    "rake wheelbarrow notebook pen pencil diary backpack suitcase mug umbrella scarf coat shirt hat boots doll",
    "purpose": "children adults gardeners travellers writers beginners families cooks sailors teachers winter summer",
}


def catalogue(count: int) -> list[str]:
    words = {name: text.split() for name, text in WORDS.items()}
    draw, found = random.Random(0), dict[str, None]()
    while len(found) < count:
        colour, material, thing, purpose = (draw.choice(words[name]) for name in WORDS)
        number = draw.choice(["", "", f" no. {draw.randint(1, 99)}"])
        found[f" {colour} {material} {thing} for {purpose}{number}"] = None
    return list(found)


def beam(llm: LLM, ids: list[int], trie: TokenTrie, k: int, width: int) -> list[int]:
    """The items of a masked beam search, best first."""
    best: list[tuple[float, int]] = []
    with llm.driver.lease() as lease:
        tree = AnswerTree(lease, ids)
        logits, rows = tree.root_logits, [(0.0, 0, ROOT)]  # score, trie node, tree node
        while rows:
            logprobs = torch.log_softmax(logits.float(), -1)
            after: list[tuple[float, int, int]] = []
            for (score, node, place), row in zip(rows, logprobs, strict=True):
                children = trie.children(node)
                masked = torch.full_like(row, -torch.inf)
                tokens = torch.from_numpy(trie.tokens[children].astype(np.int64))
                masked[tokens] = row[tokens]
                kept = masked.topk(min(width, len(tokens)))
                for value, token in zip(kept.values.tolist(), kept.indices.tolist(), strict=True):
                    child = trie.child(node, token)
                    assert child is not None
                    after.append((score + value, child, place))
            after = sorted(after, reverse=True)[:width]
            best += [(score, int(trie.items[node])) for score, node, _ in after if trie.items[node] >= 0]
            going = [each for each in after if trie.starts[each[1]] < trie.starts[each[1] + 1]]
            first = len(tree)
            if going:
                logits = tree.run([place for _, _, place in going], [int(trie.tokens[node]) for _, node, _ in going])
            rows = [(score, node, first + i) for i, (score, node, _) in enumerate(going)]
    return [item for _, item in sorted(best, reverse=True)[:k]]


def exhaustive(llm: LLM, ids: list[int], trie: TokenTrie, k: int) -> tuple[list[int], list[float]]:
    """Every node of the trie through the model."""
    scores, wanted = np.zeros(len(trie)), rows_to_score(trie, [])
    look = LookAhead(llm.driver, ids, SamplingParams(temperature=1.0))
    look.end_ids = []
    with llm.driver.lease() as lease:
        for node, row in look._rows(AnswerTree(lease, ids), trie):
            children = trie.children(node)
            tokens = torch.from_numpy(trie.tokens[children].astype(np.int64))
            scores[children] = scores[node] + row[tokens].double().numpy()
    assert wanted[0] == 0
    ends = np.flatnonzero(trie.items >= 0)
    order = ends[np.argsort(-scores[ends], kind="stable")][:k]
    return trie.items[order].tolist(), scores[order].tolist()


def timed(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def compare(llm: LLM, ids: list[int], trie: TokenTrie, k: int, repeats: int) -> tuple[float, float]:
    """Seconds of a beam of k, and of the narrowest beam that finds the same items, over those of `topk`."""
    found = llm.topk(ids, trie, k)  # also brings the prompt into the cache
    ours = [ranked.item for ranked in found.items]
    seconds = timed(lambda: llm.topk(ids, trie, k), repeats)
    print(f"  topk: {1000 * seconds:.0f} ms, {found.forwards} forwards, {found.scored_tokens} tokens", flush=True)
    ratios: list[float] = []
    width, same = k, False
    while not same and width <= 64 * k:
        items = beam(llm, ids, trie, k, width)
        same, shared = items == ours, len(set(items) & set(ours))
        spent = timed(partial(beam, llm, ids, trie, k, width), repeats if width == k else 1)
        ratios.append(spent / seconds)
        print(f"  beam of {width}: {1000 * spent:.0f} ms ({ratios[-1]:.1f}x), {shared} of {k} the same", flush=True)
        width *= 2
    return ratios[0], ratios[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--exhaustive", type=int, default=4000, help="items of the part that is scored exhaustively")
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    titles = catalogue(given.items)
    ratios: list[float] = []
    exact_ratios: list[float] = []
    with LLM(given.model, quiet=True, kv_cache_tokens=32768) as llm:
        start = time.perf_counter()
        trie = TokenTrie.build([llm.tokenizer.encode(title) for title in titles], titles)
        print(f"{trie.num_items} items, {len(trie)} nodes, built in {time.perf_counter() - start:.1f} s")
        for prompt in PROMPTS:
            print(prompt)
            narrow, wide = compare(llm, llm.encode(prompt), trie, given.k, given.repeats)
            ratios.append(narrow)
            exact_ratios.append(wide)
        part = TokenTrie.build([llm.tokenizer.encode(title) for title in titles[: given.exhaustive]])
        for prompt in PROMPTS[:2] if given.exhaustive else ():
            ids = llm.encode(prompt)
            items, scores = exhaustive(llm, ids, part, given.k)
            found = llm.topk(ids, part, given.k)
            error = max(abs(a.score - b) for a, b in zip(found.items, scores, strict=True))
            same = [ranked.item for ranked in found.items] == items
            print(f"exhaustive, {given.exhaustive} items: {'the same' if same else 'DIFFERENT'}, scores to {error:.1g}")
    print(f"against a beam of {given.k}: {np.min(ratios):.1f}x to {np.max(ratios):.1f}x")
    print(f"against the beam that finds the same items: {np.min(exact_ratios):.1f}x to {np.max(exact_ratios):.1f}x")


if __name__ == "__main__":
    main()
