"""The protocol between a target and a draft server, version 1: binary frames, one to a websocket message.

Little-endian, no padding; docs/remote-drafters.md has every field. Token ids take two bytes where the vocabulary has at
most 65,536 tokens and three elsewhere. What a frame states is checked when it is decoded: whatever arrives is either a
frame whose tree is a tree over the vocabulary, or a `ProtocolError`. Knows no connection, no model and no engine.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

import numpy as np

from forerun.errors import ForerunError
from forerun.text.tokenizer import NoTokenizer, Tokenizer

VERSION = 1
MAX_NODES = 255  # of a tree: a parent is one byte
MAX_CONTEXT_TOKENS = 1 << 22  # of one frame
MAX_TREE_BYTES = 1 << 20  # that a target reads from a server: a full tree with all its distributions fits
MAX_TEMPERATURE = 100.0
PROB_BITS = (8, 16)  # of a probability or a weight
DIGEST_BYTES = 16

HELLO, DRAFT, CANCEL, CLOSE = 1, 2, 3, 4  # from the target
WELCOME, TREE, FORGOT, REFUSED = 17, 18, 19, 20  # from the server
_HELLO, _WELCOME = struct.Struct(f"<HI{DIGEST_BYTES}s"), struct.Struct("<HIIfBfB")
_KIND, _OUTCOME = struct.Struct("<BB"), struct.Struct("<HH")
_DRAFT = struct.Struct("<IIIHBBBBfHHII")
_IDS = struct.Struct("<II")
_TREE = struct.Struct("<IIIIBBB")
_DISTRIBUTION = struct.Struct("<BB")


class ProtocolError(ForerunError):
    """Bytes that are no frame of this protocol."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"not a frame of the draft protocol: {problem}", "connect to a `forerun draft serve`")


@dataclass
class Hello:
    """The first frame of a target."""

    vocab_size: int
    digest: bytes  # of the vocabulary: ids must mean the same text on both sides
    version: int = VERSION


@dataclass
class Welcome:
    """The server's reply to it. What it says of its model is believed until outcomes are known."""

    max_context: int
    max_sequences: int
    round_s: float  # of the draft model for one token
    model: str
    version: int = VERSION
    round_tokens: int = 1  # that one round drafts at most, one after the other,
    round_slope: float = 0.0  # and what each of them after the first adds to it, as a share of a round for one
    outcomes: dict[str, list[list[float]]] = field(default_factory=dict)  # kind of text -> accepted and tried by depth


@dataclass
class DraftOrder:
    """What a target wants drafted after a sequence: the `kept` first tokens of what the server knows, and `tokens`."""

    seq: int
    version: int  # of the sequence: later ones replace earlier ones
    kept: int
    assumed: int  # of the last tokens, how many the target has not accepted yet
    tokens: list[int]
    depth: int = 8
    nodes: int = 32
    top_tokens: int = 0  # of the distributions that are sent along; 0: none
    prob_bits: int = 8
    temperature: float = 0.0
    min_prob: float = 0.02  # path probability below which a round is not run even where time is free
    paid_prob: float = 0.0  # the same once `free_ms` are over
    free_ms: int = 0  # drafting time that the target does not wait for


@dataclass
class Distribution:
    """The most probable tokens after a node, with whole numbers for weights: the drafter's law is weights / their sum,
    so that what is verified is to the last bit what was drawn from, however coarse the weights are."""

    tokens: list[int]
    weights: list[int]


@dataclass
class Tree:
    """A draft for one version of a sequence."""

    seq: int
    version: int
    server_us: int  # from the order's arrival to this frame
    round_us: int  # of one round of the draft model
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # -1: the sequence's last token
    probs: list[float] = field(default_factory=list)
    distributions: dict[int, Distribution] = field(default_factory=dict)  # by node, or -1
    prob_bits: int = 8


@dataclass
class Cancel:
    """Drafts for this version are not needed any more."""

    seq: int
    version: int


@dataclass
class Close:
    """A sequence ended."""

    seq: int
    version: int = 0


@dataclass
class Forgot:
    """The server does not hold the first tokens that an order builds on: they must be sent again."""

    seq: int
    version: int


@dataclass
class Refused:
    """Why the server does not draft: for a sequence, or, with version 0, for this target at all."""

    seq: int
    version: int
    reason: str


Frame = Hello | Welcome | DraftOrder | Tree | Cancel | Close | Forgot | Refused


def vocabulary_digest(tokenizer: Tokenizer | None) -> bytes:
    """The same for tokenizers whose ids mean the same text; zeros where there is no tokenizer: ids are not text."""
    if tokenizer is None or isinstance(tokenizer, NoTokenizer):
        return bytes(DIGEST_BYTES)
    vocabulary = sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items())
    return hashlib.blake2b(repr(vocabulary).encode("utf-8", "replace"), digest_size=DIGEST_BYTES).digest()


