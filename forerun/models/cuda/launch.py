"""How kernels are launched: with little work on the host, overlapping each other, on scratch memory that outlives them.

Triton compiles one kernel per specialization of its arguments, and its own binding of arguments costs more than a
launch. `launch` computes the same distinctions more cheaply, keeps what Triton compiled for them, and runs that with
addresses in place of tensors. All else goes Triton's own way: the first launch of a kind, the interpreter, versions of
Triton whose launches were not looked at, launch hooks. Changes of Triton's knobs and of globals that a kernel reads are
not seen once it was launched.

With programmatic dependent launch a kernel starts while the one before it still runs, fetches what does not depend on
it (weights), and waits for it at `gdc_wait`. Every kernel here lets its dependents start at once, and every program
waits before it touches an activation, so that a kernel's end implies the end of all before it.

`record` and `Recorder`: launches that are recorded once and replayed by the device alone, because each costs the host
more than most cost the device. What is recorded reads and writes tensors whose addresses stay. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction

T = TypeVar("T")

KNOWN_VERSIONS = ("3.6.", "3.7.")  # same specialization, and `CompiledKernel.run` takes the same arguments
NOTHING = (None, None, None)  # launch metadata and the hooks that would get it


class Direct:
    """Whether launches may pass Triton's binding by; turned off to measure what that gains."""

    enabled = True

    @classmethod
    def active(cls) -> bool:
        if not (cls.enabled and _supported()):
            return False
        runtime = triton.knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains of hooks, mostly empty
        return not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def _supported() -> bool:
    known = triton.__version__.startswith(KNOWN_VERSIONS)
    return known and torch.version.cuda is not None and torch.cuda.is_available() and not triton.knobs.runtime.interpret


class Launches:
    """One kernel's arguments, and what was compiled for their kinds.

    Understood are kernels that take parameters without annotation by place, and after them constants by name.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel  # kept, so that nothing else gets its id
        self.compiled: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}
        self.special: tuple[bool, ...] = ()  # of each plain parameter: whether the values of numbers are looked at
        self.constants: tuple[None, ...] = ()  # in their places; a launch does not read them
        self.understood = isinstance(kernel, JITFunction) and not kernel.pre_run_hooks
        if self.understood:
            plain = [param for param in kernel.params if not param.is_constexpr]
            self.special = tuple(not param.do_not_specialize for param in plain)
            self.constants = (None,) * (len(kernel.params) - len(plain))
            self.understood = plain == kernel.params[: len(plain)] and not any(param.annotation for param in plain)

    def bind(self, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]] | None:
        """The kind of each argument, at least as fine as Triton's, and what a launch takes for it; None: not known.

        A kernel must never get arguments of another kind: compiled for aligned ones, it reads wrong memory at others.
        """
        if len(args) != len(self.special):
            return None
        kinds: list[Any] = []
        values: list[Any] = []
        for value, special in zip(args, self.special, strict=True):
            if isinstance(value, torch.Tensor):
                address = value.data_ptr()
                values.append(address)
                if value.is_cuda and not address & 15:
                    kinds.append(value.dtype)
                else:
                    kinds.append((value.dtype, value.is_cuda, not address & 15))
                continue
            values.append(value)
            kind = type(value)
            if kind is int:
                wide = 0 if -0x80000000 <= value <= 0x7FFFFFFF else 32 if value <= 0x7FFFFFFFFFFFFFFF else 64
                kinds.append(wide + (0 if not special else 1 if value == 1 else 2 if not value & 15 else 3))
            elif value is None or kind is float or kind is bool:
                kinds.append(kind)
            else:
                return None
        return kinds, values

    def keep(self, key: tuple[Any, ...], compiled: Any, args: tuple[Any, ...]) -> None:
        """Keep what Triton launched. Memory of the host is looked at by Triton each time."""
        on_device = all(value.is_cuda for value in args if isinstance(value, torch.Tensor))
        if on_device and isinstance(compiled, CompiledKernel):
            self.compiled[key] = compiled.run, (compiled.function, compiled.packed_metadata, *NOTHING)


_LAUNCHES: dict[int, Launches] = {}  # by the kernel's id: to hash a kernel takes longer


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the current device and stream."""
    launches = _LAUNCHES.get(id(kernel))
    if launches is None:
        launches = _LAUNCHES[id(kernel)] = Launches(kernel)
    bound = launches.bind(args) if launches.understood and Direct.active() else None
    if bound is None:
        kernel[grid](*args, **constants)
        return
    kinds, values = bound
    device: int = torch._C._cuda_getDevice()
    key = (device, *kinds, *constants, *constants.values())  # names too: their order is the caller's
    found = launches.compiled.get(key)
    if found is None:
        launches.keep(key, kernel[grid](*args, **constants), args)
        return
    run, head = found
    x, y, z = (*grid, 1, 1)[:3]
    run(x, y, z, torch._C._cuda_getCurrentRawStream(device), *head, *values, *launches.constants)


@cache
def _pdl_supported() -> bool:
    """Hopper and later can; the interpreter has no launches to overlap."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


class Pdl:
    """Whether kernels overlap. On wherever the device can; the sweep turns it off to measure what it gains."""

    enabled = True

    @classmethod
    def active(cls) -> bool:
        return cls.enabled and _pdl_supported()


def options(num_warps: int, num_stages: int = 1) -> dict[str, Any]:
    """Launch keywords common to all kernels. PDL is both a constant of the kernel and an attribute of its launch."""
    if Pdl.active():
        return {"num_warps": num_warps, "num_stages": num_stages, "PDL": True, "launch_pdl": True}
    return {"num_warps": num_warps, "num_stages": num_stages, "PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """How a kernel begins that fetches nothing before the one before it has ended."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def cdiv(x: int, y: int) -> int:
    """x / y rounded up. Triton's own, made for kernels as well, takes the host as long as a tenth of a launch."""
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 0 for 0. Triton's own is as slow as its cdiv."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


@cache
def scratch(name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory that lives as long as the process, so that captured graphs may keep its address.

    One per name and size: kernels of one stream use it in turn, and leave counters at zero.
    """
    return torch.zeros(size, dtype=dtype, device=device)


@torch.inference_mode()
def record(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """The recorded launches of `run`, and what it returned: memory of the graphs' `pool`, filled by each replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compile and allocate before recording
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    return graph, result


class Recorded:
    """A function of tensors of fixed shapes. What a call returns is overwritten by the next one."""

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor], pool: Any) -> None:
        self._inputs = [t.clone() for t in inputs]
        self._graph, self._result = record(lambda: function(*self._inputs), pool)

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._result


class Recorder:
    """Functions by name and by the shapes they were called with, recorded at the first call as long as it is `open`.
    Afterwards other shapes run as they are: recording one takes longer than many calls of it, and a request waits."""

    def __init__(self, pool: Any) -> None:
        self._pool, self.open = pool, True
        self._recorded: dict[tuple[Any, ...], Recorded] = {}

    def __call__(self, key: tuple[Any, ...], function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """`function` must do the same for the same key: replayed, it is not called."""
        key = (*key, *((t.shape, t.dtype) for t in inputs))
        if key not in self._recorded:
            if not self.open:
                return function(*inputs)
            self._recorded[key] = Recorded(function, inputs, self._pool)
        return self._recorded[key](inputs)
