"""Calibrated on one kind of text, asked about another: KL and agreement of every pair of kinds.

    python -m forerun_research.scripts.profile_matrix TEXTS --target TARGET --draft-model DRAFT --out MATRIX.jsonl \\
        [--maps PROFILE] [--windows 96] [--held 12] [--share 0.1]

TEXTS is a folder of folders of text, one of each kind (`profile_texts`). Maps are fitted to windows of each kind by
ridge regression, without distillation, and to those of all kinds together (sums add up); each is measured on held-out
windows of every kind. `--maps`: finished profiles that are measured beside them. A line for each pair, as it is done.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.models.build import choose_device
from forerun.prefill.calibration.fit import _examples
from forerun.prefill.calibration.model_pair import ModelPair
from forerun.prefill.calibration.quality import evaluate
from forerun.prefill.calibration.ridge import Ridge
from forerun.prefill.calibration.setup import MAX_DEFAULT_RANK, FitSettings, open_models
from forerun.prefill.calibration.windows import WindowSettings, read_windows
from forerun.prefill.maps import Maps
from forerun.prefill.profile import Profile
from forerun.text.tokenizer import Tokenizer
from forerun_research.studies.intervals import bootstrap

HELD_SHARE = 0.25  # of each kind's text: there are few windows of each


def texts_of(folder: Path, tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each kind windows to fit on and held-out ones, of other files."""
    found = {}
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        tokens = int((args.window + args.ahead) * max(args.windows / (1 - HELD_SHARE), args.held / HELD_SHARE) + 1)
        recipe = WindowSettings(args.window, args.ahead, tokens, held=HELD_SHARE, copy=0.0, recall=0.0)
        windows = read_windows([path], tokenizer, recipe, quiet=True)
        found[path.name] = windows.train[: args.windows], windows.held[: args.held]
    return found


def fitted(pair: ModelPair, windows: dict[str, Tensor], settings: FitSettings) -> dict[str, Maps]:
    """Maps of each kind and of all of them."""
    target, made, every = pair.target, dict[str, Maps](), Ridge(pair.inputs, pair.width, pair.target.device)
    rank = min(settings.rank or MAX_DEFAULT_RANK, target.config.hidden_size, pair.inputs, pair.width)
    for kind, rows in windows.items():
        ridge = Ridge(pair.inputs, pair.width, target.device)
        for some in rows.split(settings.batch):
            ridge.add(*_examples(pair, some.to(target.device).long()))
        for name, value in ridge.state().items():
            setattr(every, name, getattr(every, name) + (int(value) if name == "count" else value))
        made[kind] = _solved(pair, ridge, rank, settings.strength)
    return made | {"all": _solved(pair, every, rank, settings.strength)}


def _solved(pair: ModelPair, ridge: Ridge, rank: int, strength: float) -> Maps:
    kv_size = pair.target.config.kv_size
    return ridge.fit(pair.taps, pair.base, kv_size, rank, rank, strength, pair.target_embedding)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Calibrated on one kind of text, asked about another.")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--maps", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--ahead", type=int, default=64)
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--held", type=int, default=12)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(given)
    start, settings = time.monotonic(), FitSettings(distill=False)
    models = open_models(args.target, args.draft_model, settings, args.window + args.ahead)
    texts = texts_of(args.texts, models.target.tokenizer(), args)
    pair = models.build(choose_device(args.device), quiet=True)
    made = {path.stem: Profile.load(path).maps.to(pair.target.device, torch.float32) for path in args.maps}
    made = fitted(pair, {kind: train for kind, (train, _) in texts.items()}, settings) | made
    for name, maps in made.items():
        for kind, (_, held) in texts.items():
            quality = evaluate(pair, maps, held, args.ahead, args.share)
            each, same = quality.kl.mean(1).tolist(), quality.same.float().mean(1).tolist()
            low, high = bootstrap([each])
            row: dict[str, Any] = {"calibrated on": name, "asked about": kind, "windows": len(held)}
            row |= {"kl": quality.divergence, "kl low": low, "kl high": high, "top1": sum(same) / len(same)}
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | {"seconds": round(time.monotonic() - start, 1)}) + "\n")
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
