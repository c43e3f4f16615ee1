"""Launches that are recorded once and replayed by the device alone, because each costs the host more than most cost the
device. Knows no model and no batch: what is recorded reads and writes tensors whose addresses stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


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
