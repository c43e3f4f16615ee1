"""CUDA C++ compiled and launched at run time, with the compiler and driver libraries that torch brings along.

Knows no kernel. Launches are cooperative: the driver refuses a grid whose programs could not all run at once, which is
what programs that wait for each other need. They are recorded by stream capture like any other launch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


Launch = Callable[[], None]


class CompileError(RuntimeError):
    """The compiler or the driver refused a kernel."""


@cache
def _compiler() -> ctypes.CDLL | None:
    major = (torch.version.cuda or "").partition(".")[0]
    names = [f"libnvrtc.so.{major}"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        names += [str(path) for path in sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def available() -> bool:
    """Whether kernels can be compiled here."""
    return torch.cuda.is_available() and _compiler() is not None


@cache
def compile_source(source: str, options: tuple[str, ...]) -> bytes:
    """Machine code of a source text for the current device. Kept: a model may need the same kernel twice."""
    lib = _compiler()
    if lib is None:
        raise CompileError("no run-time compiler found beside torch")
    major, minor = torch.cuda.get_device_capability()
    flags = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *options]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = source.encode()
    if lib.nvrtcCreateProgram(ctypes.byref(program), text, b"forerun.cu", 0, None, None):
        raise CompileError("the run-time compiler does not start")
    try:
        given = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
        if lib.nvrtcCompileProgram(program, len(flags), given):
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            raise CompileError(log.value.decode(errors="replace"))
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _check(result: int, doing: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(name))
        raise CompileError(f"{doing}: {(name.value or b'unknown error').decode()}")


class Kernel:
    """One function of a compiled source, taking one structure by value."""

    def __init__(self, code: bytes, name: str, grid: int, threads: int, shared_bytes: int) -> None:
        self.grid, self.threads, self.shared_bytes = grid, threads, shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream().synchronize()  # makes torch's context current on this thread
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), code), "loading a kernel")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), f"finding {name}")
        _check(
            driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes),
            f"asking for {shared_bytes} bytes of shared memory",
        )

    def prepare(self, params: ctypes.Structure) -> Launch:
        """A call that enqueues the kernel with what these parameters then hold, on torch's current stream."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        start, sizes = _driver().cuLaunchCooperativeKernel, (self.grid, 1, 1, self.threads, 1, 1, self.shared_bytes)

        def launch(kept: ctypes.Structure = params) -> None:
            _enter()
            stream = ctypes.c_void_p(_current_stream())
            _check(start(self._function, *sizes, stream, arguments), "launching a kernel")

        return launch


_entered = threading.local()


def _enter() -> None:
    """Make torch's context current on this thread, once: the driver has none on a new one."""
    if not hasattr(_entered, "done"):
        torch.cuda.current_stream().synchronize()
        _entered.done = True


def _current_stream() -> int:
    """The handle of torch's current stream; an object for it takes the host ten times as long."""
    return int(torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()))


def wait() -> None:
    """Until what was enqueued on torch's current stream is done. Other threads run meanwhile."""
    _enter()
    _check(_driver().cuStreamSynchronize(ctypes.c_void_p(_current_stream())), "waiting for the device")


def copy_to_device(target: int, source: int, size: int) -> None:
    """Enqueue a copy from pinned memory on torch's current stream; by address: cheaper than slices of tensors."""
    _enter()
    stream = ctypes.c_void_p(_current_stream())
    pointers = ctypes.c_uint64(target), ctypes.c_void_p(source)
    _check(_driver().cuMemcpyHtoDAsync_v2(*pointers, ctypes.c_size_t(size), stream), "copying to the device")
