"""Image tokens: a small autoregressive model of digits, trained on the spot, drafted for by a smaller one.

An image is 8x8 pixels of four levels, 64 tokens behind the token of its class; there is no text and no tokenizer. A
target and a draft model are trained, written as model folders and opened by `LLM(skip_tokenizer_init=True)`. Measured:
passes of the target for images drawn plainly and with drafts (by the draft model, by `suffix`, and by `list:8`, which
knows its place in row and image), the accuracy of a classifier on all, and the same with classifier-free guidance, a
pair of sequences (with the class and with the token of no class). Digits are made from 5x7 bitmaps, shifted, shaded and
with noise.

    python -m forerun_research.scripts.image_tokens --images 100
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from forerun import LLM, SamplingParams, Speculation
from forerun.sharing import guided
from forerun_research.studies.intervals import wilson

SIDE, LEVELS = 8, 4
DRAFTERS = ("off", "model", "suffix", f"list:{SIDE}")  # the last two run no model and learn from earlier images
BATCH = 32  # images of a training step
CLASS, NO_CLASS, VOCAB = LEVELS, LEVELS + 10, 32
BITMAPS = [  # of the digits in order, 7 rows of 5
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
]


def draw_digits(labels: np.ndarray, seed: int, noise: float = 0.01) -> np.ndarray:
    """[N, 64] levels of pixels."""
    draw = np.random.default_rng(seed)
    images = np.zeros((len(labels), SIDE, SIDE), dtype=np.int64)
    for image, label in zip(images, labels, strict=True):
        bitmap = np.array([[int(c) for c in row] for row in BITMAPS[label].split()])
        x, y = int(draw.integers(1, 3)), int(draw.integers(0, 2))
        image[y : y + 7, x : x + 5] = bitmap * int(draw.integers(2, LEVELS))
    changed = draw.random(images.shape) < noise
    return np.where(changed, draw.integers(0, LEVELS, images.shape), images).reshape(len(labels), -1)


def train_model(hidden: int, layers: int, steps: int, folder: Path, seed: int) -> None:
    """A decoder on sequences of a class and 64 pixels, as a folder that `LLM` opens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden // 2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    best = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.OneCycleLR(best, 6e-3, total_steps=steps)
    draw = np.random.default_rng(seed)
    for step in range(steps):
        labels = draw.integers(0, 10, BATCH)
        shown = np.where(draw.random(BATCH) < 0.1, NO_CLASS, CLASS + labels)  # some without a class, for guidance
        ids = torch.from_numpy(np.concatenate([shown[:, None], draw_digits(labels, seed * 100_000 + step)], 1))
        loss = model(input_ids=ids, labels=ids).loss
        best.zero_grad()
        loss.backward()
        best.step()
        plan.step()
    print(f"  {hidden} x {layers}: loss {loss.item():.3f} after {steps} steps", flush=True)
    model.save_pretrained(folder)


def train_classifier() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, 10))
    best = torch.optim.Adam(model.parameters(), lr=3e-3)
    draw = np.random.default_rng(7)
    for step in range(400):
        labels = draw.integers(0, 10, 128)
        pixels = torch.from_numpy(draw_digits(labels, 5_000_000 + step)).float() / (LEVELS - 1)
        loss = nn.functional.cross_entropy(model(pixels), torch.from_numpy(labels))
        best.zero_grad()
        loss.backward()
        best.step()
    return model


@torch.inference_mode()
def accuracy(classifier: nn.Module, images: Sequence[Sequence[int]], labels: list[int]) -> str:
    pixels: Tensor = torch.tensor(images).clamp(0, LEVELS - 1).float() / (LEVELS - 1)
    hits = int((classifier(pixels).argmax(-1) == torch.tensor(labels)).sum())
    low, high = wilson(hits, len(labels))
    return f"{hits / len(labels):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--models", type=Path, help="folder that keeps the trained models; those there are not trained")
    parser.add_argument("--scale", type=float, default=1.5)
    given = parser.parse_args()
    start, classifier = time.perf_counter(), train_classifier()
    labels = [i % 10 for i in range(given.images)]
    real = draw_digits(np.array(labels), 9_000_000).tolist()
    print(f"accuracy on digits as drawn: {accuracy(classifier, real, labels)}")
    with tempfile.TemporaryDirectory() as parent:
        folders = [(given.models or Path(parent)) / name for name in ("target", "draft")]
        for seed, (folder, (hidden, layers)) in enumerate(zip(folders, ((64, 3), (32, 1)), strict=True), 1):
            if not folder.exists():
                train_model(hidden, layers, given.steps, folder, seed)
        print(f"trained in {time.perf_counter() - start:.0f} s")
        with LLM(folders[0], draft_model=folders[1], dtype="float32", skip_tokenizer_init=True, quiet=True) as llm:
            prompts = [[CLASS + label] for label in labels]
            for name in DRAFTERS:
                spec = Speculation(name, verify="rejection" if name == "model" else "auto", nodes=8, depth=0)
                asked = [
                    SamplingParams(1.0, max_tokens=SIDE * SIDE, seed=i, speculation=spec) for i in range(given.images)
                ]
                done = [llm.generate(p, a)[0] for p, a in zip(prompts, asked, strict=True)]
                images, passes = [list(d.choices[0].token_ids) for d in done], sum(d.usage.steps for d in done)
                each = passes / given.images
                print(f"drafts {name}: {each:.1f} passes an image, accuracy {accuracy(classifier, images, labels)}")
            typical = {
                label: np.median(draw_digits(np.full(64, label), 11), 0).astype(int).tolist() for label in range(10)
            }
            for chunk in (0, 6):
                found = []
                for i, label in enumerate(labels):
                    params = SamplingParams(1.0, max_tokens=SIDE * SIDE, seed=i)

                    def propose(answer: list[int], label: int = label, chunk: int = chunk) -> list[int]:
                        return typical[label][len(answer) : len(answer) + chunk]

                    found.append(guided(llm, [CLASS + label], [NO_CLASS], given.scale, params, propose))
                images, each = [g.token_ids for g in found], sum(g.passes for g in found) / given.images
                shown = f"{each:.1f} passes an image, accuracy {accuracy(classifier, images, labels)}"
                print(f"guidance {given.scale}, chunks of {chunk}: {shown}")


if __name__ == "__main__":
    main()
