"""The state of an unfinished calibration on disk: PROFILE.state beside the profile, from which the same command
resumes.

Ctrl-C takes effect at the next save point, where the state is whole; a second one at once. Of the `forerun` command
Ctrl-C takes effect within a second: where no save point comes by then, the last state is what remains. Knows nothing of
what is computed: a state is a dictionary of tensors and plain values.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from forerun import interrupt
from forerun.errors import BadRequest

SAVE_INTERVAL_S = 60.0
MAX_SAVING_SHARE = 0.05  # of the time
MAX_STATE_BYTES = 2 << 30  # a larger state is not written: that part of the work is done anew after Ctrl-C
STATE_VERSION = 2  # the sums of older ones have another width


class CalibrationState:
    """`inputs`: everything that determines the result; a state with other inputs is refused. `values`: what an earlier
    run saved."""

    def __init__(self, out: Path, inputs: dict[str, Any], start: float | None = None) -> None:
        """`start`: of the command, by the monotonic clock."""
        self.path = out.with_name(out.name + ".state")
        self._inputs = inputs
        self._last_save = time.monotonic()
        self._start = self._last_save if start is None else start
        self._save_s, self._earlier_s = 0.0, 0.0  # of the last save, and of earlier runs
        self.stop_requested = False
        self.values: dict[str, Any] = self._load() if self.path.exists() else {}

    @property
    def seconds(self) -> float:
        """Spent so far, earlier runs included."""
        return self._earlier_s + time.monotonic() - self._start

    def save_point(self, values: Callable[[], dict[str, Any]]) -> None:
        """Save if it is due; after Ctrl-C save and raise KeyboardInterrupt. `values` is called only if it saves."""
        waited = time.monotonic() - self._last_save
        if self.stop_requested or (waited >= SAVE_INTERVAL_S and self._save_s <= MAX_SAVING_SHARE * waited):
            self.save(values())
        if self.stop_requested:
            raise KeyboardInterrupt(self.stopped())

    def stopped(self) -> str:
        """What an interrupted calibration leaves."""
        left = f"the same command resumes from {self.path}" if self.path.exists() else "nothing is saved"
        return f"stopped; {left}"

    def save(self, values: dict[str, Any]) -> None:
        if _nbytes(values) <= MAX_STATE_BYTES:
            with interrupt.shield:
                self._write(values)
        self._last_save = time.monotonic()

    def _write(self, values: dict[str, Any]) -> None:
        start = time.monotonic()
        part = self.path.with_name(self.path.name + ".part")
        try:
            with part.open("wb") as file:  # given a path, torch hides why it cannot be written
                about = {"version": STATE_VERSION, "job": self._inputs, "seconds": self.seconds}
                torch.save({**about, "values": values}, file)
            part.replace(self.path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                part.unlink()
            reason = error if isinstance(error, OSError) else error.__context__  # torch raises another one on closing
            if not isinstance(reason, OSError):
                raise
            hint = "make room there: the same command resumes from the last state; or give another --out"
            raise BadRequest(f"cannot write the state {self.path}: {reason.strerror or reason}", hint) from None
        self._save_s = time.monotonic() - start

    def remove(self) -> None:
        for path in (self.path, self.path.with_name(self.path.name + ".part")):
            path.unlink(missing_ok=True)

    @contextmanager
    def defer_interrupt(self) -> Iterator[None]:
        """Within it the first Ctrl-C takes effect at the next `save_point`."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt(self.stopped())
            self.stop_requested = True

        with interrupt.handled_by(on_interrupt, self.stopped):
            yield

    def _load(self) -> dict[str, Any]:
        hint = f"delete {self.path} to start anew, or give another --out"
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            version, job, values = state["version"], state["job"], state["values"]
            self._earlier_s = float(state["seconds"])
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
            detail = str(error).split("\n")[0]
            raise BadRequest(f"{self.path} is not the state of a calibration ({detail:.100})", hint) from None
        if version != STATE_VERSION:
            raise BadRequest(f"{self.path} is a state of version {version}, this is {STATE_VERSION}", hint)
        other = [name for name in self._inputs | job if self._inputs.get(name) != job.get(name)]
        if other:
            now = self._inputs
            changes = ", ".join(f"{name} was {job.get(name)!r:.60}, is {now.get(name)!r:.60}" for name in other)
            problem = f"{self.path} is the state of another calibration: {changes}"
            raise BadRequest(problem, f"give the same arguments to resume it; {hint}")
        return values


def _nbytes(values: Any) -> int:
    """Of the tensors in nested dictionaries."""
    if isinstance(values, torch.Tensor):
        return values.nbytes
    return sum(map(_nbytes, values.values())) if isinstance(values, dict) else 0
