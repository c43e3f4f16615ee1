"""Cost curves and acceptance on disk, so that the next start need not time forwards and its first requests know what
drafters are worth.

Curves timed in a busy moment do not stay: they are timed anew after a day, and at the next start when the steps of this
process took much less or more than they said. Where steps agree, what they taught replaces what was timed. Acceptance
does not depend on the machine's mood: it lies in a file of its own and stays. Knows no model: it is given what costs
depend on.
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

from forerun.decode.control.acceptance import ELSEWHERE, DrafterRecord
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.drafters import registered
from forerun.models.fetch.store import home, write_whole

MAX_AGE_S = 24 * 3600.0  # since curves were timed
MIN_OBSERVATIONS = 64  # steps of a process that count against what was timed
MAX_DRIFT = 0.4  # log of the factor between timed and observed seconds: 1.5
LEARNT_VERSION = 6  # of the records of acceptance: others are not read
MAX_KINDS = 16  # of prompts, in a file
MAX_RECORDS = 64  # of drafters there: servers name their models as they like


def folder() -> Path:
    return home() / "costs"


class CostCache:
    """What is known of one target and draft model. `files`: that the models came from; `timed`: False where timing
    forwards takes no time to speak of, and only acceptance is kept; `accepts_by`: the first so many of what costs
    depend on are all that acceptance does (the weights and their precision, not the machine)."""

    def __init__(
        self, depends_on: Sequence[str], files: Sequence[Path], timed: bool = True, accepts_by: int | None = None
    ) -> None:
        self._timed, self._learnt_key = timed, list(depends_on[:accepts_by])
        self._key, self._files = list(depends_on), [str(file.absolute()) for file in files]
        self.path, self.learnt_path = _path(self._key), _path([*self._learnt_key, "learnt"])
        self._timed_at = time.time()

    def load(self) -> Controller | None:
        """None where curves have to be timed: there are none, they are old, or not what was written."""
        if not self._timed:
            return None
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
        if not self._timed:
            return
        drafters = {name: curve.record() for name, curve in controller.drafters.items() if _is_ours(name)}
        found: dict[str, Any] = {
            "key": self._key,
            "files": self._files,
            "timed_at": self._timed_at,
            "target": controller.target.record(),
            "drafters": drafters,
        }
        write_whole(self.path, json.dumps({"costs": found, "checksum": _checksum(found)}))

    def load_learnt(self, controller: Controller) -> None:
        """Give a controller what was accepted in processes before; nothing where the file is not as it was written."""
        try:
            body = json.loads(self.learnt_path.read_text(encoding="utf-8"))
            found = body["learnt"]
            described = (found["version"], found["key"])
            if body["checksum"] != _checksum(found) or described != (LEARNT_VERSION, self._learnt_key):
                return
            records = {name: DrafterRecord.from_record(record) for name, record in found["drafters"].items()}
            lengths = {kind: [float(n), float(sum_), float(sq)] for kind, (n, sum_, sq) in found["lengths"].items()}
            controller.acceptance.gains.load(found["gains"])
            controller.acceptance.paid_gains.load(found["paid_gains"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return
        for name, record in records.items():
            if name.startswith(ELSEWHERE):
                record.run_s = record.read_s = 0.0  # of another server, perhaps
        controller.acceptance.records.update(records)
        controller.acceptance.lengths.update(lengths)

    def store_learnt(self, controller: Controller) -> None:
        """Keep what was accepted, of the package's own drafters."""
        known = controller.acceptance
        drafters = {
            name: record.record()
            for name, record in known.records.items()
            if (_is_ours(name) or name.startswith(ELSEWHERE)) and len(record.kinds) <= MAX_KINDS
        }
        if not any(record.observations for record in known.records.values()):
            return
        drafters = dict(list(drafters.items())[-MAX_RECORDS:])
        lengths = dict(list(known.lengths.items())[:MAX_KINDS])
        found: dict[str, Any] = {"version": LEARNT_VERSION, "key": self._learnt_key, "files": self._files}
        found |= {"lengths": lengths, "drafters": drafters}
        for name, gains in (("gains", known.gains), ("paid_gains", known.paid_gains)):
            found[name] = dict(list(gains.as_json().items())[:MAX_KINDS])
        write_whole(self.learnt_path, json.dumps({"learnt": found, "checksum": _checksum(found)}))

    def close(self, controller: Controller) -> None:
        """Keep what steps taught, or forget curves that they contradict."""
        self.store_learnt(controller)
        if controller.target.observations < MIN_OBSERVATIONS:
            return
        if abs(controller.target.drift) > MAX_DRIFT:
            with suppress(OSError):
                self.path.unlink()
        elif self.path.exists():  # not where another process has just forgotten them
            self.store(controller)


def remove_orphans() -> None:
    """Forget what is known of models that are no longer there."""
    for path in folder().glob("*.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            body = json.loads(path.read_text(encoding="utf-8"))
            files = (body.get("costs") or body["learnt"])["files"]
            if not any(Path(file).exists() for file in files):
                path.unlink()


def _path(key: list[str]) -> Path:
    return folder() / f"{hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()}.json"


def _is_ours(drafter: str) -> bool:
    return drafter in registered() and registered()[drafter].__module__.startswith("forerun.")


def _checksum(found: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(found, sort_keys=True).encode())
