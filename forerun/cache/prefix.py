"""The prefix tree: which token prefixes have exact K/V in the pool, and where.

A radix tree whose edges are whole pages of tokens. The tree holds one reference on each page it lists; readers take
their own, so a page in use can leave the tree but never the pool. It knows no request and no model, and it only ever
holds exact K/V: approximate K/V has a type of its own and never comes here. Pages have owners, by name: those of an
owner that holds more than its share are evicted first, so that one cannot evict what the others use. `summarise_tree`
is what can be shown of a tree: bounded however large it is, and holding no more of a text than its first tokens.
"""

from __future__ import annotations

import bisect
import heapq
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from forerun.cache.pool import PagePool

TOKEN_BYTES = 4
SHOWN_TOKENS = 32  # first tokens of a run that a summary shows
SHARE_IDLE_S = 600.0  # unused for longer, pages within their owner's share are evicted as any are


@dataclass(eq=False)
class Node:
    """A run of pages below its parent; `tokens` are its tokens as packed int32, `pages` where their K/V lies."""

    tokens: bytes
    pages: list[int]
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)  # by the tokens of their first page
    last_used: int = 0
    reads: int = 0  # by requests that did not have to compute these pages
    owner: str = ""  # that computed them
    used_at: float = 0.0  # seconds


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def unpack(data: bytes) -> list[int]:
    return array("i", data).tolist()