def quantise(prob: float, bits: int) -> int:
    return round(min(1.0, max(0.0, prob)) * ((1 << bits) - 1))


def quantised_weights(probs: list[float], bits: int) -> list[int]:
    """Weights of the most probable tokens, the largest as large as it can be and none 0. What other tokens had is left
    out: the target draws from these weights alone, and its residual has the rest."""
    most = max(probs)
    return [max(1, quantise(p / most, bits)) for p in probs]


# ---- encoding ----


def encode(frame: Frame, vocab_size: int = 0) -> bytes:
    """`vocab_size`: of the target, for frames with tokens."""
    match frame:
        case Hello():
            return bytes([HELLO]) + _HELLO.pack(frame.version, frame.vocab_size, frame.digest)
        case Welcome():
            return bytes([WELCOME]) + _encode_welcome(frame)
        case DraftOrder():
            return bytes([DRAFT]) + _encode_order(frame, vocab_size)
        case Tree():
            return bytes([TREE]) + _encode_tree(frame, vocab_size)
        case Cancel():
            return bytes([CANCEL]) + _IDS.pack(frame.seq, frame.version)
        case Close():
            return bytes([CLOSE]) + _IDS.pack(frame.seq, frame.version)
        case Forgot():
            return bytes([FORGOT]) + _IDS.pack(frame.seq, frame.version)
        case Refused():
            return bytes([REFUSED]) + _IDS.pack(frame.seq, frame.version) + frame.reason.encode()[:1024]


def _encode_welcome(welcome: Welcome) -> bytes:
    head = (welcome.version, welcome.max_context, welcome.max_sequences, welcome.round_s)
    told = list(welcome.outcomes.items())[:255]
    parts = [_WELCOME.pack(*head, welcome.round_tokens, welcome.round_slope, len(told))]
    for kind, depths in told:
        name = kind.encode()[:255]
        parts += [_KIND.pack(len(name), len(depths)), name]
        parts += [_OUTCOME.pack(*(min(65535, round(count)) for count in pair)) for pair in depths]
    return b"".join(parts) + welcome.model.encode()[:256]


def _encode_order(order: DraftOrder, vocab_size: int) -> bytes:
    head = _DRAFT.pack(
        order.seq,
        order.version,
        order.kept,
        order.assumed,
        order.depth,
        order.nodes,
        order.top_tokens,
        order.prob_bits,
        order.temperature,
        quantise(order.min_prob, 16),
        quantise(order.paid_prob, 16),
        order.free_ms,
        len(order.tokens),
    )
    return head + _pack_tokens(order.tokens, vocab_size)


def _encode_tree(tree: Tree, vocab_size: int) -> bytes:
    head = (tree.seq, tree.version, tree.server_us, tree.round_us)
    parts = [_TREE.pack(*head, len(tree.tokens), len(tree.distributions), tree.prob_bits)]
    parts.append(_pack_tokens(tree.tokens, vocab_size))
    parts.append(bytes(parent + 1 for parent in tree.parents))
    parts.append(_pack_numbers([quantise(p, tree.prob_bits) for p in tree.probs], tree.prob_bits))
    for node, found in tree.distributions.items():
        parts.append(_DISTRIBUTION.pack(node + 1, len(found.tokens)))
        parts += [_pack_tokens(found.tokens, vocab_size), _pack_numbers(found.weights, tree.prob_bits)]
    return b"".join(parts)


def token_bytes(vocab_size: int) -> int:
    """Of one token id on the wire."""
    return 2 if vocab_size <= 1 << 16 else 3


def _pack_tokens(tokens: list[int], vocab_size: int) -> bytes:
    return np.array(tokens, dtype="<u4").view(np.uint8).reshape(-1, 4)[:, : token_bytes(vocab_size)].tobytes()


def _pack_numbers(numbers: list[int], bits: int) -> bytes:
    return np.array(numbers, dtype=f"<u{bits // 8}").tobytes()


# ---- decoding ----


def decode(data: bytes, vocab_size: int = 0) -> Frame:
    """A frame; raises `ProtocolError` for anything else."""
    reader = _Reader(data, vocab_size)
    (kind,) = reader.take(1)
    if kind == HELLO:
        version, size, digest = reader.unpack(_HELLO)
        return reader.whole(Hello(size, digest, version))
    if kind == WELCOME:
        return _decode_welcome(reader)
    if kind == REFUSED:
        seq, version = reader.unpack(_IDS)
        return Refused(seq, version, reader.text())
    if kind in _WITH_IDS:
        return reader.whole(_WITH_IDS[kind](*reader.unpack(_IDS)))
    if kind in (DRAFT, TREE):
        return reader.whole(_decode_order(reader) if kind == DRAFT else _decode_tree(reader))
    raise ProtocolError(f"kind {kind}")


