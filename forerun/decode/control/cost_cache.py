"""Cost curves on disk: what forwards took on this machine, so that the next start need not time them.

Curves timed in a busy moment do not stay: they are timed anew after a day, and at the next start when the steps of this
process took much less or more than they said. Where steps agree, what they taught replaces what was timed. Knows no
model: it is given what costs depend on.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.drafters import registered
from forerun.models.fetch.store import home, write_whole

MAX_AGE_S = 24 * 3600.0  # since curves were timed
MIN_OBSERVATIONS = 64  # steps of a process that count against what was timed
MAX_DRIFT = 0.4  # log of the factor between timed and observed seconds: 1.5


def folder() -> Path:
    return home() / "costs"


class CostCache:
    """The curves of one target and draft model. `files`: that the models came from."""

    def __init__(self, depends_on: Sequence[str], files: Sequence[Path]) -> None:
        self._key, self._files = list(depends_on), [str(file.absolute()) for file in files]
        name = hashlib.blake2b(json.dumps(self._key).encode(), digest_size=16).hexdigest()
        self.path = folder() / f"{name}.json"
        self._timed_at = time.time()

    def load(self) -> Controller | None:
        """None where curves have to be timed: there are none, they are old, or not what was written."""
        try:
            body = json.loads(self.path.read_text(encoding="utf-8"))
            found = body["costs"]
            age_s = time.time() - found["timed_at"]
            if body["checksum"] != _checksum(found) or found["key"] != self._key or not 0 <= age_s < MAX_AGE_S:
                return None
            drafters = {name: CostCurve.from_record(record) for name, record in found["drafters"].items()}
            controller = Controller(CostCurve.from_record(found["target"]), drafters)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        self._timed_at = found["timed_at"]
        return controller

    def store(self, controller: Controller) -> None:
        """Keep the curves as they are now; those of a user's own drafters are timed at every start."""
        drafters = {
            name: curve.record()
            for name, curve in controller.drafters.items()
            if name in registered() and registered()[name].__module__.startswith("forerun.")
        }
        found: dict[str, Any] = {
            "key": self._key,
            "files": self._files,
            "timed_at": self._timed_at,
            "target": controller.target.record(),
            "drafters": drafters,
        }
        write_whole(self.path, json.dumps({"costs": found, "checksum": _checksum(found)}))

    def close(self, controller: Controller) -> None:
        """Keep what steps taught, or forget curves that they contradict."""
        if controller.target.observations < MIN_OBSERVATIONS:
            return
        if abs(controller.target.drift) > MAX_DRIFT:
            with suppress(OSError):
                self.path.unlink()
        elif self.path.exists():  # not where another process has just forgotten them
            self.store(controller)


def remove_orphans() -> None:
    """Forget the curves of models that are no longer there."""
    for path in folder().glob("*.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            files = json.loads(path.read_text(encoding="utf-8"))["costs"]["files"]
            if not any(Path(file).exists() for file in files):
                path.unlink()


def _checksum(found: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(found, sort_keys=True).encode())
