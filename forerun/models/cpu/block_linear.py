"""Linear layers on the blocks of a GGUF file, multiplied by the C library as they are: 4 bits are read as 4 bits.

Prompts and answers run through the same kernel, and a row's result does not depend on the rows beside it. Activations
are rounded to int8, 32 values with a scale; beside float16 they stay float32. Knows no file: it is given bytes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from forerun.models.cpu.library import Matrix, Part, library
from forerun.models.cpu.quantise import format_of, q8_0, quantise
from forerun.models.formats.dequant import block_size
from forerun.models.linear import Linear, Norm

# Formats that the kernels read: type number in GGUF files, values of a block
FORMATS = {
    "F16": (1, 1),
    "Q4_0": (2, 32),
    "Q4_1": (3, 32),
    "Q5_0": (6, 32),
    "Q5_1": (7, 32),
    "Q8_0": (8, 32),
    "Q4_K": (12, 256),
    "Q5_K": (13, 256),
    "Q6_K": (14, 256),
}
ROW_GROUP = 16  # rows that the kernels interleave
QUANTISED_WEIGHTS = 1 << 21  # of a float matrix at a time
GATES = {"silu": 1, "gelu_tanh": 2}  # of layers.c
ROW_BYTES = {name: block_size(name)[1] for name in FORMATS}  # of a block


def problem(formats: set[str]) -> str:
    """Why matrices of these formats cannot be multiplied as they are; empty where they can."""
    unknown = sorted(formats - FORMATS.keys())
    if unknown:
        return f"there is no kernel for {', '.join(unknown)}"
    return "" if library() is not None else "the C kernels cannot be had"


def set_threads(threads: int) -> None:
    """Threads that products and attention of all models in this process run on, the caller's included."""
    kernels = library()
    if kernels is not None:
        with _on_all_cores():
            kernels.fr_set_threads(threads)