_WITH_IDS: dict[int, type[Cancel] | type[Close] | type[Forgot]] = {CANCEL: Cancel, CLOSE: Close, FORGOT: Forgot}


class _Reader:
    """Bytes of one frame from the first to the last."""

    def __init__(self, data: bytes, vocab_size: int) -> None:
        if not isinstance(data, bytes):
            raise ProtocolError("a message of text")
        self._data, self._at, self._vocab_size = data, 0, vocab_size

    def take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise ProtocolError(f"it ends after {len(self._data)} bytes")
        self._at += count
        return found

    def unpack(self, form: struct.Struct) -> tuple:
        return form.unpack(self.take(form.size))

    def tokens(self, count: int) -> list[int]:
        width = token_bytes(self._vocab_size)
        raw = np.frombuffer(self.take(count * width), dtype=np.uint8).reshape(count, width).astype(np.uint32)
        ids = (raw << (8 * np.arange(width, dtype=np.uint32))).sum(1, dtype=np.uint32)
        if count and int(ids.max()) >= self._vocab_size:
            raise ProtocolError(f"token {int(ids.max())} of a vocabulary of {self._vocab_size}")
        return ids.tolist()

    def numbers(self, count: int, bits: int) -> list[int]:
        return np.frombuffer(self.take(count * bits // 8), dtype=f"<u{bits // 8}").tolist()

    def text(self) -> str:
        rest = self.take(len(self._data) - self._at)
        return rest.decode("utf-8", "replace")

    def whole(self, frame: Frame) -> Frame:
        if self._at < len(self._data):
            raise ProtocolError(f"{len(self._data) - self._at} bytes follow it")
        return frame


def _decode_welcome(reader: _Reader) -> Welcome:
    version, context, sequences, round_s, tokens, slope, kinds = reader.unpack(_WELCOME)
    if not 0.0 <= round_s < 1e6 or not 0.0 <= slope < 1e6:  # not a number fails, too
        raise ProtocolError("a round of no finite length")
    if not tokens:
        raise ProtocolError("a round without tokens")
    outcomes = {}
    for _ in range(kinds):
        length, depths = reader.unpack(_KIND)
        kind = reader.take(length).decode("utf-8", "replace")
        outcomes[kind] = [[float(count) for count in reader.unpack(_OUTCOME)] for _ in range(depths)]
        if any(hits > tries for hits, tries in outcomes[kind]):
            raise ProtocolError("more tokens accepted than tried")
    return Welcome(context, sequences, round_s, reader.text(), version, tokens, slope, outcomes)


def _decode_order(reader: _Reader) -> DraftOrder:
    seq, version, kept, assumed, depth, nodes, top, bits, heat, least, paid, free_ms, count = reader.unpack(_DRAFT)
    if bits not in PROB_BITS or not 0.0 <= heat <= MAX_TEMPERATURE:
        raise ProtocolError("limits of an order out of their range")
    if (
        not depth
        or not nodes
        or max(kept, count) > MAX_CONTEXT_TOKENS
        or not kept + count > 0
        or assumed > kept + count
    ):
        raise ProtocolError("an order without room, or without tokens")
    tokens = reader.tokens(count)
    limits = (depth, nodes, top, bits, heat, least / 65535.0, paid / 65535.0, free_ms)
    return DraftOrder(seq, version, kept, assumed, tokens, *limits)


def _decode_tree(reader: _Reader) -> Tree:
    seq, version, server_us, round_us, nodes, num_distributions, bits = reader.unpack(_TREE)
    if bits not in PROB_BITS:
        raise ProtocolError(f"probabilities of {bits} bits")
    tokens, parents = reader.tokens(nodes), [parent - 1 for parent in reader.take(nodes)]
    if any(parent >= node for node, parent in enumerate(parents)):
        raise ProtocolError("a node before its parent")
    if len(set(zip(parents, tokens, strict=True))) < nodes:
        raise ProtocolError("two children of one node with the same token")
    top = (1 << bits) - 1
    tree = Tree(seq, version, server_us, round_us, tokens, parents, prob_bits=bits)
    tree.probs = [number / top for number in reader.numbers(nodes, bits)]
    for _ in range(num_distributions):
        node, count = reader.unpack(_DISTRIBUTION)
        found = Distribution(reader.tokens(count), reader.numbers(count, bits))
        if node > nodes or node - 1 in tree.distributions or not count or 0 in found.weights:
            raise ProtocolError("a distribution of no node, or without weight")
        if len(set(found.tokens)) < count:
            raise ProtocolError("a distribution with a token twice")
        tree.distributions[node - 1] = found
    return tree
