"""Kernels are tested where there is a compiler to make them; a machine without one says so when tests are collected."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

import pytest

from forerun.models.cpu import library as module
from forerun.models.cpu.library import library

collect_ignore = []
if library() is None:
    print("no C compiler: products on a file's own blocks are not tested here", file=sys.stderr)
    collect_ignore += ["test_attention.py", "test_block_linear.py", "test_library.py", "test_planning.py"]
    collect_ignore += ["test_aarch64.py", "test_amx.py"]

ON_ARM = platform.machine() == "aarch64"


NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
KINDS = ["native", "armv8-a" if ON_ARM else "x86-64-v3"]
if (native := library()) is not None and b"amx" in native.fr_isa():
    KINDS.append("without-amx")


@pytest.fixture(scope="module", params=KINDS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels as compiled for this CPU, for one that has AVX2 (on ARM: NEON) and nothing newer, and where this one
    has AMX for one that has not."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "native":
            oldest, expected = f"-march={request.param}", b"neon" if ON_ARM else b"avx2"
            flags = tuple(oldest if flag == module.THIS_CPU else flag for flag in module.FLAGS)
            if request.param == "without-amx":
                flags, expected = (*module.FLAGS, *NO_AMX), b"avx512_vnni"
            patch.setattr(module, "FLAGS", flags)
            patch.setenv("FORERUN_HOME", str(tmp_path_factory.mktemp("oldest")))
            library.cache_clear()
            loaded = library()
            assert loaded is not None and loaded.fr_isa() == expected
        yield
    library.cache_clear()
