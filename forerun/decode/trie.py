"""A trie of allowed token sequences: a hundred thousand items and more in four arrays, in memory or mapped from a file.

Nodes are in breadth-first order, so the children of a node follow each other, sorted by token. Node 0 is the root.
Items keep the order they were given in, with a name each. Knows no model, no tokenizer and no grammar.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from forerun.errors import BadRequest

FILE_VERSION = 1
MAX_ITEM_TOKENS = 1024
_MAGIC = b"FORERUN-TRIE"
_HEAD = struct.Struct("<12sII")  # magic, version, bytes of the JSON header that follows
_ALIGNED_BYTES = 64
_ARRAYS = {"tokens": np.int32, "starts": np.int32, "items": np.int32, "offsets": np.int64, "names": np.uint8}


class TokenTrie:
    """`tokens`[i]: the token of node i. `starts`[i] to `starts`[i + 1]: its children. `items`[i]: the item that ends
    there, or -1. `offsets` and `names`: the items' names as UTF-8, one after the other. `vocabulary`: the digest of the
    vocabulary that made the ids from text; empty: ids are ids."""

    def __init__(self, arrays: dict[str, np.ndarray], source: str = "memory", vocabulary: str = "") -> None:
        self.vocabulary = vocabulary
        self.tokens, self.starts, self.items = arrays["tokens"], arrays["starts"], arrays["items"]
        self._offsets, self._names, self.source = arrays["offsets"], arrays["names"], source
        self._inner: np.ndarray | None = None
        self._item_counts: np.ndarray | None = None

    @classmethod
    def build(cls, sequences: Sequence[Sequence[int]], names: Sequence[str] | None = None) -> TokenTrie:
        """Of sequences that are all different. `names`: default is their numbers."""
        lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
        _check(sequences, lengths)
        rows = np.full((len(lengths), int(lengths.max())), -1, dtype=np.int64)  # [items, longest]
        flat = np.array([token for ids in sequences for token in ids], dtype=np.int64)
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < 2**31:
            hint = "use ids from 0 to 2147483647"
            raise BadRequest(f"token ids are from {int(flat.min())} to {int(flat.max())}", hint)
        rows[np.arange(rows.shape[1]) < lengths[:, None]] = flat
        order = np.lexsort(rows.T[::-1]) if rows.shape[1] else np.arange(len(rows))
        rows, lengths = rows[order], lengths[order]
        empty = np.flatnonzero(lengths == 0)
        _check_unique(np.zeros(len(empty)), order[empty], names)
        root_item = order[empty] if len(empty) else np.array([-1])
        tokens, parents, items = [np.array([-1])], [np.array([-1])], [root_item]
        fresh = np.zeros(len(rows), dtype=bool)  # differs from the row before in the tokens so far
        fresh[0] = True
        at, first = np.zeros(len(rows), dtype=np.int64), 1  # node of each row, first node of the level
        for level in range(rows.shape[1]):
            fresh[1:] |= rows[1:, level] != rows[:-1, level]
            alive = lengths > level
            begins = fresh & alive
            tokens.append(rows[begins, level])
            parents.append(at[begins])
            at = np.where(alive, first + np.cumsum(begins) - 1, at)
            ends = lengths == level + 1
            here = np.full(int(begins.sum()), -1, dtype=np.int64)
            _check_unique(at[ends], order[ends], names)
            here[at[ends] - first] = order[ends]
            items.append(here)
            first += len(here)
        counts = np.bincount(np.concatenate(parents)[1:], minlength=first)
        encoded = [name.encode() for name in (map(str, range(len(rows))) if names is None else names)]
        arrays = {
            "tokens": np.concatenate(tokens),
            "starts": np.concatenate([[1], 1 + np.cumsum(counts)]),
            "items": np.concatenate(items),
            "offsets": np.cumsum([0, *map(len, encoded)]),
            "names": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        }
        return cls({name: np.ascontiguousarray(arrays[name], dtype=kind) for name, kind in _ARRAYS.items()})

    def __len__(self) -> int:
        """Nodes, the root included."""
        return len(self.tokens)

    @property
    def num_items(self) -> int:
        return len(self._offsets) - 1

    def name(self, item: int) -> str:
        return self._names[self._offsets[item] : self._offsets[item + 1]].tobytes().decode()

    def children(self, node: int) -> slice:
        return slice(int(self.starts[node]), int(self.starts[node + 1]))

    def children_of(self, nodes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The children of some nodes, one node's after the other's, and for each the index of its parent in `nodes`."""
        first, counts = self.starts[nodes], self.starts[np.asarray(nodes) + 1] - self.starts[nodes]
        rows = np.repeat(np.arange(len(nodes)), counts)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(first, counts) + offsets, rows

    def child(self, node: int, token: int) -> int | None:
        """The node after `node` and a token."""
        lo, hi = int(self.starts[node]), int(self.starts[node + 1])
        at = lo + int(np.searchsorted(self.tokens[lo:hi], token))
        return at if at < hi and int(self.tokens[at]) == token else None

    def parents(self) -> np.ndarray:
        """[N] the node before each; -1 for the root."""
        return np.concatenate([[-1], np.repeat(np.arange(len(self)), np.diff(self.starts))])

    def parent(self, node: int) -> int:
        """The node before another one that is not the root."""
        return int(np.searchsorted(self.starts, node, side="right")) - 1

    def path(self, node: int) -> list[int]:
        """The tokens from the root to a node."""
        found: list[int] = []
        while node > 0:
            found.append(int(self.tokens[node]))
            node = self.parent(node)
        return found[::-1]

    def inner_counts(self) -> np.ndarray:
        """[N] nodes that have children, among each node and all below it; kept, as it reads the whole trie."""
        if self._inner is None:
            self._inner = self._sums((np.diff(self.starts) > 0).astype(np.int32))
        return self._inner

    def item_counts(self) -> np.ndarray:
        """[N] items that end at each node and below it; kept, as it reads the whole trie."""
        if self._item_counts is None:
            self._item_counts = self._sums((self.items >= 0).astype(np.int32))
        return self._item_counts

    def node_counts(self) -> np.ndarray:
        """[N] each node and all below it."""
        return self._sums(np.ones(len(self), dtype=np.int32))

    def _sums(self, found: np.ndarray) -> np.ndarray:
        """Values of nodes, added up over each node and all below it."""
        levels = [(0, 1)]
        while (end := int(self.starts[levels[-1][1]])) > levels[-1][1]:
            levels.append((levels[-1][1], end))
        for begin, end in levels[-2::-1]:
            first, last = int(self.starts[begin]), int(self.starts[end])
            sums = np.concatenate([[0], np.cumsum(found[first:last])])
            found[begin:end] += np.diff(sums[self.starts[begin : end + 1] - first])
        return found

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a file of this version, with a checksum; nothing half-written stays behind."""
        path = Path(path)
        arrays = dict(zip(_ARRAYS, (self.tokens, self.starts, self.items, self._offsets, self._names), strict=True))
        places, size, digest = {}, 0, hashlib.sha256()
        for name, array in arrays.items():
            places[name] = (size, len(array))
            size += -(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
            digest.update(array.tobytes())
        about = {"arrays": places, "sha256": digest.hexdigest(), "vocabulary": self.vocabulary}
        header = json.dumps(about).encode()
        header += b" " * (-(_HEAD.size + len(header)) % _ALIGNED_BYTES)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.write(_HEAD.pack(_MAGIC, FILE_VERSION, len(header)) + header)
                for array in arrays.values():
                    file.write(array.tobytes() + b"\0" * (-array.nbytes % _ALIGNED_BYTES))
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise BadRequest(f"cannot write {path}: {error}", "choose another place") from None

    @classmethod
    def open(cls, path: str | Path) -> TokenTrie:
        """Map a file of `save`, after its checksum was compared."""
        hint = "build it again: forerun trie build"
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise BadRequest(f"cannot open the trie {path}: {error}", "give a file of `forerun trie build`") from None
        head = data[: _HEAD.size].tobytes()
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise BadRequest(f"{path} is no trie", "give a file of `forerun trie build`")
        _, version, size = _HEAD.unpack(head)
        if version != FILE_VERSION:
            raise BadRequest(f"the trie {path} has version {version}, this program reads {FILE_VERSION}", hint)
        try:
            header = json.loads(data[_HEAD.size : _HEAD.size + size].tobytes())
            arrays = {}
            for name, kind in _ARRAYS.items():
                start, count = header["arrays"][name]
                begin = _HEAD.size + size + start
                arrays[name] = data[begin : begin + count * np.dtype(kind).itemsize].view(kind)
            digest = hashlib.sha256()
            for array in arrays.values():
                digest.update(array.data)
            whole = digest.hexdigest() == header["sha256"]
            vocabulary = str(header.get("vocabulary", ""))
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise BadRequest(f"the trie {path} is damaged: its checksum differs", hint)
        return cls(arrays, str(path), vocabulary)


def _check(sequences: Sequence[Sequence[int]], lengths: np.ndarray) -> None:
    if not len(sequences):
        raise BadRequest("the trie has no items", "give at least one")
    if int(lengths.max()) > MAX_ITEM_TOKENS:
        problem = f"item {int(lengths.argmax())} has {int(lengths.max())} tokens, the limit is {MAX_ITEM_TOKENS}"
        raise BadRequest(problem, "use shorter items")


def _check_unique(nodes: np.ndarray, items: np.ndarray, names: Sequence[str] | None) -> None:
    order = np.argsort(nodes, kind="stable")
    same = np.flatnonzero(np.diff(nodes[order]) == 0)
    if len(same):
        a, b = sorted(items[order[same[0] : same[0] + 2]].tolist())
        named = "" if names is None else f" ({names[a]!r:.40} and {names[b]!r:.40})"
        raise BadRequest(f"items {a} and {b}{named} have the same tokens", "remove one of them")


@lru_cache(maxsize=8)
def _opened(path: str, modified_ns: int, size: int) -> TokenTrie:
    return TokenTrie.open(path)


def open_trie(path: str | Path) -> TokenTrie:
    """`TokenTrie.open`, once for a file as long as it stays the same."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise BadRequest(f"cannot open the trie {path}: {error}", "give a file of `forerun trie build`") from None
    return _opened(str(path), found.st_mtime_ns, found.st_size)
