"""What the host adds to a launch of the whole decoder: microseconds of each part of a step.

python -m forerun_research.scripts.cuda_host [--model 1.5b]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from forerun.models.cuda import nvrtc
from forerun.models.cuda.packing import masks_of
from forerun_research.scripts.cuda_stack import load, spans, timed


def micros(call: Callable[[], object], repeats: int = 300, synchronize: bool = False) -> float:
    took = []
    for _ in range(repeats):
        if synchronize:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.5b")
    runner = load(parser.parse_args().model)
    graphs = runner.graphs
    assert graphs is not None and graphs.stack is not None
    stack, packed = graphs.stack, graphs.stack.packed
    for sequences in ([(511, 1, False)], [(504, 8, True)], [(511, 1, False)] * 16):
        work = spans(runner.decoder, sequences, random.Random(1))
        batch = runner.batch(work)
        _, masks = masks_of(batch)
        used = packed.fill(batch, masks, 1)
        copy = partial(nvrtc.copy_to_device, packed.device.data_ptr(), packed.host_address, used)
        parts = {
            "layout": micros(partial(runner.batch, work)),
            "masks": micros(partial(masks_of, batch)),
            "pack": micros(partial(packed.fill, batch, masks, 1)),
            "copy": micros(copy, synchronize=True),
            "launch": micros(stack.launch, 100, synchronize=True),
            "run": micros(partial(graphs.run, batch), 200),
            "on the device": timed(stack.launch, 100) * 1e3,
        }
        name = f"{len(sequences)} x {sequences[0][1]}"
        print(f"{name:8}" + ", ".join(f"{part} {us:.1f}" for part, us in parts.items()), flush=True)


if __name__ == "__main__":
    main()
