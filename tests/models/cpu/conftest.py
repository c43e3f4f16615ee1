"""Kernels are tested where there is a compiler to make them; a machine without one says so when tests are collected."""

from __future__ import annotations

import sys

from forerun.models.cpu.library import library

collect_ignore = []
if library() is None:
    print("no C compiler: products on a file's own blocks are not tested here", file=sys.stderr)
    collect_ignore += ["test_block_linear.py", "test_library.py"]
