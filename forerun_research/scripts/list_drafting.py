"""Drafters of lists replayed on given lists, without a model: passes of a target that would write them.

`ids` are lists of items of a recommender: four codes an item, the same tokens on every level, popular items more often,
no item twice. `digits` are the images of `image_tokens`, rows as items. Each list is replayed with drafts of `--nodes`
tokens: a pass gives the drafted tokens that are right and one more. Drafters learn from earlier lists only. What
`list:N` knows and `suffix` does not is the place inside the item and the list.

    python -m forerun_research.scripts.list_drafting --lists 200
"""

from __future__ import annotations

import argparse
from array import array

import numpy as np

from forerun.core import SamplingParams
from forerun.decode.drafters import find
from forerun.decode.drafters.base import Drafter, DraftRequest
from forerun.decode.sampling import Context
from forerun_research.scripts.draft_trees import accepted
from forerun_research.scripts.image_tokens import CLASS, SIDE, draw_digits
from forerun_research.studies.intervals import bootstrap

ITEM_CODES, CODES, CATALOGUE, LIST_ITEMS = 4, 16, 300, 16
DEPTH = 16


def draw_lists(count: int) -> list[list[int]]:
    """Lists of different items, behind one token of prompt."""
    draw = np.random.default_rng(5)
    codes = np.stack([draw.zipf(1.6, 4 * CATALOGUE) % CODES for _ in range(ITEM_CODES)], 1)
    items = draw.permutation(np.unique(codes, axis=0))[:CATALOGUE]
    weights = 1.0 / np.arange(1, len(items) + 1)
    chosen = (draw.choice(len(items), LIST_ITEMS, replace=False, p=weights / weights.sum()) for _ in range(count))
    return [[CODES, *items[numbers].reshape(-1).tolist()] for numbers in chosen]


def draw_images(count: int) -> list[list[int]]:
    labels = np.arange(count) % 10
    return [
        [CLASS + int(label), *image] for label, image in zip(labels, draw_digits(labels, 123).tolist(), strict=True)
    ]


def replay(drafter: Drafter, lists: list[list[int]], nodes: int) -> list[float]:
    """Passes that each list takes."""
    found = []
    for number, tokens in enumerate(lists):
        at, passes = 1, 0
        while at < len(tokens):
            context = Context(SamplingParams(), tokens[:at], 1, 0)
            (draft,) = drafter.propose([DraftRequest(number, context, DEPTH, nodes, array("i"))])
            at += accepted(draft, list(range(len(draft))), tokens[at:])
            passes += 1
        drafter.finish(number, tokens, 1)
        found.append(float(passes))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=8)
    given = parser.parse_args()
    for name, lists, item in (("ids", draw_lists(given.lists), ITEM_CODES), ("digits", draw_images(given.lists), SIDE)):
        for drafter in ("lookup", "suffix", f"list:{item}"):
            kind = find(drafter)
            assert kind is not None
            passes = replay(kind(None), lists, given.nodes)  # type: ignore[arg-type]
            early, late = passes[: given.lists // 5], passes[given.lists // 5 :]
            low, high = bootstrap([late])
            print(
                f"{name}, {len(lists[0]) - 1} tokens, {drafter}: {np.mean(early):.1f} passes a list at first, "
                f"{np.mean(late):.1f} ({low:.1f}-{high:.1f}) after {len(early)} lists"
            )


if __name__ == "__main__":
    main()
