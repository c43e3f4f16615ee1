"""What can be seen of drafted prompts, and how far their answers are from exact prefill's: held-out windows of text.

    python -m forerun_research.scripts.drafted_signals PROFILE --target TARGET --draft-model DRAFT --text TEXTS \\
        --out SIGNALS.npz [--window 2048] [--windows 256] [--shares 0,0.05,0.1,0.2,0.3] [--read 0,2048]

Of each window at each share of recomputed tokens: KL and agreement over the 64 tokens that follow, and signals that a
gate could go by: attention on what stays drafted by the last 64, 16 and 1 tokens and by thirds of the layers, what the
tail says (entropy, surprise) and how much the recomputing changes that, and, as an oracle, attention times the true
error of drafted V. `--read`: windows of the draft's layers while it reads, 0 for none; all but the lowest two layers
have them. Plain networks, so that times mean nothing. Arrays are written as windows are done.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.build import choose_device
from forerun.prefill.calibration.dense import DenseModel
from forerun.prefill.calibration.model_pair import FIRST_TOKENS, TAIL_TOKENS, DraftedWindows, ModelPair, with_ends
from forerun.prefill.calibration.quality import compare
from forerun.prefill.calibration.setup import FitSettings, open_models
from forerun.prefill.calibration.windows import WindowSettings, read_windows
from forerun.prefill.maps import Maps
from forerun.prefill.profile import Profile

WIDE_LAYERS = 2  # lowest layers of a draft that read without a window
HELD_SHARE = 0.1  # of the text, as in calibration: the same files are held out where the seed is the same
SPANS = {
    "64": slice(0, TAIL_TOKENS),
    "16": slice(TAIL_TOKENS - 16, TAIL_TOKENS),
    "1": slice(TAIL_TOKENS - 1, TAIL_TOKENS),
}


class LayerAttention:
    """Attention of a prompt's tail over all entries, [layers, tail, T], mean over heads."""

    def __init__(self, queries: slice, scale: float) -> None:
        self.queries, self.scale, self.layers = queries, scale, list[Tensor]()

    def __call__(self, layer: int, q: Tensor, k: Tensor, positions: Tensor) -> None:
        rows = positions[0, self.queries]  # [Q]
        group = q.shape[1] // k.shape[1]
        mine = q[0, :, self.queries].unflatten(0, (k.shape[1], group))  # [Hkv, G, Q, D]
        scores = (mine @ k[0, :, None].transpose(-1, -2)).float() * self.scale  # [Hkv, G, Q, T]
        scores = scores.masked_fill(torch.arange(k.shape[2], device=k.device) > rows[:, None], float("-inf"))
        self.layers.append(F.softmax(scores, -1).mean((0, 1)))

    def stacked(self) -> Tensor:
        return torch.stack(self.layers)


def reading(source: DenseModel, window: int) -> DenseModel:
    """The draft as it reads long prompts: windows in all but its lowest layers; 0: itself."""
    if not window:
        return source
    return DenseModel(source.config.narrowed(window, WIDE_LAYERS), source.weights)


