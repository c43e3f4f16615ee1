"""Kinds of arguments against Triton's own, and what is launched, without a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, native_specialize_impl

from forerun.models.cuda import launch as module
from forerun.models.cuda.launch import Direct, Launches, cdiv, launch, next_power_of_2

STORE = torch.zeros(64, dtype=torch.bfloat16)
WIDE = torch.zeros(64)
POINTERS = (STORE, STORE[1:], STORE[8:], WIDE, WIDE[1:], WIDE.long())
EDGES = [edge + step for edge in (1 << 31, -(1 << 31), 1 << 63) for step in (-1, 0, 1)]  # of widths of integers
VALUES = (*POINTERS, None, 0, 1, 2, 16, 17, -16, -1, *EDGES, 1.0, 2.0, True, False)


def body(x, y, count, length, scale, SIZE: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


class Compiled(CompiledKernel):
    """What Triton would give for one specialization; notes its launches."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = 1234, (4, 1, 0)
        self._run = lambda *args: self.launched.append(args)


class Kernel(JITFunction):
    """Compiles nothing; notes what came Triton's own way."""

    def __init__(self, fn: Any = body) -> None:
        super().__init__(fn, do_not_specialize=["length"])
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **constants: Any) -> Compiled:
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return run


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of a device whose memory tensors seem to be in, and its stream."""
    current = [0, 77]
    monkeypatch.setattr(module, "_supported", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[1] + index, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return current


ARGS = (STORE, WIDE, 48, 5, 0.5)


def ask(kernel: Any, *args: Any, grid: tuple[int, ...] = (3,), **constants: Any) -> None:
    launch(kernel, grid, *(args or ARGS), **({"SIZE": 64, "PDL": True, "num_warps": 4} | constants))


def kind(value: Any, special: bool) -> Any:
    launches = Launches(Kernel())
    launches.special = (special,)
    bound = launches.bind((value,))
    assert bound is not None
    return bound[0][0]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("special", [False, True])
def test_kinds_are_those_of_triton(special: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_device)
    for a in VALUES:
        for b in VALUES:
            ours = kind(a, special) == kind(b, special)
            theirs = [native_specialize_impl(CUDABackend, value, False, special, True) for value in (a, b)]
            if special or not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
                assert ours == (theirs[0] == theirs[1]), (a, b)
            else:  # alignment that Triton does not look at may be told apart
                assert not ours or theirs[0] == theirs[1], (a, b)


def test_memory_of_the_host_is_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    here = kind(STORE, True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert kind(STORE, True) != here


def test_a_second_launch_runs_what_was_compiled(device: list[int]) -> None:
    kernel = Kernel()
    ask(kernel)
    assert len(kernel.compiled) == 1 and not kernel.compiled[0].launched  # Triton launched it itself
    other = torch.ones(64, dtype=torch.bfloat16)
    ask(kernel, other, WIDE, 32, 1, 2.5, grid=(7, 2))
    device[1] = 99
    ask(kernel, other, WIDE, 64, 16, -1.0, grid=(1, 2, 3))
    assert len(kernel.compiled) == 1
    head = (1234, (4, 1, 0), None, None, None)
    assert kernel.compiled[0].launched == [
        (7, 2, 1, 77, *head, other.data_ptr(), WIDE.data_ptr(), 32, 1, 2.5, None, None),
        (1, 2, 3, 99, *head, other.data_ptr(), WIDE.data_ptr(), 64, 16, -1.0, None, None),
    ]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, STORE[1:]),
        (0, WIDE),
        (0, None),
        (1, WIDE[1:]),
        (2, 1),
        (2, 47),
        (2, 1 << 32),
        (2, 4.0),
        (3, 1 << 31),
        (4, 2),
    ],
)
def test_arguments_of_another_kind_are_compiled_anew(place: int, value: Any, device: list[int]) -> None:
    kernel = Kernel()
    ask(kernel)
    args = (*ARGS[:place], value, *ARGS[place + 1 :])
    ask(kernel, *args)
    assert len(kernel.compiled) == 2 and not kernel.compiled[0].launched
    ask(kernel, *args)
    ask(kernel)
    assert [len(compiled.launched) for compiled in kernel.compiled] == [1, 1]


def test_constants_options_and_devices_are_told_apart(device: list[int]) -> None:
    kernel = Kernel()
    for constants in ({}, {"SIZE": 32}, {"PDL": False}, {"num_warps": 8}, {"num_stages": 2}, {"launch_pdl": True}):
        ask(kernel, **constants)
    device[0] = 1
    ask(kernel)
    assert len(kernel.compiled) == 7 and not any(compiled.launched for compiled in kernel.compiled)
    ask(kernel)
    assert [call[3] for call in kernel.compiled[6].launched] == [78]


def test_two_kernels_do_not_share(device: list[int]) -> None:
    first, second = Kernel(), Kernel()
    for kernel in (first, second):
        ask(kernel)
    assert len(first.compiled) == len(second.compiled) == 1 and not first.compiled[0].launched


def never_direct(kernel: Any, *args: Any, **constants: Any) -> bool:
    for _ in range(3):
        ask(kernel, *args, **constants)
    return len(kernel.compiled) == 3 and not any(compiled.launched for compiled in kernel.compiled)


def test_switched_off_or_unsupported(device: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Direct, "enabled", False)
    assert never_direct(Kernel())
    monkeypatch.setattr(Direct, "enabled", True)
    assert not never_direct(Kernel())
    monkeypatch.setattr(module, "_supported", lambda: False)
    assert never_direct(Kernel())


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_every_launch(name: str, device: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    chain = getattr(triton.knobs.runtime, name)
    monkeypatch.setattr(chain, "calls", [lambda metadata: None])
    assert never_direct(kernel)


def test_memory_of_the_host_goes_tritons_way(device: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert never_direct(Kernel())


def test_what_is_not_understood_goes_tritons_way(device: list[int]) -> None:
    def annotated(x, count: tl.int64, SIZE: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    def mixed(SIZE: tl.constexpr, x, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    assert never_direct(Kernel(annotated), STORE, 48)
    assert never_direct(Kernel(mixed), STORE)
    assert never_direct(Kernel(), *ARGS[:4], scale=0.5)  # by name
    assert never_direct(Kernel(), *ARGS[:4], (1, 2))  # no such kind


def test_host_arithmetic_is_tritons() -> None:
    for n in (*range(70), 1023, 1024, 1025, 1 << 30):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert [cdiv(n, d) for d in (1, 7, 16)] == [triton.cdiv(n, d) for d in (1, 7, 16)]