class PrefixTree:
    """Match, insert, evict. Tokens are compared as bytes, so that long prefixes cost a memory comparison."""

    def __init__(self, pool: PagePool, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool, self._time = pool, clock
        self.root = Node(b"", [], None)
        self.num_pages = 0
        self.pages_by_owner: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._stride = pool.page_size * TOKEN_BYTES
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (last_used, tie-break, leaf); may hold stale entries
        self._pushed = 0
        # told of pages that are about to be evicted: the packed tokens up to their end, and the pages
        self.on_evict: Callable[[bytes, list[int]], None] | None = None
        # called with packed tokens and how many pages at their end became known; fewer than none: were forgotten; with
        # none: all were
        self.on_change: Callable[[bytes, int], None] | None = None

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest known prefix of whole pages. The caller takes references before anything else runs."""
        data = pack(tokens)
        pages: list[int] = []
        node, at = self.root, 0
        self._clock += 1
        while (child := node.children.get(data[at : at + self._stride])) is not None:
            shared = self._shared_pages(child, data, at)
            pages += child.pages[:shared]
            self._touch(child)
            if shared < len(child.pages):
                break
            node, at = child, at + len(child.tokens)
        return pages

    def count_read(self, tokens: Sequence[int]) -> None:
        """A known prefix of whole pages is read. A node that is read in part is cut there, as it would be by
        what comes after: all of a node was read equally often."""
        data, node, at = pack(tokens), self.root, 0
        while at < len(data) and (child := node.children.get(data[at : at + self._stride])) is not None:
            shared = self._shared_pages(child, data, at)
            node = self._split(child, shared) if shared < len(child.pages) else child
            node.reads += 1
            at += len(node.tokens)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], owner: str = "", weight: float = 1.0) -> int:
        """Make the whole pages of `tokens` known; where a prefix is known already, its existing pages stay. Returns how
        many pages are new; they are the owner's. A leaf that was never read grows: prompts become known chunk by
        chunk."""
        self._weights[owner] = weight
        whole = min(len(tokens) // self.pool.page_size, len(pages))
        data = pack(tokens[: whole * self.pool.page_size])
        node, at = self.root, 0
        self._clock += 1
        while at < len(data):
            child = node.children.get(data[at : at + self._stride])
            if child is None:
                new = list(pages[at // self._stride : whole])
                if node.parent is None or node.children or node.reads or node.owner != owner:
                    self._add(node, data[at:], new, owner)
                    return len(new)
                self.pool.retain(new)
                node.tokens, node.pages = node.tokens + data[at:], [*node.pages, *new]
                self._count(node, len(new))
                return len(new)
            shared = self._shared_pages(child, data, at)
            if shared < len(child.pages):
                child = self._split(child, shared)
            self._touch(child)
            node, at = child, at + len(child.tokens)
        return 0

    def evict(self, count: int) -> int:
        """Free at least `count` pages, least recently used leaves first, from the end; returns how many were freed.
        Leaves of owners within their shares come last."""
        freed = self._evict(count, sparing=True) if sum(n > 0 for n in self.pages_by_owner.values()) > 1 else 0
        return freed if freed >= count else freed + self._evict(count - freed, sparing=False)

    def within_share(self, owner: str) -> bool:
        """Whether an owner holds no more than its part of the pool, by the weights of all that hold something."""
        total = sum(self._weights[name] for name, pages in self.pages_by_owner.items() if pages)
        return self.pages_by_owner[owner] * total <= self._weights.get(owner, 1.0) * self.pool.num_pages

    def _evict(self, count: int, sparing: bool) -> int:
        freed, now = 0, self._time()
        busy: list[tuple[int, int, Node]] = []
        while freed < count and self._leaves:
            entry = heapq.heappop(self._leaves)
            node = entry[2]
            if node.children or not node.pages or node.last_used != entry[0]:
                continue  # stale: it was used since, grew children, or is gone
            if sparing and now - node.used_at < SHARE_IDLE_S and self.within_share(node.owner):
                busy.append(entry)
                continue
            freed += self._trim(node, count - freed)
            if node.pages:
                busy.append(entry)
            elif node.parent is not None and node.parent is not self.root and not node.parent.children:
                self._push(node.parent)
        for entry in busy:
            heapq.heappush(self._leaves, entry)
        return freed

    def forget(self, tokens: Sequence[int]) -> None:
        """Drop the pages of a text from its end on, as far as no other text needs them."""
        data, node, at = pack(tokens), self.root, 0
        while (child := node.children.get(data[at : at + self._stride])) is not None and data.startswith(
            child.tokens, at
        ):
            node, at = child, at + len(child.tokens)
        while node.parent is not None and not node.children:
            parent = node.parent
            del parent.children[node.tokens[: self._stride]]
            self.pool.release(node.pages)
            self._count(node, -len(node.pages))
            node.pages, node = [], parent
        if node.parent is not None and not node.children:
            self._push(node)

    def clear(self) -> None:
        """Forget everything; pages in use by sequences stay with them."""
        for node in self._walk():
            self.pool.release(node.pages)
            node.pages = []
        self.root = Node(b"", [], None)
        self.num_pages = 0
        self.pages_by_owner.clear()
        self._leaves.clear()
        if self.on_change is not None:
            self.on_change(b"", 0)

    def texts(self) -> list[tuple[bytes, list[int]]]:
        """Every node as the packed tokens up to its end and its own pages; the latest used first, parents before
        children."""
        latest_first = sorted(self._walk(), key=lambda node: -node.last_used)
        return [(self._path(node), node.pages) for node in latest_first]

    @property
    def num_nodes(self) -> int:
        return sum(1 for _ in self._walk())

    def _trim(self, node: Node, count: int) -> int:
        """Drop up to `count` pages from the end of a leaf, stopping at one that a sequence still reads."""
        keep = len(node.pages)
        while keep and len(node.pages) - keep < count and self._can_drop(node.pages[keep - 1]):
            keep -= 1
        freed = len(node.pages) - keep
        if freed and self.on_evict is not None:
            self.on_evict(self._path(node), node.pages[keep:])
        self.pool.release(node.pages[keep:])
        del node.pages[keep:]
        self._count(node, -freed)
        first = node.tokens[: self._stride]
        node.tokens = node.tokens[: len(node.pages) * self._stride]
        if not node.pages and node.parent is not None:
            del node.parent.children[first]
        return freed

    def _path(self, node: Node) -> bytes:
        parts = []
        at: Node | None = node
        while at is not None:
            parts.append(at.tokens)
            at = at.parent
        return b"".join(reversed(parts))

    def _can_drop(self, page: int) -> bool:
        return bool(self.pool.refs[page] == 1)

    def _shared_pages(self, node: Node, data: bytes, at: int) -> int:
        """How many leading pages of `node` equal data[at:]."""
        if data.startswith(node.tokens, at):
            return len(node.pages)
        ends = range(self._stride, len(node.tokens) + 1, self._stride)
        return bisect.bisect_left(ends, True, key=lambda end: not data.startswith(node.tokens[:end], at))

    def _split(self, node: Node, keep: int) -> Node:
        """Cut a node in two after `keep` pages; returns the upper part."""
        cut = keep * self._stride
        upper = Node(node.tokens[:cut], node.pages[:keep], node.parent, last_used=node.last_used, reads=node.reads)
        upper.owner, upper.used_at = node.owner, node.used_at
        assert node.parent is not None
        node.parent.children[node.tokens[: self._stride]] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[keep:], upper
        upper.children[node.tokens[: self._stride]] = node
        return upper

    def _count(self, node: Node, pages: int) -> None:
        """So many pages at the end of a node's tokens are new, or, below 0, no longer there."""
        self.num_pages += pages
        self.pages_by_owner[node.owner] += pages
        if self.on_change is not None and pages:
            self.on_change(self._path(node), pages)

    def _add(self, parent: Node, tokens: bytes, pages: list[int], owner: str) -> None:
        self.pool.retain(pages)
        node = Node(tokens, pages, parent, owner=owner)
        self._count(node, len(pages))
        parent.children[tokens[: self._stride]] = node
        self._touch(node)

    def _touch(self, node: Node) -> None:
        node.last_used, node.used_at = self._clock, self._time()
        if not node.children:
            self._push(node)

    def _push(self, node: Node) -> None:
        if len(self._leaves) > 64 + 4 * self.num_pages:  # drop stale entries before they outnumber the pages
            self._leaves = [e for e in self._leaves if e[2].pages and e[2].last_used == e[0] and not e[2].children]
            heapq.heapify(self._leaves)
        self._pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._pushed, node))

    def _walk(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


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

    def push(above: int, node: Node) -> None:
        nonlocal pushed
        for child in node.children.values():
            pushed += 1
            heapq.heappush(heap, (-child.last_used, pushed, above, child))

    push(-1, tree.root)
    while heap and len(runs) < most:
        _, _, above, node = heapq.heappop(heap)
        place, at = len(runs), way.get(above, -1)
        same = 0 if at < 0 else tree._shared_pages(node, data, at)
        if at >= 0 and same == len(node.pages):
            way[place] = at + len(node.tokens)
        readers = max(0, int(tree.pool.refs[node.pages[0]]) - 1)  # the tree itself is one holder
        first = unpack(node.tokens[: SHOWN_TOKENS * TOKEN_BYTES])
        tokens = len(node.tokens) // TOKEN_BYTES
        runs.append(SharedRun(above, tokens, len(node.children), node.reads, readers, same * page, first))
        push(place, node)
    return TreeSummary(runs, tree.num_nodes - len(runs), tree.num_pages * page, page)