@torch.no_grad()
def signals(pair: ModelPair, maps: Maps, tokens: Tensor, ahead: int, shares: list[float]) -> dict[str, list[float]]:
    """Of one window [1, T], a list over the shares for each name."""
    target, end = pair.target, tokens.shape[1] - ahead - TAIL_TOKENS
    exact = target.trace(tokens)
    kv = maps(pair.features(tokens, exact).to(maps.down.dtype)).to(target.dtype)
    seen = LayerAttention(slice(FIRST_TOKENS, FIRST_TOKENS + TAIL_TOKENS), target.config.scale)
    none = torch.zeros(1, 0, dtype=torch.int64, device=tokens.device)
    pair.recompute(exact, kv, with_ends(none, end, end + TAIL_TOKENS), seen)
    attention = seen.stacked()[:, :, :end]  # [layers, tail, end]
    drafted = DraftedWindows(pair, tokens, ahead, exact, kv, F.pad(attention.mean(0), (0, tokens.shape[1] - end))[None])
    error = _value_errors(pair, exact.kv, kv)[:end]  # [end]
    first, found = None, dict[str, list[float]]()
    for share in shares:
        chosen = drafted.choose(share)
        x = drafted.recompute(chosen)
        quality = compare(drafted, x)
        stays = torch.ones(end, device=tokens.device)
        stays[:FIRST_TOKENS] = 0.0
        stays[chosen[0]] = 0.0
        tail = x[:, -ahead - TAIL_TOKENS : -ahead]  # [1, tail, hidden]
        logp = F.log_softmax(target.logits(tail[0]).float(), -1)
        first = (logp, tail) if first is None else first
        row = {"kl": quality.kl.mean(), "kl8": quality.kl[:, :8].mean(), "top1": quality.same.float().mean()}
        row |= {f"left {name}": (attention[:, span].mean((0, 1)) * stays).sum() for name, span in SPANS.items()}
        thirds = attention.mean(1).tensor_split(3)
        row |= {f"left third {i}": (part.mean(0) * stays).sum() for i, part in enumerate(thirds)}
        row["left most"] = (attention.mean(0) * stays).sum(-1).max()
        row["left error"] = (attention.mean((0, 1)) * stays * error).sum()  # an oracle
        row["entropy"] = -(logp.exp() * logp).sum(-1).mean()
        row["surprise"] = -logp[:-1].gather(1, tokens[0, end + 1 : end + TAIL_TOKENS, None]).mean()
        row["change"] = F.kl_div(first[0], logp, log_target=True, reduction="none").sum(-1).mean()
        row["change 8"] = F.kl_div(first[0][-8:], logp[-8:], log_target=True, reduction="none").sum(-1).mean()
        row["turned"] = 1.0 - F.cosine_similarity(first[1].float(), tail.float(), dim=-1).mean()
        for name, value in row.items():
            found.setdefault(name, []).append(float(value))
    return found


def _value_errors(pair: ModelPair, exact: list[tuple[Tensor, Tensor]], kv: Tensor) -> Tensor:
    """[T] of drafted V, relative, mean over layers."""
    parts = kv[0].unflatten(-1, (pair.mapped, 2, pair.target.config.kv_size))[:, :, 1].float()  # [T, mapped, kv]
    true = torch.stack([v[0] for _, v in exact[pair.base :]], 1).float()
    return ((parts - true).norm(dim=-1) / true.norm(dim=-1).clamp_min(1e-6)).mean(1)


def measure(
    pair: ModelPair,
    maps: Maps,
    windows: Tensor,
    kinds: list[tuple[str, ...]],
    args: argparse.Namespace,
    save: Callable[[dict[str, np.ndarray]], None],
) -> None:
    """`save` gets all arrays, [windows, readings, shares] each, every few windows."""
    found, start = dict[str, list[list[list[float]]]](), time.monotonic()
    pairs = [replace(pair, source=reading(pair.source, window)) for window in args.read]
    for number, row in enumerate(windows):
        tokens = row[None].to(pair.target.device).long()
        each = [signals(one, maps, tokens, args.ahead, args.shares) for one in pairs]
        for name in each[0]:
            found.setdefault(name, []).append([one[name] for one in each])
        over = time.monotonic() - start > args.seconds or number + 1 == len(windows)
        if over or number % 16 == 15:
            arrays = {name: np.array(values, dtype=np.float32) for name, values in found.items()}
            about = {"kinds": np.array([" ".join(kind) for kind in kinds[: number + 1]])}
            about |= {"shares": np.array(args.shares), "read": np.array(args.read)}
            save(arrays | about)
            print(f"{time.monotonic() - start:6.1f} s: {number + 1} windows", flush=True)
        if over:
            break


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What can be seen of drafted prompts, and what becomes of them.")
    parser.add_argument("profile", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--ahead", type=int, default=64)
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--shares", type=_floats, default=[0.0, 0.05, 0.1, 0.15, 0.2, 0.3])
    parser.add_argument("--read", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(given)
    length = args.window + args.ahead
    text = WindowSettings(args.window, args.ahead, tokens=int(args.windows * length / HELD_SHARE), held=HELD_SHARE)
    models = open_models(args.target, args.draft_model, FitSettings(maps=str(args.profile)), length)
    windows = read_windows(args.text, models.target.tokenizer(), text, quiet=True)
    pair = models.build(choose_device(args.device), quiet=True)
    maps = Profile.load(args.profile).maps.to(pair.target.device, pair.target.dtype)
    print(f"{len(windows.held)} windows of {length} tokens", flush=True)
    measure(
        pair,
        maps,
        windows.held[: args.windows],
        windows.kinds,
        args,
        lambda found: np.savez(args.out, allow_pickle=False, **found),
    )
    return 0


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
