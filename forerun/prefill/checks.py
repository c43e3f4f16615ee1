"""Checks of drafted K/V: at checkpoint spans, what lay in the pages before a round of repair against what it left.

Signals, per layer and span, where something was drafted:
- `key`, `value`: norm of the difference over the norm of what was recomputed; K as it is stored, rotated.
- `attention`: cosine of two attention outputs of the span's own rows, mean over rows. Their keys are a sample of the
  prompt: its first entries and all checkpoint entries up to the row; one output reads the recomputed K/V of the
  checkpoints, the other the drafted. So it is what a row would see if all of the prompt were drafted, or nothing of it,
  for the price of some eighty keys a row.
- `hidden`: cosine of the two hidden states that the layer's attention leaves, with these outputs added to the row's
  own stream.
- `kl`: of the tail's next-token distributions, between two rounds of repair; one number for the prompt, if there were
  two rounds.

In a second round "drafted" is what the first one left: a span passes once more repair around it changes little. The
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

from forerun.core import PrefillReport
from forerun.errors import BadProfile
from forerun.models.decoder import Watch
from forerun.models.linear import rms_norm
from forerun.models.runner import Runner
from forerun.prefill.attention_scores import slots_of
from forerun.prefill.plan import Checkpoint

SIGNALS = ("key", "value", "attention", "hidden")
COSINES = ("attention", "hidden")  # larger is better


@dataclass
class Scores:
    """`values[signal]`: [layers, spans]."""

    values: dict[str, np.ndarray]
    base: int  # layers below it were not drafted
    kl: float | None = None
    finite: np.ndarray = field(default_factory=lambda: np.ones(0, dtype=bool))  # [spans] whether drafts were numbers

    def passed(self, thresholds: dict[str, list[float]], failing: float) -> np.ndarray:
        """[spans] whether at most a share `failing` of the drafted layers is worse than its threshold somewhere."""
        layers, spans = self.values["key"].shape
        bad = np.zeros((layers, spans), dtype=bool)
        for signal, values in self.values.items():
            if signal not in thresholds:
                continue
            limit = np.array(thresholds[signal], dtype=np.float64)[:, None]
            bad |= ~(values >= limit if signal in COSINES else values <= limit)  # what is not a number fails
        return (bad[self.base :].sum(0) <= failing * (layers - self.base)) & self.finite

    def verdict(self, thresholds: dict[str, list[float]], failing: float) -> np.ndarray:
        """[spans] what passed. After a first round the tail's own answer decides, where it is said how much it may
        still move."""
        if self.kl is not None and "kl" in thresholds:
            return self.finite & (self.kl <= thresholds["kl"][0])
        return self.passed(thresholds, failing)

    def means(self) -> dict[str, list[float]]:
        """Per signal the mean over spans, layer by layer."""
        return {signal: np.nan_to_num(values.mean(1)).round(5).tolist() for signal, values in self.values.items()}

    def of_span(self, span: int) -> dict[str, float]:
        """Per signal the mean over the drafted layers."""
        means = {signal: values[self.base :, span].mean() for signal, values in self.values.items()}
        return {signal: round(float(np.nan_to_num(mean)), 5) for signal, mean in means.items()}

    def write(self, report: PrefillReport, spans: list[Checkpoint], passed: np.ndarray) -> None:
        """Means per layer are of the first round, when all that was drafted is compared."""
        if report.rounds == 1:
            report.scores |= self.means()
        if self.kl is not None:
            report.scores.setdefault("kl", []).append(round(self.kl, 6))  # one for each further round
        for i, span in enumerate(spans):
            about = {"round": report.rounds, "first": span.first, "tokens": span.count, "passed": bool(passed[i])}
            report.spans.append(about | self.of_span(i))


class Checker:
    """Remembers what a round of repair is going to overwrite at the checkpoints, watches it, and compares.

    While rows run it only keeps their queries and inputs; all layers are compared at once in the end, because on a
    device many small steps in every layer would cost more than what they compute.
    """

    def __init__(self, runner: Runner, pages: array[int], spans: list[Checkpoint], base: int, sinks: int) -> None:
        """`sinks`: entries at the start of the prompt that are exact."""
        self._decoder, self._kv, self.spans, self._base = runner.decoder, runner.kv, spans, base
        device = runner.decoder.device
        self._entries = np.concatenate([span.entries for span in spans])  # [C]
        span = np.repeat(np.arange(len(spans)), [span.count for span in spans])
        self._member = F.one_hot(torch.from_numpy(span), len(spans)).float().to(device)  # [C, spans]
        every = np.concatenate((np.arange(sinks), self._entries))
        slots = np.array(pages, dtype=np.int64)[every // runner.pool.page_size] * runner.pool.page_size
        self._slots = torch.from_numpy(slots + every % runner.pool.page_size).to(device)  # [sinks + C]
        self._keys, self._sinks = torch.from_numpy(every).to(device), sinks
        self._drafted = self._read()
        self._inputs: dict[int, list[Tensor]] = {}  # layer -> rows of checkpoints, in order
        self._queries: dict[int, list[Tensor]] = {}

    def _read(self) -> list[Tensor]:
        """K and V of the drafted layers at sinks and checkpoints, as they are now: [layers, sinks + C, Hkv, D] each."""
        drafted = self._kv[self._base :]
        return [torch.stack([layer[j].index_select(0, self._slots) for layer in drafted]) for j in (0, 1)]

    def watch(self, entries: np.ndarray) -> Watch | None:
        """For a pass over rows of these entries; None where no checkpoint is among them."""
        here = np.flatnonzero(np.isin(entries, self._entries))
        if not len(here):
            return None
        rows = torch.from_numpy(here).to(self._decoder.device)

        def look(layer: int, x: Tensor, q: Tensor | None, a: Tensor | None) -> None:
            if q is not None and layer >= self._base and q.shape[0] == len(entries):  # in the last layer rows are gone
                self._inputs.setdefault(layer, []).append(x.index_select(0, rows))
                self._queries.setdefault(layer, []).append(q.index_select(0, rows))

        return look

    @torch.inference_mode()
    def scores(self, kl: float | None = None) -> Scores:
        """Once all checkpoint rows have run."""
        now, found = self._read(), {}
        for signal, drafted, true in zip(("key", "value"), self._drafted, now, strict=True):
            old, new = (t[:, self._sinks :].float().flatten(2) for t in (drafted, true))  # [layers, C, Hkv * D]
            apart, norm = ((t.square().sum(-1) @ self._member) for t in (old - new, new))  # [layers, spans]
            found[signal] = (apart / norm.clamp_min(1e-20)).sqrt()
        for signal, cosines in self._cosines(now).items():
            found[signal] = (cosines @ self._member) / self._member.sum(0)  # [layers, spans]
        told = torch.cat(list(found.values())).cpu().numpy()  # at once: each copy would wait for the device
        layers, spans, at = self._decoder.config.num_layers, len(self.spans), 0
        values = {signal: np.full((layers, spans), float(signal in COSINES)) for signal in SIGNALS}
        for signal, figures in found.items():
            values[signal][self._base : self._base + len(figures)] = told[at : at + len(figures)]
            at += len(figures)
        finite = np.isfinite(values["key"]).all(0) & np.isfinite(values["value"]).all(0)
        return Scores(values, self._base, kl, finite)

    def _cosines(self, now: list[Tensor]) -> dict[str, Tensor]:
        """Per signal [layers that were watched, C]."""
        config, watched = self._decoder.config, sorted(self._queries)
        if not watched:
            return {}
        assert watched == list(range(self._base, self._base + len(watched)))
        x = torch.stack([torch.cat(self._inputs[i]) for i in watched])  # [n, C, hidden]
        q = torch.stack([torch.cat(self._queries[i]) for i in watched]).transpose(1, 2).float()  # [n, Hq, C, D]
        assert x.shape[1] == len(self._entries), "not all checkpoint rows have run"
        visible = torch.stack([self._visible(config.window(i)) for i in watched])[:, None]  # [n, 1, C, keys]
        both = []
        for drafted in (False, True):
            k, v = (t[: len(watched)].clone() for t in now)
            if drafted:
                for cache, old in zip((k, v), self._drafted, strict=True):
                    cache[:, self._sinks :] = old[: len(watched), self._sinks :]
            keys, values = (t.transpose(1, 2).float() for t in (k, v))  # [n, Hkv, keys, D]
            out = F.scaled_dot_product_attention(q, keys, values, visible, scale=config.scale, enable_gqa=True)
            both.append(out.transpose(1, 2).flatten(2))  # [n, C, Hq * D]
        rows = torch.cat(both, 1)  # [n, 2 C, Hq * D]
        streams = torch.stack([self._stream(i, x[n], rows[n]) for n, i in enumerate(watched)])  # [n, 2 C, hidden]
        pairs = {"attention": both, "hidden": streams.chunk(2, 1)}
        return {signal: F.cosine_similarity(pair[0], pair[1], dim=-1) for signal, pair in pairs.items()}

    def _visible(self, window: int | None) -> Tensor:
        """[C, keys]: which of the sampled keys each checkpoint row sees."""
        own = self._keys[self._sinks :, None]
        seen = self._keys <= own
        return seen if window is None else seen & (self._keys > own - window)

    def _stream(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        """Hidden states after a layer's attention: [C, hidden], [2 C, Hq * D] -> [2 C, hidden]."""
        w, x = self._decoder.layers[layer], x.repeat(2, 1)
        added = w.o(attended.to(x.dtype))
        return (x + (added if w.post_attn_norm is None else rms_norm(added, w.post_attn_norm))).float()


def check_thresholds(thresholds: dict[str, list[float]], layers: int) -> None:
    """Raise unless they are for a target of so many layers."""
    for signal, limits in thresholds.items():
        if len(limits) != (1 if signal == "kl" else layers):
            raise BadProfile(
                f"the profile has {len(limits)} thresholds for {signal!r}, the target has {layers} layers",
                "calibrate again: forerun calibrate --target ... --out PROFILE",
            )


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
