"""A summary of the prefix tree: runs of shared pages, how often they were read, how many readers they have now.

Bounded however large the tree is, and holding no more of a text than its first tokens. Knows no text and no request.
"""

from __future__ import annotations

import heapq
import os.path
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.cache.prefix import TOKEN_BYTES, Node, PrefixTree, pack

SHOWN_TOKENS = 32  # first tokens of a run that are kept


@dataclass(frozen=True)
class SharedRun:
    """Pages that every text below them shares."""

    parent: int  # its place in the summary; -1: a text begins here
    tokens: int
    branches: int  # different continuations
    reads: int  # requests that read these pages and did not compute them
    readers: int  # that hold them now: running requests, sessions
    shared: int  # of its tokens, how many the text that was asked about begins with, too, in whole pages
    first: list[int]  # its first token ids


@dataclass(frozen=True)
class TreeSummary:
    runs: list[SharedRun]  # parents before their children, the latest used first
    left_out: int  # runs that there are beside these
    tokens: int  # that the whole tree holds
    page_size: int


def summarise_tree(tree: PrefixTree, mine: Sequence[int], most: int) -> TreeSummary:
    """Up to `most` runs; each tells how much of it the text `mine` shares."""
    runs: list[SharedRun] = []
    way, data = {-1: 0}, pack(mine)  # place of a run that is all on that text's way: bytes of the text up to its end
    heap: list[tuple[int, int, int, Node]] = []
    pushed, page = 0, tree.pool.page_size
    stride = page * TOKEN_BYTES

    def push(above: int, node: Node) -> None:
        nonlocal pushed
        for child in node.children.values():
            pushed += 1
            heapq.heappush(heap, (-child.last_used, pushed, above, child))

    push(-1, tree.root)
    while heap and len(runs) < most:
        _, _, above, node = heapq.heappop(heap)
        place, at = len(runs), way.get(above, -1)
        same = 0 if at < 0 else len(os.path.commonprefix([node.tokens, data[at : at + len(node.tokens)]])) // stride
        if at >= 0 and same == len(node.pages):
            way[place] = at + len(node.tokens)
        readers = max(0, int(tree.pool.refs[node.pages[0]]) - 1)  # the tree itself is one holder
        first = array("i", node.tokens[: SHOWN_TOKENS * TOKEN_BYTES]).tolist()
        tokens = len(node.tokens) // TOKEN_BYTES
        runs.append(SharedRun(above, tokens, len(node.children), node.reads, readers, same * page, first))
        push(place, node)
    return TreeSummary(runs, tree.num_nodes - len(runs), tree.num_pages * page, page)
