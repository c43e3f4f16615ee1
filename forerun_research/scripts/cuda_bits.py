"""Equal bits, speed of batches and the device's timeline on the GPU at hand, on random weights of real shapes.

    python -m forerun_research.scripts.cuda_bits [--parts prompts,rows,answers,speed,prefill] [--shape 1.5b]

`prompts`: K/V and logits of a prompt that is cut in other ways or runs beside others, against those of it alone.
`rows`: logits of decoded tokens alone against the same among others, in a chain and in a tree. `answers`: greedy and
drawn answers alone against those of batches, chunks, a warm prefix tree and preemption. `speed`: batches of 512 + 128
tokens, and how busy the device is in a steady decode. `prefill`: time to the first token of cold prompts.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from array import array
from collections.abc import Iterable
from typing import Any

import torch

from forerun.cache.pool import PagePool
from forerun.core import ROOT, SamplingParams
from forerun.llm import LLM
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun_research.bench.shapes import SHAPES, RandomCheckpoint, random_ids

DEVICE, PAGE, PROMPT_TOKENS = torch.device("cuda"), 16, 1500


def load(shape: str, batch_invariant: bool | None) -> Runner:
    checkpoint = RandomCheckpoint(shape, DEVICE)
    decoder = build_decoder(checkpoint, DEVICE, "bf16", 4096, quiet=True, batch_invariant=batch_invariant)[0]
    pool = PagePool(decoder.config, 2560, PAGE, torch.bfloat16, DEVICE)
    for cache in itertools.chain(*pool.kv):
        cache.normal_()
    return Runner(decoder, pool, 4096)


def open_llm(shape: str, **options: Any) -> LLM:
    return LLM(RandomCheckpoint(shape, DEVICE), device="cuda", quiet=True, **options)


def read_kv(runner: Runner, pages: array[int], count: int) -> torch.Tensor:
    slots = torch.tensor([pages[e // PAGE] * PAGE + e % PAGE for e in range(count)], device=DEVICE)
    return torch.stack([cache[slots] for cache in itertools.chain(*runner.kv)])


def prompts(shape: str) -> None:
    runner = load(shape, None)
    assert runner.graphs is not None
    print(f"{shape}: prompts have at least {runner.graphs.prompts.min_rows} rows")
    ids = random_ids(SHAPES[shape].vocab_size, PROMPT_TOKENS, 3)

    def run(size: int, beside: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = array("i", random.Random(seed).sample(range(1200), -(-PROMPT_TOKENS // PAGE)))
        logits = torch.empty(0)
        for first in range(0, PROMPT_TOKENS, size):
            piece = ids[first : first + size]
            want = [len(piece) - 1] if first + size >= PROMPT_TOKENS else []
            spans = [Span(piece, first, pages, want, prompt=True)]
            for j, count in enumerate(beside):
                own = array("i", range(1300 + j * 60, 1360 + j * 60))
                spans.append(Span(random_ids(1000, count, j), 0, own, (), prompt=True))
            logits = runner.forward(spans).logits.clone()
        return read_kv(runner, pages, PROMPT_TOKENS), logits

    kv, logits = run(PROMPT_TOKENS, (), 0)
    for size, beside in (
        (512, ()),
        (100, ()),
        (33, ()),
        (PROMPT_TOKENS, (700, 20)),
        (400, (5, 900, 33)),
        (1499, (900, 901)),
    ):
        found = run(size, beside, size)
        print(f"  chunks of {size} beside {beside}: K/V equal {torch.equal(found[0], kv)}, "
              f"logits equal {torch.equal(found[1], logits)}", flush=True)  # fmt: skip


def rows(shape: str) -> None:
    runner, draw = load(shape, True), random.Random(2)
    vocab, free = SHAPES[shape].vocab_size, list(range(2400))
    draw.shuffle(free)
    sequences = []
    for _ in range(40):
        context = draw.randrange(30, 700)
        sequences.append((context, array("i", [free.pop() for _ in range(-(-(context + 40) // PAGE))])))
    spans = [Span([draw.randrange(vocab)], context, pages, [0]) for context, pages in sequences]
    together = runner.forward(spans).logits.clone()
    equal = sum(torch.equal(runner.forward([s]).logits[0], row) for s, row in zip(spans, together, strict=True))
    print(f"{shape}: {equal} of {len(spans)} rows together equal those alone")
    context, pages = sequences[0]
    ids = [draw.randrange(vocab) for _ in range(24)]
    alone = torch.stack(
        [runner.forward([Span([t], context + i, pages, [0])]).logits[0].clone() for i, t in enumerate(ids)]
    )
    chain = runner.forward([Span(ids, context, pages, range(24))]).logits
    print(f"  a chain of 24 equals one by one: {torch.equal(chain, alone)}")
    parents = [ROOT, ROOT, *range(1, 23), 5]
    tree = runner.forward([Span([ids[0], 7, *ids[1:], 9], context, pages, range(26), context + 1, parents)]).logits
    print(f"  rows of a tree equal one by one: {torch.equal(tree[[0, *range(2, 25)]], alone)}", flush=True)


def answers(shape: str) -> None:
    asked = [random_ids(SHAPES[shape].vocab_size, 20 + 97 * i % 900, i) for i in range(24)]
    need = (sum(-(-len(ids) // PAGE) for ids in asked) + 1) * PAGE
    roomy = {"kv_cache_tokens": 64_000, "max_num_seqs": 24}
    for name, sampling in (("greedy", {}), ("temperature 0.8", {"temperature": 0.8, "seed": 7})):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        with open_llm(shape, enable_prefix_caching=False, **roomy) as llm:
            alone = [llm.generate(ids, params)[0].token_ids for ids in asked]
        settings: dict[str, dict[str, Any]] = {
            "batch of 24": {"enable_prefix_caching": False, **roomy},
            "chunks of 32": {"enable_prefix_caching": False, "max_num_batched_tokens": 32, **roomy},
            "prefix tree, cold and warm": roomy,
            "after preemption": {"enable_prefix_caching": False, "max_num_seqs": 24, "kv_cache_tokens": need},
        }
        for how, options in settings.items():
            with open_llm(shape, **options) as llm:
                for _ in range(2 if "warm" in how else 1):
                    found = llm.generate([*asked], params)
                    equal = sum(answer.token_ids == want for answer, want in zip(found, alone, strict=True))
                    preempted = sum(answer.usage.preemptions for answer in found)
                    print(f"{shape}, {name}, {how}: {equal} of 24 equal, {preempted} preemptions", flush=True)


def busy_share(spans: Iterable[tuple[float, float]]) -> float:
    """The share of the time in which the device works, from the second half of its timeline on."""
    ordered = sorted(spans)
    ordered = ordered[len(ordered) // 2 :]
    busy, end = 0.0, ordered[0][0]
    for start, stop in ordered:
        if stop > end:
            busy, end = busy + stop - max(start, end), stop
    return busy / (end - ordered[0][0])


def speed(shape: str) -> None:
    for batch, options in (
        (1, {}),
        (64, {}),
        (64, {"batch_invariant": True}),
        (64, {"batch_invariant": False}),
        (256, {}),
    ):
        room = {"kv_cache_tokens": 640 * batch * 5 // 4 // 16 * 16 + 64, "max_num_seqs": batch, "max_model_len": 640}
        with open_llm(shape, **room, **options) as llm:
            asked: list[Any] = [random_ids(SHAPES[shape].vocab_size, 512, seed=97 * i) for i in range(batch)]
            for speculation in ("off", "auto"):
                params, rates = SamplingParams(max_tokens=128, ignore_eos=True, speculation=speculation), []
                for _ in range(4):
                    llm.clear_cache()
                    start = time.perf_counter()
                    found = llm.generate(asked, params)
                    rates.append(128 * batch / (time.perf_counter() - start))
                llm.clear_cache()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    llm.generate(asked, SamplingParams(max_tokens=48, ignore_eos=True, speculation=speculation))
                cuda = torch.autograd.DeviceType.CUDA
                share = busy_share(
                    (e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type == cuda
                )
                first, later, each = rates[0], statistics.median(rates[1:]), 1000 / found[0].usage.tokens_per_second
                print(f"{shape}, {batch} requests, {options}, speculation {speculation}: {first:,.0f} tokens/s, "
                      f"then {later:,.0f}; {each:.3f} ms a token of the first request, device busy {share:.1%}",
                      flush=True)  # fmt: skip


def prefill(shape: str) -> None:
    for invariant in (None, True, False):
        with open_llm(shape, kv_cache_tokens=40_000, max_model_len=20_000, batch_invariant=invariant) as llm:
            for tokens in (20, 512, 2048, 4095, 8192, 16_384):
                ids, took = random_ids(SHAPES[shape].vocab_size, tokens, 5), []
                for _ in range(7):
                    llm.clear_cache()
                    answer = llm.generate(ids, SamplingParams(max_tokens=1, ignore_eos=True))[0]
                    took.append(answer.usage.ttft_s * 1e3)
                print(f"{shape}, batch_invariant={invariant}, {tokens} tokens: {statistics.median(took[1:]):.1f} ms "
                      f"({min(took[1:]):.1f}-{max(took[1:]):.1f})", flush=True)  # fmt: skip


PARTS = {"prompts": prompts, "rows": rows, "answers": answers, "speed": speed, "prefill": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--shape", default="1.5b")
    args = parser.parse_args()
    for part in args.parts.split(","):
        PARTS[part](args.shape)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
