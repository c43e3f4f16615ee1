"""Checks of drafted K/V: at check spans, what lay in the pages before a round of recomputing against what it left.

Signals, per layer and span, where something was drafted:
- `key`, `value`: norm of the difference over the norm of what was recomputed; K as it is stored, rotated.
- `attention`: cosine of two attention outputs of the span's own rows, mean over rows. Their keys are a sample of the
  prompt: its first entries and all check spans' entries up to the row; one output reads the recomputed K/V of the
  spans, the other the drafted. So it is what a row would see if all of the prompt were drafted, or nothing of it,
  for the price of some eighty keys a row.
- `hidden`: cosine of the two hidden states that the layer's attention leaves, with these outputs added to the row's
  own stream.
- `kl`: of the tail's next-token distributions, between two rounds of recomputing; one number for the prompt, if there
  were two rounds.

In a second round "drafted" is what the first one left: a span passes once recomputing more changes little in it. The
last layer has no `attention` and no `hidden`, as rows leave the pass there with their K/V. What was not measured is
perfect: 0 for errors, 1 for cosines. Knows no plan, and no thresholds but those it is handed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.cache.pool import slots_of
from forerun.core import PrefillReport
from forerun.core.batch import send
from forerun.errors import BadProfile
from forerun.models.decoder import PickedRows, RecomputePass, RowPicker, Watch
from forerun.models.execution.runner import Runner
from forerun.models.linear import rms_norm

SIGNALS = ("key", "value", "attention", "hidden")
COSINES = ("attention", "hidden")  # larger is better


@dataclass(frozen=True)
class CheckSpan:
    """Entries first .. first + count, where drafted and recomputed K/V are compared; they stand for lo .. hi."""

    first: int
    count: int
    lo: int
    hi: int

    @property
    def entries(self) -> np.ndarray:
        return np.arange(self.first, self.first + self.count)


@dataclass
class Scores:
    """`values[signal]`: [layers, spans]."""

    values: dict[str, np.ndarray]
    base: int  # layers below it were not drafted
    kl: float | None = None
    finite: np.ndarray = field(default_factory=lambda: np.ones(0, dtype=bool))  # [spans] whether drafts were numbers

    def passed(self, thresholds: dict[str, list[float]], failing: float, times: float = 1.0) -> np.ndarray:
        """[spans] whether at most a share `failing` of the drafted layers is worse than its threshold somewhere, by
        more than so many `times` the error that it allows."""
        layers, spans = self.values["key"].shape
        bad = np.zeros((layers, spans), dtype=bool)
        for signal, values in self.values.items():
            if signal not in thresholds:
                continue
            limit = np.array(thresholds[signal], dtype=np.float64)[:, None]
            limit = 1.0 - times * (1.0 - limit) if signal in COSINES else times * limit
            bad |= ~(values >= limit if signal in COSINES else values <= limit)  # what is not a number fails
        return (bad[self.base :].sum(0) <= failing * (layers - self.base)) & self.finite

    def verdict(self, thresholds: dict[str, list[float]], failing: float) -> np.ndarray:
        """[spans] what passed. After a first round the tail's own distributions decide, where there is a threshold for
        how much they may still move."""
        if self.kl is not None and "kl" in thresholds:
            return self.finite & (self.kl <= thresholds["kl"][0])
        return self.passed(thresholds, failing)

    def means(self) -> dict[str, list[float]]:
        """Per signal the mean over spans, layer by layer."""
        found = np.nan_to_num(self._stacked.mean(2)).round(5).tolist()
        return dict(zip(self.values, found, strict=True))

    def of_spans(self) -> list[dict[str, float]]:
        """Per signal the mean over the drafted layers, span by span."""
        means = np.nan_to_num(
            self._stacked[:, self.base :].transpose(2, 0, 1).copy().mean(2)
        ).tolist()  # [spans][signals]
        return [{s: round(mean, 5) for s, mean in zip(self.values, own, strict=True)} for own in means]

    @property
    def _stacked(self) -> np.ndarray:
        """[signals, layers, spans]: one array, as a first token waits for each call of numpy."""
        return np.stack(list(self.values.values()))

    def write(self, report: PrefillReport, spans: list[CheckSpan], passed: np.ndarray) -> None:
        """Means per layer are of the first round, when all that was drafted is compared."""
        if report.rounds == 1:
            report.scores |= self.means()
        if self.kl is not None:
            report.scores.setdefault("kl", []).append(round(self.kl, 6))  # one for each further round
        for i, (span, means) in enumerate(zip(spans, self.of_spans(), strict=True)):
            about = {"round": report.rounds, "first": span.first, "tokens": span.count, "passed": bool(passed[i])}
            report.spans.append(about | means)


@dataclass
class _Pass:
    """Rows of check spans in one pass of the target, layer by layer."""

    inputs: RowPicker  # [hidden] each
    queries: RowPicker  # [Hq, D] each
    layers: list[int] = field(default_factory=list)

    def flush(self) -> None:
        self.inputs.flush()
        self.queries.flush()


class Checker:
    """Remembers what a round of recomputing is going to overwrite at the check spans, watches it, and compares.

    While rows run it only keeps their queries and inputs; all layers are compared at once in the end, because on a
    device many small steps in every layer would cost more than what they compute.
    """

    def __init__(
        self, runner: Runner, pages: array[int], spans: list[CheckSpan], base: int, sinks: int, whole: bool = True
    ) -> None:
        """`sinks`: entries at the start of the prompt that are exact. `whole`: False where K/V alone is compared."""
        self._whole = whole
        self._runner, self._decoder, self._all_layers_kv = runner, runner.decoder, runner.all_layers_kv
        self.spans, self._base = spans, base
        self._entries = np.concatenate([span.entries for span in spans])  # [C]
        span = np.repeat(np.arange(len(spans)), [span.count for span in spans])
        self._member = self._send(np.eye(len(spans), dtype=np.float32)[span])  # [C, spans]
        self._every, self._sinks = np.concatenate((np.arange(sinks), self._entries)), sinks  # [keys]
        slots = np.array(pages, dtype=np.int64)[self._every // runner.pool.page_size] * runner.pool.page_size
        self._slots = self._send(slots + self._every % runner.pool.page_size)  # [keys]
        self._drafted = self._all_layers_kv.read(base, self._slots)  # [2, layers, keys, Hkv, D]
        self._passes: list[_Pass] = []

    def _send(self, values: np.ndarray) -> Tensor:
        return send(values, self._decoder.device)

    def among(self, entries: np.ndarray) -> np.ndarray:
        """Which of these entries, in order, are check spans'; none where their rows are not compared."""
        if not self._whole:
            return np.zeros(0, dtype=np.int64)
        at = np.searchsorted(self._entries, entries).clip(max=len(self._entries) - 1)
        return np.flatnonzero(self._entries[at] == entries)

    def watch(self, entries: np.ndarray) -> Watch | None:
        """For a pass over rows of these entries; None where no check span is among them."""
        here = self.among(entries)
        if not len(here):
            return None
        for earlier in self._passes:
            earlier.flush()
        rows = self._send(here)
        seen = _Pass(self._all_layers_kv.row_picker(rows), self._all_layers_kv.row_picker(rows))
        self._passes.append(seen)

        def record(layer: int, x: Tensor, q: Tensor | None, a: Tensor | None) -> None:
            if q is not None and layer >= self._base and q.shape[0] == len(entries):  # in the last layer rows are gone
                seen.layers.append(layer)
                seen.inputs.add(x)
                seen.queries.add(q)

        return record

    def saw(self, recompute: RecomputePass) -> None:
        """The same of a pass that picked its check rows by itself."""
        layers = list(range(self._base, recompute.x.shape[0]))
        if recompute.x.shape[1] and layers:
            x, q = (PickedRows(rows[self._base :]) for rows in (recompute.x, recompute.q))
            self._passes.append(_Pass(x, q, layers))

    @torch.inference_mode()
    def scores(self, kl: float | None = None) -> Scores:
        """Once all check rows have run."""
        seen = self._seen()
        inputs = (self._all_layers_kv.read(self._base, self._slots), self._drafted, self._member, *seen)
        measured = self._runner.recorded(("checks", self._base, self._sinks), self._compare, *inputs).cpu().numpy()
        count, spans, base = self._decoder.config.num_layers, len(self.spans), self._base
        watched = len(self._passes[0].layers) if seen else 0
        signals = SIGNALS if self._whole else SIGNALS[:2]
        values = {signal: np.full((count, spans), float(signal in COSINES)) for signal in signals}
        sizes = (count - base, count - base, watched, watched)[: len(signals)]
        for signal, figures in zip(signals, np.split(measured, np.cumsum(sizes)[:-1]), strict=True):
            values[signal][base : base + len(figures)] = figures
        finite = np.isfinite(values["key"]).all(0) & np.isfinite(values["value"]).all(0)
        return Scores(values, base, kl, finite)

    def _seen(self) -> tuple[Tensor, ...]:
        """Inputs [n, C, hidden] and queries [n, C, Hq, D] of the n layers that were watched, and what they see; nothing
        where none were."""
        if not any(seen.layers for seen in self._passes):
            return ()
        watched = self._passes[0].layers
        assert all(seen.layers == watched for seen in self._passes)
        assert watched == list(range(self._base, self._base + len(watched)))
        x = torch.cat([seen.inputs.picked() for seen in self._passes], 1)
        q = torch.cat([seen.queries.picked() for seen in self._passes], 1)
        assert x.shape[1] == len(self._entries), "not all check rows have run"
        return x, q, self._mask(watched)

    def _compare(self, now: Tensor, drafted: Tensor, member: Tensor, *seen: Tensor) -> Tensor:
        """All signals, one after the other: [layers of each, spans]. K/V is [2, layers, keys, Hkv, D]; reads no other
        tensor of this prompt."""
        both = torch.stack((now, drafted)).float()
        new, old = both[:, :, :, self._sinks :].flatten(4)  # [2, layers, C, Hkv * D] each
        apart, norm = ((t.square().sum(-1) @ member) for t in (old - new, new))  # [2, layers, spans]
        found = (apart / norm.clamp_min(1e-20)).sqrt().flatten(0, 1)
        if not seen:
            return found
        cosines = torch.stack(self._cosines(both, *seen)) @ member / member.sum(0)  # [2, n, spans]
        return torch.cat((found, cosines.flatten(0, 1)))

    def _cosines(self, both: Tensor, x: Tensor, q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """`attention` and `hidden`, [layers that were watched, C] each, from K/V [now or drafted, 2, layers, keys, Hkv,
        D], of which drafted sinks are overwritten."""
        config, (n, count, heads, dim) = self._decoder.config, q.shape
        # heads that share a KV head are rows of one head: kernels take those and a mask without copies of K and V
        group = heads // config.num_kv_heads
        rows = both.new_empty(2, n, config.num_kv_heads, group, count, dim)
        rows.copy_(q.view(n, count, -1, group, dim).permute(0, 2, 3, 1, 4))
        both[1, :, :, : self._sinks] = both[0, :, :, : self._sinks]
        keys, values = both[:, :, :n].permute(1, 0, 2, 4, 3, 5).flatten(1, 2)  # [2 n, Hkv, keys, D] each
        out = F.scaled_dot_product_attention(
            rows.view(2 * n, -1, group * count, dim), keys, values, mask.tile(1, 1, group, 1), scale=config.scale
        )
        out = out.view(2, n, -1, group, count, dim).permute(1, 0, 4, 2, 3, 5).flatten(3)  # [n, 2, C, Hq * D]
        return cosine(out), cosine(self._streams(x, out))

    def _mask(self, layers: list[int]) -> Tensor:
        """What is added to scores of the sampled keys for each check row: [1 or 2 n, 1, C, keys]."""
        windows = [self._decoder.config.windows[i] for i in layers]
        kinds, own, masks = list(dict.fromkeys(windows)), self._entries[:, None], []
        for window in kinds:
            seen = (self._every <= own) & (True if window is None else self._every > own - window)
            masks.append(np.where(seen, np.float32(0), np.float32(-np.inf))[None])
        sent = self._send(np.stack(masks))
        if len(kinds) == 1:
            return sent
        return sent.index_select(0, self._send(np.array([kinds.index(window) for window in windows * 2])))

    def _streams(self, x: Tensor, attended: Tensor) -> Tensor:
        """Hidden states after attention: [n, C, hidden], [n, 2, C, Hq * D] -> [n, 2, C, hidden]."""
        added = []
        for i, rows in enumerate(attended.to(x.dtype).flatten(1, 2), self._base):
            w = self._decoder.layers[i]
            out = w.o(rows)
            added.append(out if w.post_attn_norm is None else rms_norm(out, w.post_attn_norm))
        return (x[:, None] + torch.stack(added).view(*attended.shape[:3], -1)).float()


def cosine(pairs: Tensor) -> Tensor:
    """[n, 2, C, D] -> [n, C]."""
    norms = torch.linalg.vector_norm(pairs, dim=-1).clamp_min(1e-8)  # [n, 2, C]
    return (pairs[:, 0] * pairs[:, 1]).sum(-1) / (norms[:, 0] * norms[:, 1])


def check_thresholds(thresholds: dict[str, list[float]], layers: int) -> None:
    """Raise unless they are for a target of so many layers."""
    for signal, limits in thresholds.items():
        if len(limits) != (1 if signal == "kl" else layers):
            problem = f"the profile has {len(limits)} thresholds for {signal!r}, the target has {layers} layers"
            raise BadProfile(problem, "calibrate again: forerun calibrate --target ... --out PROFILE")


def divergence(now: Tensor, before: Tensor) -> float:
    """Mean KL of next-token distributions from logits [N, V]: how much is lost by stopping a round earlier."""
    p, q = now.log_softmax(-1), before.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def wipe(runner: Runner, pages: array[int], first: int, end: int) -> None:
    """Zeros for entries first .. end: what lies beyond a token counts nothing to it, unless it is no number."""
    slots = torch.from_numpy(slots_of(pages, first, end, runner.pool.page_size)).to(runner.decoder.device)
    for cache in (cache for layer in runner.kv for cache in layer):
        cache.index_fill_(0, slots, 0.0)
    runner.decoder.attention.forget()