@contextmanager
def _on_all_cores() -> Iterator[None]:
    """Threads that are started here may run wherever some thread of this process may. OpenMP can bind each of its
    threads to one core (vLLM has it do so), and what a bound thread starts would share that core with it."""
    if not hasattr(os, "sched_setaffinity"):  # Linux has it
        yield
        return
    own, all_cores = os.sched_getaffinity(0), set[int]()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            all_cores |= os.sched_getaffinity(int(thread))
    os.sched_setaffinity(0, all_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def pool_stats() -> dict[str, Any]:
    """Of the kernels' threads, in this process: jobs they ran, chunks that the caller computed for a thread that had
    lost its core, seconds it waited for threads."""
    found = (ctypes.c_int64 * 3)()
    if library.cache_info().currsize and (kernels := library()) is not None:
        kernels.fr_pool_stats(found)
    return {"jobs": found[0], "retaken": found[1], "waited_s": found[2] / 1e9}


class PackedBlocks:
    """One matrix [rows, bytes of a row] in a file's format, its rows interleaved for the kernels."""

    def __init__(self, format: str, raw: Tensor) -> None:
        kernels = library()
        assert kernels is not None
        self.format, (self.type, self.per) = format, FORMATS[format]
        self.rows, self.cols = raw.shape[0], raw.shape[1] // ROW_BYTES[format] * self.per
        self.packed = torch.empty(kernels.fr_packed_bytes(self.type, self.rows, self.cols), dtype=torch.uint8)
        raw = raw.contiguous()
        kernels.fr_pack(
            *(self.type, raw.data_ptr(), self.rows, self.cols, None, 0, -(-self.rows // ROW_GROUP)),
            self.packed.data_ptr(),
        )

    @classmethod
    def quantised(cls, weight: Tensor, bits: int) -> PackedBlocks:
        """A float matrix in 4, 8 or 16 bits, some rows at a time: no copy of all of it is made."""
        kernels = library()
        assert kernels is not None
        (rows, cols), format = weight.shape, format_of(weight.shape[1], bits)
        type = FORMATS[format][0]
        packed = torch.empty(kernels.fr_packed_bytes(type, rows, cols), dtype=torch.uint8)
        group_bytes = packed.numel() // -(-rows // ROW_GROUP)
        step = ROW_GROUP * max(1, QUANTISED_WEIGHTS // (ROW_GROUP * cols))
        for at in range(0, rows, step):
            part = quantise(weight[at : at + step], bits)[1]
            out = packed.data_ptr() + at // ROW_GROUP * group_bytes
            kernels.fr_pack(type, part.data_ptr(), len(part), cols, None, 0, -(-len(part) // ROW_GROUP), out)
        return cls.packed_before(format, rows, cols, packed)

    @classmethod
    def packed_before(cls, format: str, rows: int, cols: int, packed: Tensor) -> PackedBlocks:
        """Of bytes that were interleaved by the same kernels before."""
        made = cls.__new__(cls)
        made.format, (made.type, made.per) = format, FORMATS[format]
        made.rows, made.cols, made.packed = rows, cols, packed
        return made

    @property
    def part(self) -> Part:
        return Part(self.type, self.per, self.rows, self.cols, self.packed.data_ptr(), self.packed.numel())


class BlockLinear(Linear):
    """Matrices of any of the formats, one above the other, with the same inputs."""

    packs = True

    def __init__(self, matrices: Sequence[tuple[str, Tensor] | PackedBlocks], bias: Tensor | None = None) -> None:
        """`matrices`: format and bytes of each, as `Checkpoint.stored` gives them, or packed already."""
        kernels = library()
        assert kernels is not None
        self._matrices = [m if isinstance(m, PackedBlocks) else PackedBlocks(*m) for m in matrices]
        self.in_features = self._matrices[0].cols
        self.out_features = sum(matrix.rows for matrix in self._matrices)
        self.bias = None if bias is None else bias.float().contiguous()
        self._kernels = kernels
        self._parts = (Part * len(matrices))(*(matrix.part for matrix in self._matrices))
        self.matrix = Matrix(ctypes.addressof(self._parts), len(matrices), self.out_features, address(self.bias))

    def __del__(self) -> None:
        if (kernels := getattr(self, "_kernels", None)) is not None:
            kernels.fr_quiesce()  # a thread that has lost its core may still read the weights

    @property
    def nbytes(self) -> int:
        return sum(matrix.packed.numel() for matrix in self._matrices)

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        x = x.contiguous()
        y = torch.empty(rows, self.out_features)
        weight, eps = (None, -1.0) if norm is None else norm
        add = None if add is None else add.contiguous()
        self._kernels.fr_linear(
            *(ctypes.addressof(self.matrix), x.data_ptr(), address(weight), eps, rows),
            *(address(add), y.data_ptr()),
        )
        return y

    def joined(self, parts: list[Tensor], eps: float) -> Tensor:
        if any(part.shape[1] % ROW_GROUP or part.dtype != torch.float32 for part in parts):
            return super().joined(parts, eps)
        parts, rows = [part.contiguous() for part in parts], parts[0].shape[0]
        at = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        widths = (ctypes.c_int64 * len(parts))(*(part.shape[1] for part in parts))
        y = torch.empty(rows, self.out_features)
        self._kernels.fr_linear_joined(
            *(ctypes.addressof(self.matrix), ctypes.addressof(at), ctypes.addressof(widths), len(parts), eps, rows),
            y.data_ptr(),
        )
        return y

    def gated(self, x: Tensor, activation: str, *, norm: Norm | None = None) -> Tensor:
        y = self(x, norm=norm)
        out = torch.empty(x.shape[0], self.out_features // 2)
        self._kernels.fr_gate(y.data_ptr(), x.shape[0], out.shape[1], GATES[activation], out.data_ptr())
        return out

    def _product(self, x: Tensor, add: Tensor | None) -> Tensor:
        return self(x, add=add)


class Q8Linear(BlockLinear):
    """A float matrix as blocks of 32 eight-bit values with a scale each, Q8_0 of GGUF files."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__([("Q8_0", q8_0(weight))], bias)


BlockLinear.beside = Q8Linear


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
