"""A long job that can be stopped: its state lies beside its result, and the same job goes on from there.

Ctrl-C takes effect between two pieces of work, where the state is whole; a second one at once. Knows nothing of what
the job does: a state is a dictionary of tensors and plain values.
"""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from forerun.errors import BadRequest

EVERY_S = 60.0  # between two states
SHARE = 0.05  # of the time that saving may take
VERSION = 2  # of what is kept: sums of older ones have another width


class CalibrationState:
    """`job` says what is being done: a state of another job is refused. `values` is where an earlier run got to."""

    def __init__(self, out: Path, job: dict[str, Any]) -> None:
        self.path = out.with_name(out.name + ".state")
        self._job = job
        self._start = self._saved = time.monotonic()
        self._took, self._before = 0.0, 0.0  # seconds of the last saving, and of earlier runs
        self.asked = False  # to stop
        self.values: dict[str, Any] = self._load() if self.path.exists() else {}

    @property
    def seconds(self) -> float:
        """Spent so far, earlier runs included."""
        return self._before + time.monotonic() - self._start

    def tick(self, values: Callable[[], dict[str, Any]]) -> None:
        """Between two pieces of work: save where it is time to, and stop where that was asked."""
        waited = time.monotonic() - self._saved
        if self.asked or (waited >= EVERY_S and self._took <= SHARE * waited):
            self.save(values())
        if self.asked:
            raise KeyboardInterrupt

    def save(self, values: dict[str, Any]) -> None:
        start = time.monotonic()
        part = self.path.with_name(self.path.name + ".part")
        try:
            with part.open("wb") as file:  # given a name, torch does not say why it cannot be written
                torch.save({"version": VERSION, "job": self._job, "seconds": self.seconds, "values": values}, file)
            part.replace(self.path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                part.unlink()
            reason = error if isinstance(error, OSError) else error.__context__  # torch stumbles over it once more
            if not isinstance(reason, OSError):
                raise
            raise BadRequest(
                f"cannot write the state {self.path}: {reason.strerror or reason}",
                "make room there: the same command goes on from the last state; or give another --out",
            ) from None
        self._saved = time.monotonic()
        self._took = self._saved - start

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While it lasts, the first Ctrl-C waits for the next `tick`."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return

        def ask(number: int, frame: FrameType | None) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        before = signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _load(self) -> dict[str, Any]:
        hint = f"delete {self.path} to start anew, or give another --out"
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            version, job, values = state["version"], state["job"], state["values"]
            self._before = float(state["seconds"])
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
            detail = str(error).split("\n")[0]
            raise BadRequest(f"{self.path} is not the state of a calibration ({detail:.100})", hint) from None
        if version != VERSION:
            raise BadRequest(f"{self.path} is a state of version {version}, this is {VERSION}", hint)
        other = [name for name in self._job | job if self._job.get(name) != job.get(name)]
        if other:
            changes = ", ".join(f"{name} was {job.get(name)!r:.60}, is {self._job.get(name)!r:.60}" for name in other)
            raise BadRequest(
                f"{self.path} is the state of another calibration: {changes}",
                f"give the same arguments to go on with it; {hint}",
            )
        return values
