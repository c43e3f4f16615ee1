"""Products by AMX: rows that run in tiles have the bits of those that do not, in any number and from any thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from forerun.models.cpu import library as module
from forerun.models.cpu.block_linear import FORMATS, BlockLinear, set_threads
from forerun.models.cpu.library import library
from tests.models.cpu.conftest import NO_AMX
from tests.models.cpu.test_block_linear import inputs, stored

COUNTS = (*range(1, 41), 300)


def by_rows(name: str, x: torch.Tensor, cut: int) -> torch.Tensor:
    """The product of rows that run by so many, from the library that is loaded."""
    linear = BlockLinear([(name, stored(name)[0])])
    return torch.cat([linear(part) for part in x.split(cut)])


@pytest.fixture
def without_amx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernels as compiled for a CPU that is this one but for its tiles."""
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, *NO_AMX))
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))


@pytest.mark.parametrize("name", FORMATS)
def test_any_number_of_rows_has_the_bits_of_single_ones(name: str) -> None:
    x, linear = inputs(max(COUNTS)), BlockLinear([(name, stored(name)[0])])
    alone = by_rows(name, x, 1)
    for rows in COUNTS:
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows
        assert torch.equal(linear(x[-rows:]), alone[-rows:]), rows


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_several_callers_and_threads_change_no_bit(threads: int) -> None:
    x, names = inputs(100), ("Q4_K", "Q6_K", "Q8_0")
    expected = {name: by_rows(name, x, 1) for name in names}
    wrong, linears = list[str](), {name: BlockLinear([(name, stored(name)[0])]) for name in names}

    def call(name: str) -> None:
        for _ in range(20):
            if not torch.equal(linears[name](x), expected[name]):
                wrong.append(name)

    set_threads(threads)
    try:
        callers = [threading.Thread(target=call, args=(name,)) for name in names * 2]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        set_threads(torch.get_num_threads())
    assert not wrong


def has_tiles() -> bool:
    kernels = library()
    return kernels is not None and b"amx" in kernels.fr_isa()


if has_tiles():  # else the process may not use them, or the compiler or the CPU does not know them

    def test_a_cpu_without_tiles_computes_the_same(request: pytest.FixtureRequest) -> None:
        x = inputs(300)
        ours = {name: by_rows(name, x, 300) for name in FORMATS}
        request.getfixturevalue("without_amx")
        library.cache_clear()
        try:
            plain = library()
            assert plain is not None and plain.fr_isa() == b"avx512_vnni"
            assert all(torch.equal(by_rows(name, x, 300), y) for name, y in ours.items())
        finally:
            library.cache_clear()

    REFUSED = """
import ctypes

# The kernel refuses tiles to a process with a stack for signals on which their registers have no room
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

room = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(room), 0, len(room))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0

from forerun.models.cpu.library import library
from tests.models.cpu.test_amx import by_rows, inputs
import torch

print(library().fr_isa().decode())
for name in ("Q4_K", "Q6_K", "Q4_0"):
    assert torch.equal(by_rows(name, inputs(50), 50), by_rows(name, inputs(50), 1))
"""

    def test_a_process_that_may_not_use_tiles_does_without() -> None:
        ran = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.split() == ["avx512_vnni"]
