"""The kernels for 64-bit ARM, compiled by a cross compiler and run by an emulator: what they give is what AVX2 gives.

Products are equal in every bit: integers are exact, and floats are computed in the same order. Attention sums in
another order, so it is within a few units in the last place. Says nothing about speed.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from forerun.models.cpu import library as module

CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
KERNELS = Path(module.__file__).parent / "csrc"
DRIVER = Path(__file__).with_name("kernels_driver.c")
MISSING = [tool for tool in (CROSS, EMULATOR) if shutil.which(tool) is None]
UNDERFLOWS = tuple(f"{name}-9-1" for name in ("Q4_K", "Q5_K", "Q6_K"))  # values so small that they count as 0
Results = dict[str, np.ndarray]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not found"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is what is compared with"),
]


def run_driver(folder: Path, compiler: list[str], emulator: list[str]) -> tuple[str, Results]:
    """The driver's results by name, and for which instructions it was compiled."""
    program = str(folder / "driver")
    sources = [str(DRIVER), *(str(KERNELS / name) for name in module.SOURCES if name != "layers.c")]
    build = [*compiler, "-O3", "-std=gnu11", f"-I{KERNELS}", "-o", program, *sources, "-lm", "-lpthread"]
    subprocess.run(build, check=True, timeout=300)
    output = subprocess.run([*emulator, program], check=True, timeout=300, stdout=subprocess.PIPE).stdout
    isa, at, results = "", 0, {}
    while at < len(output):
        end = output.index(b"\n", at)
        name, count = output[at:end].decode().split()
        at = end + 1 + 4 * int(count)
        if count == "0":
            isa = name
        else:
            results[name] = np.frombuffer(output, np.float32, int(count), end + 1)
    return isa, results


@pytest.fixture(scope="module")
def avx2(tmp_path_factory: pytest.TempPathFactory) -> Results:
    isa, results = run_driver(tmp_path_factory.mktemp("avx2"), ["cc", "-march=x86-64-v3"], [])
    assert isa == "avx2"
    return results


@pytest.fixture(scope="module", params=["neon", "neon_dotprod"])
def neon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """For the first of such CPUs, run by one that knows nothing newer, and for those with a product of four bytes."""
    march, cpu = {"neon": ("armv8-a", "cortex-a53"), "neon_dotprod": ("armv8.2-a+dotprod", "max")}[request.param]
    compiler = [CROSS, "-static", f"-march={march}"]
    isa, results = run_driver(tmp_path_factory.mktemp("neon"), compiler, [EMULATOR, "-cpu", cpu])
    assert isa == request.param
    return results


def test_products_and_gates_are_those_of_avx2_in_every_bit(neon: Results, avx2: Results) -> None:
    assert neon.keys() == avx2.keys()
    names = [name for name in avx2 if name.split("-")[0] in ("product", "threads", "mixed", "silu", "gelu")]
    assert len(names) == 9 * 13 + 3
    for name in names:
        assert np.isfinite(neon[name]).all() and np.any(neon[name] != 0) != name.endswith(UNDERFLOWS), name
        assert np.array_equal(neon[name].view(np.int32), avx2[name].view(np.int32)), name


def test_attention_and_whole_layers_are_those_of_avx2_within_rounding(neon: Results, avx2: Results) -> None:
    names = [name for name in avx2 if name.split("-")[0] in ("stored", "attended", "layers")]
    assert len(names) == 5 * 2 + 1
    for name in names:
        limit = 5e-3 if name == "layers" else 1e-6  # an activation of layers may round to the next int8
        assert np.abs(neon[name] - avx2[name]).max() < limit * np.abs(avx2[name]).max(), name


def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(neon: Results) -> None:
    for name, found in neon.items():
        kind, *about = name.split("-")
        if kind == "product":
            together = neon[f"product-{about[0]}-0-37"].reshape(37, -1)
            first, count = int(about[1]), int(about[2])
            assert np.array_equal(found, together[first : first + count].ravel()), name
        elif kind == "threads":
            assert np.array_equal(found, neon[f"product-{about[0]}-0-37"]), name
        elif kind == "alone":
            assert np.array_equal(found, neon["-".join(["attended", *about])]), name
