"""Kernels run on the GPU where there is one, else in the interpreter; without Triton what lays batches out does."""

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any kernel module is imported

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_[!pd]*.py", "test_paged.py"]
