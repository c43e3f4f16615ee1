"""How far a prompt's text is from the text that a profile was calibrated on, from a few hundred of its token ids.

Calibration leaves two tables (how likely a token, and a pair of neighbours, is in its text, by hash) and the features
of held-out windows. The drift of a text is its distance to the nearest of those windows, in units that 95% of them keep
among themselves: up to 1 a text is like the calibration's. Runs no model.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SAMPLED_TOKENS, SAMPLED_SPANS = 64, 4  # tokens of each span, spread evenly over the text
UNIGRAM_BINS, BIGRAM_BINS = 2048, 16384
MAX_WINDOWS = 128  # whose features are kept
LIKE_QUANTILE = 0.95  # of windows whose distance to the nearest other one is at most 1
FEATURES = ("unigram", "bigram", "distinct", "repeated")
_STEP = 0.0625  # nats, of the tables' bytes


@dataclass(frozen=True)
class TextReference:
    """`unigram`, `bigram`: [bins] negative log probability in nats; `windows`: [N, features]; `scale`: [features]."""

    unigram: np.ndarray
    bigram: np.ndarray
    windows: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, train: np.ndarray, held: np.ndarray) -> TextReference:
        """From windows of token ids, [N, T] each; those held out are what other texts are compared with."""
        tables = [
            _surprise(np.bincount(_hashed(train, order).ravel(), minlength=bins))
            for order, bins in ((1, UNIGRAM_BINS), (2, BIGRAM_BINS))
        ]
        empty = cls(tables[0], tables[1], np.zeros((0, len(FEATURES))), np.ones(len(FEATURES)))
        windows = np.stack([empty.features(ids) for ids in held[:MAX_WINDOWS]])
        spread = windows.std(0).clip(min=1e-3)
        apart = _distances(windows, windows, spread)
        np.fill_diagonal(apart, np.inf)
        like = float(np.quantile(apart.min(1), LIKE_QUANTILE)) if len(windows) > 1 else 1.0
        return cls(tables[0], tables[1], windows, spread * max(like, 1e-3))

    def drift(self, ids: Sequence[int] | np.ndarray) -> float:
        """Distance of a text to the nearest held-out window; more than 1: it is not like the calibration's."""
        return float(_distances(self.features(ids)[None], self.windows, self.scale).min())

    def features(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """[features] of a sample of the text."""
        spans = _sample(np.asarray(ids, dtype=np.int64))  # [spans, tokens]
        single, pairs = _hashed(spans, 1), _hashed(spans, 2)
        distinct = len(np.unique(spans)) / spans.size
        repeated = 1.0 - len(np.unique(pairs)) / pairs.size
        return np.array([self.unigram[single].mean(), self.bigram[pairs].mean(), distinct, repeated])

    def record(self) -> dict[str, Any]:
        tables = {name: np.rint(getattr(self, name) / _STEP).clip(0, 255).astype(np.uint8) for name in FEATURES[:2]}
        packed = {name: base64.b64encode(table.tobytes()).decode() for name, table in tables.items()}
        return packed | {"windows": self.windows.round(4).tolist(), "scale": self.scale.round(5).tolist()}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> TextReference:
        unigram, bigram = (
            np.frombuffer(base64.b64decode(record[name]), dtype=np.uint8) * _STEP for name in FEATURES[:2]
        )
        return cls(unigram, bigram, np.array(record["windows"]), np.array(record["scale"]))


def _sample(ids: np.ndarray) -> np.ndarray:
    """[spans, tokens]: consecutive tokens at places spread evenly; of a short text fewer."""
    size = max(2, min(SAMPLED_TOKENS, len(ids) // SAMPLED_SPANS))
    starts = np.linspace(0, len(ids) - size, SAMPLED_SPANS).astype(np.int64)
    return ids[starts[:, None] + np.arange(size)]


def _hashed(ids: np.ndarray, order: int) -> np.ndarray:
    """Bins of tokens, or of pairs of neighbours, in the last dimension."""
    ids = ids.astype(np.int64)
    if order == 1:
        return ids * 2654435761 % 4294967291 % UNIGRAM_BINS
    return (ids[..., :-1] * 2654435761 + ids[..., 1:] * 40503) % 4294967291 % BIGRAM_BINS


def _surprise(counts: np.ndarray) -> np.ndarray:
    return -np.log((counts + 0.5) / (counts.sum() + 0.5 * len(counts)))


def _distances(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """[N, M] Euclidean, each feature in its own unit."""
    return np.sqrt((((a[:, None] - b[None]) / scale) ** 2).mean(-1))
