"""bf16 on CUDA against float32 on CUDA: how far logits are, for prefill, decode and drafts, beside transformers' bf16.

    python -m forerun_research.scripts.cuda_reference [--shape 1.5b]

Random weights of a real shape: nothing to fetch, and every path runs (cuBLAS prefill, paged attention, graphs).
"""

from __future__ import annotations

import argparse
from array import array

import torch

from forerun.cache.pool import PagePool
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun_research.bench.peers.hf_model import hf_from_checkpoint
from forerun_research.bench.shapes import RandomCheckpoint, random_ids

CUDA = torch.device("cuda")


def make(checkpoint: RandomCheckpoint, weights: str) -> Runner:
    decoder, _ = build_decoder(checkpoint, CUDA, weights, 2048, quiet=True)
    return Runner(decoder, PagePool(decoder.config, 128, 16, decoder.dtype, CUDA), 2048)


def pieces(runner: Runner, ids: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of a text run in pieces."""
    pages = array("i", runner.pool.allocate(runner.pool.pages_for(len(ids))))
    parts, at = [], 0
    for size in sizes:
        output = runner.forward([Span(ids[at : at + size], at, pages, range(size))])
        parts.append(output.logits.float().clone())
        at += size
    runner.pool.release(pages)
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1.5b")
    shape = parser.parse_args().shape
    checkpoint = RandomCheckpoint(shape, CUDA)
    ids = random_ids(checkpoint.config.vocab_size, 384, seed=1)
    truth = pieces(make(checkpoint, "float32"), ids, [384])
    torch.cuda.empty_cache()

    def say(name: str, logits: torch.Tensor) -> None:
        error = float((logits - truth).norm() / truth.norm())
        top = float((logits.argmax(-1) == truth.argmax(-1)).float().mean())
        print(f"{shape} {name:34s} relative error {error:.4f}  top-1 {top:.3f}", flush=True)

    ours = make(checkpoint, "bf16")
    whole = pieces(ours, ids, [384])
    say("bf16, one prefill", whole)
    for name, sizes in {
        "bf16, token by token (graphs)": [256, *[1] * 128],
        "bf16, drafts of 16 (graphs)": [256, *[16] * 8],
        "bf16, drafts of 5 (graphs, padded)": [256, *[5] * 25, 3],
        "bf16, chunks of 128": [128] * 3,
    }.items():
        say(name, pieces(ours, ids, sizes))
    single, drafts = pieces(ours, ids, [256, *[1] * 128]), pieces(ours, ids, [256, *[16] * 8])
    print(f"{shape} one token and sixteen give the same bits: {torch.equal(single[256:], drafts[256:])}")
    model = hf_from_checkpoint(checkpoint, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        say("transformers, bf16", model(torch.tensor([ids], device="cuda")).logits[0].float())


if __name__ == "__main__":
    main()
