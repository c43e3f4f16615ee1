"""Loads a folder that this package wrote with the `speculators` package and compares the draft logits of both.

Run where that package is installed (it is no dependency): `python -m tests.data.speculators.load_ours`. The drafter is
a tiny block with random weights, with the target's head and with one of low rank. All of the text lies within the
sliding window: the package counts it from the anchor, this one and vLLM from each row, which differs by a block at its
far end.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from pathlib import Path

import torch
from speculators.models.dspark import DSparkDraftModel

from forerun.cache.pool import PagePool
from forerun.decode.draft_context import DraftContext
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights, write_speculators
from forerun.models.hidden_draft import BlockModel, build_hidden_draft
from tests import tiny
from tests.train.test_hidden_kinds import TOKENS, trained

CPU, LENGTH, ANCHOR = torch.device("cpu"), 24, 10


def ours(target: Path, folder: Path, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[TOKENS, columns] with the Markov head's part, where each token before is the text's own."""
    checkpoint, weights = open_checkpoint(target), HiddenDrafterWeights.load(folder)
    weights.check(checkpoint)
    decoder, _ = build_decoder(checkpoint, CPU, "float32", 256, quiet=True)
    pool = PagePool(decoder.config, 8, 16, decoder.dtype, CPU)
    runner, pages = Runner(decoder, pool, 256), array("i", [5, 2, 7])
    model = build_hidden_draft(weights, checkpoint, decoder, 256)
    ctx = DraftContext.build(pool, runner, None, 256, model)
    assert isinstance(model, BlockModel) and ctx.hidden_kv is not None and pool.allocate(8)
    slots = torch.from_numpy(runner.batch([Span([0] * ANCHOR, 0, pages, ())]).slot_mapping)
    made = model.project(list(hidden[:ANCHOR].chunk(len(model.depths), -1)))
    model.write_context(made, torch.arange(ANCHOR), slots, ctx.hidden_kv.kv, pool.kv)
    span = Span([int(tokens[ANCHOR]), *[0] * (TOKENS - 1)], ANCHOR, pages, range(TOKENS))
    logits = model.run(runner.batch([span]), ctx.hidden_kv.kv, TOKENS).logits[0]
    return logits + torch.cat([model.bias(token[None]) for token in tokens[ANCHOR : ANCHOR + TOKENS]])


def theirs(target: Path, folder: Path, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)  # the package reads embeddings from there
    (folder / "config.json").write_text(json.dumps(config))
    model = DSparkDraftModel.from_pretrained(folder).float().eval()
    mask = torch.zeros(1, LENGTH)
    mask[0, ANCHOR] = 1
    ids, last = tokens[None], torch.zeros(1, LENGTH, 64)
    with torch.no_grad():
        rows, logits, *_ = model._backbone_forward(hidden[None], ids, mask, last, torch.zeros_like(ids), max_anchors=1)
        before = ids[:, ANCHOR : ANCHOR + TOKENS]
        return (logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=rows))[0]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        target = tiny.write_folder(Path(root) / "target", "llama", vocab_size=520)
        for name in ("block", "low-rank"):
            folder, weights = Path(root) / name, trained(target, name)
            write_speculators(weights, open_checkpoint(target), folder)
            width = len(weights.config["aux_hidden_state_layer_ids"]) * 64
            hidden = torch.randn(LENGTH, width, generator=generator)
            tokens = torch.randint(0, 500, (LENGTH,), generator=generator)
            found = [each(target, folder, hidden, tokens) for each in (ours, theirs)]
            torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0.02)  # embeddings are bfloat16 there
            print(f"{name}: {tuple(found[0].shape)} logits, largest difference {(found[0] - found[1]).abs().max():.1e}")


if __name__ == "__main__":
    main()
