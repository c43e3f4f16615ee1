"""Does a draft need the target's tokenizer? Hidden states of a model with another one, carried over by places in the
text and mapped to the target's K/V.

    python -m forerun_research.scripts.other_tokenizer TEXTS --target TARGET --drafts DRAFT,OTHER --out ROWS.jsonl \\
        [--windows 192] [--held 48] [--share 0,0.1,0.2]

Each draft reads the text in its own tokens to 60% of its layers; a token of the target gets the hidden states of the
last token that ends where it ends or before. Maps from those and from the target's own embedding are fitted by ridge
regression, without distillation. Beside them maps from the embedding alone: what no draft at all gives. A line for each
draft and share. Plain networks: times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.models.build import choose_device
from forerun.models.fetch.store import resolve
from forerun.models.formats.checkpoint import Checkpoint, open_checkpoint
from forerun.prefill.calibration.dense import DenseModel, LayerActivations
from forerun.prefill.calibration.fit import _examples
from forerun.prefill.calibration.model_pair import ModelPair
from forerun.prefill.calibration.quality import evaluate
from forerun.prefill.calibration.ridge import Ridge
from forerun.prefill.calibration.setup import DRAFT_LAYER_SHARE, MAX_DEFAULT_RANK
from forerun.prefill.calibration.windows import WindowSettings, read_windows
from forerun.prefill.cross_scores import TokenAlignment
from forerun.prefill.maps import unit
from forerun.text.tokenizer import Tokenizer
from forerun_research.studies.intervals import bootstrap

BATCH = 4  # windows at a time
NONE = "none"  # no draft: the target's embedding alone


@dataclass
class TextPair(ModelPair):
    """A source that may have another tokenizer: it reads the text, not the tokens. No taps: nothing is read."""

    tokenizers: tuple[Tokenizer, Tokenizer]  # of the target and of the source

    def features(self, tokens: Tensor, exact: LayerActivations) -> Tensor:
        own = unit(exact.hidden[0])
        if not self.taps:
            return own
        return torch.cat((torch.stack([self._read(row) for row in tokens]), own), -1)

    def _read(self, tokens: Tensor) -> Tensor:
        """[T, taps * hidden] of the tokens [T] of one window."""
        alignment = TokenAlignment(tokens.tolist(), *self.tokenizers)
        ids = torch.tensor([alignment.ids], device=tokens.device)
        read = self.source.trace(ids, max(*self.taps, 1), keep_kv=False)
        at = torch.from_numpy(alignment.last_read().clip(min=0)).to(tokens.device)
        return torch.cat([unit(read.hidden[tap][0]).index_select(0, at) for tap in self.taps], -1)


def made_pair(target: tuple[Checkpoint, DenseModel], name: str, device: torch.device) -> TextPair:
    checkpoint, model = target
    if name == NONE:
        return TextPair(model, DenseModel(model.config, model.weights), (), 1, (checkpoint.tokenizer(),) * 2)
    draft = open_checkpoint(resolve(name))
    source = DenseModel.from_checkpoint(draft, device, model.dtype, quiet=True)
    taps = tuple(range(round(DRAFT_LAYER_SHARE * draft.config.num_layers) + 1))
    return TextPair(model, source, taps, 1, (checkpoint.tokenizer(), draft.tokenizer()))


def fitted_quality(pair: TextPair, train: Tensor, held: Tensor, args: argparse.Namespace) -> list[dict[str, object]]:
    device, config = pair.target.device, pair.target.config
    ridge = Ridge(pair.inputs, pair.width, device)
    for rows in train.split(BATCH):
        ridge.add(*_examples(pair, rows.to(device).long()))
    rank = min(MAX_DEFAULT_RANK, config.hidden_size, pair.inputs, pair.width)
    maps = ridge.fit(pair.taps, pair.base, config.kv_size, rank, rank, 1e-3, target_embedding=True)
    found = []
    for share in args.share:
        quality = evaluate(pair, maps, held, args.ahead, share, BATCH)
        low, high = bootstrap([quality.kl.mean(1).tolist()])
        row = {"share": share, "windows": len(held), "kl": quality.divergence, "kl low": low, "kl high": high}
        found.append(row | {"top1": quality.agreement})
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Does a draft need the target's tokenizer?")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafts", required=True, help="models, by commas; the embedding alone comes by itself")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--ahead", type=int, default=64)
    parser.add_argument("--windows", type=int, default=192)
    parser.add_argument("--held", type=int, default=48)
    parser.add_argument("--share", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.1, 0.2])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(given)
    start, device = time.monotonic(), choose_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    checkpoint = open_checkpoint(resolve(args.target))
    held = args.held / (args.windows + args.held)
    tokens = (args.window + args.ahead) * (args.windows + args.held) + 1
    recipe = WindowSettings(args.window, args.ahead, tokens, held=min(0.5, held), copy=0.0, recall=0.0)
    windows = read_windows([args.texts], checkpoint.tokenizer(), recipe, quiet=True)
    target = checkpoint, DenseModel.from_checkpoint(checkpoint, device, dtype, quiet=True)
    for name in (*args.drafts.split(","), NONE):
        for row in fitted_quality(made_pair(target, name, device), windows.train, windows.held, args):
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"draft": name, **row, "seconds": round(time.monotonic() - start, 1)}) + "\n")
            print(name, row, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
