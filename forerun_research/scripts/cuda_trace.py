"""Where one launch of the whole decoder spends its time: cycles of each step of a layer, seen from some programs.

    python -m forerun_research.scripts.cuda_trace [--models 1.5b] [--clock 1.82]

Patches clock reads around every meeting of the programs into the source that `Stack` compiles, so times are a little
longer than without.
"""

from __future__ import annotations

import argparse
import ctypes
import random

import torch

from forerun.models.cuda import nvrtc, stack
from forerun_research.scripts.cuda_stack import load, spans, timed

STEPS = ("qkv", "meet", "attention", "meet", "o", "meet", "gate_up", "meet", "down", "meet")
BARRIER = "all_programs_meet(p.meeting, target);"
MARK = "if (threadIdx.x == 0) trace[blockIdx.x][marks[0]] = clock64(); marks[0]++;"
MAX_MARKS = 1024


def patched(source: str) -> str:
    """Marks at the meetings of `compute_layers`, and after the head."""
    function = "__device__ __forceinline__ void "
    head, main = source.split(f"{function}compute_layers", 1)
    main = main.replace("u32& target) {", "u32& target, int* marks) {", 1).replace(
        "turn, target);", "turn, target, &marks);"
    )
    layers, rest = main.split(f"{function}compute_all", 1)
    layers = layers.replace(BARRIER, f"{MARK} {BARRIER} {MARK}")
    rest = rest.replace("int start = 0, turn = 0;", "int start = 0, turn = 0, marks = 0;")
    rest = rest.replace("        compute_layers", f"        {MARK.replace('[0]', '')} compute_layers")
    rest = rest.replace("        leave_best", f"        {MARK.replace('[0]', '')} leave_best")
    declared = f"__device__ long long trace[256][{MAX_MARKS}];\n"
    return f"{head}{declared}{function}compute_layers{layers}{function}compute_all{rest}"


def read(kernel: nvrtc.Kernel, programs: int) -> torch.Tensor:
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), kernel._module, b"trace") == 0
    host = torch.zeros(256, MAX_MARKS, dtype=torch.int64)
    assert driver.cuMemcpyDtoH_v2(ctypes.c_void_p(host.data_ptr()), address, size) == 0
    return host[:programs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1.5b")
    parser.add_argument("--clock", type=float, default=1.82, help="GHz of the multiprocessors")
    args = parser.parse_args()
    plain = stack._source
    stack._source = lambda: patched(plain())
    for shape in args.models.split(","):
        runner = load(shape)
        assert runner.graphs is not None and runner.graphs.stack is not None
        one, layers = runner.graphs.stack, runner.decoder.config.num_layers
        for seqs, new in ((1, 1), (1, 16), (16, 1)):
            batch = runner.batch(spans(runner.decoder, [(512 - new, new, False)] * seqs, random.Random(2)))
            runner.graphs.run(batch)
            ms = timed(one.launch)
            marks = read(one.kernel, one.cut.programs).double() / args.clock / 1e3  # us
            steps = marks[:, 1 : len(STEPS) * layers + 1] - marks[:, : len(STEPS) * layers]
            steps = steps.view(-1, layers, len(STEPS))
            end = marks[:, len(STEPS) * layers : len(STEPS) * layers + 2].diff(dim=1)
            print(
                f"{shape} {seqs} x {new}: {ms:.3f} ms; a layer {steps.sum(2).mean():.1f}, head {end[:, 0].mean():.1f}"
            )
            for i, name in enumerate(STEPS):
                each = steps[:, 1:, i].mean(1)  # [programs]
                shown = " ".join(f"{float(each[b]):6.2f}" for b in (0, 10, 50, 100, 131))
                print(f"  {name:10} mean {float(each.mean()):6.2f} least {float(each.min()):6.2f} "
                      f"most {float(each.max()):6.2f} | {shown}", flush=True)  # fmt: skip
        del runner, one
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
