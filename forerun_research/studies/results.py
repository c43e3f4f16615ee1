"""Results of a study as JSON lines, written as they come: an interrupted study goes on where it stopped.

Lines with `parts` say what the results after them belong to. A file may grow by measures, settings and prompts, but one
that knows another setting, profile or measure by the same name is refused rather than continued.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.errors import BadRequest
from forerun_research.studies.study import Study

Record = dict[str, Any]
FILE = "results.jsonl"


class Results:
    def __init__(self, folder: Path, study: Study) -> None:
        self.path = folder / FILE
        # variant -> measure -> condition -> case -> record
        self._found: dict[str, dict[str, dict[str, dict[str, Record]]]] = {}
        self._parts: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._read()
        mine = study.parts()
        other = [name for name, digest in mine.items() if self._parts.get(name, digest) != digest]
        if other:
            raise BadRequest(
                f"{self.path} holds results of another study: it differs in {', '.join(other)}",
                "use another --out, or remove the file",
            )
        if not mine.items() <= self._parts.items():
            self._write({"study": study.title, "parts": mine})

    def of(self, variant: str, measure: str) -> dict[str, dict[str, Record]]:
        """condition -> case -> record, as far as it is known."""
        return self._found.setdefault(variant, {}).setdefault(measure, {})

    def add(self, variant: str, measure: str, condition: str, case: str, record: Record) -> None:
        self.of(variant, measure).setdefault(condition, {})[case] = record
        self._write({"variant": variant, "measure": measure, "condition": condition, "case": case, "record": record})

    def _write(self, line: Record) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self) -> None:
        """A last line without its end was cut when the study was interrupted: it is removed."""
        whole = self.path.read_text(encoding="utf-8")
        kept = whole.rpartition("\n")[0] + "\n" if "\n" in whole else ""
        for number, text in enumerate(kept.splitlines(), 1):
            try:
                line = json.loads(text)
                if "parts" in line:
                    self._parts |= line["parts"]
                else:
                    cases = self.of(line["variant"], line["measure"]).setdefault(line["condition"], {})
                    cases[line["case"]] = line["record"]
            except (ValueError, KeyError, TypeError):
                raise BadRequest(f"{self.path}, line {number} is damaged", "remove it, or use another --out") from None
        if kept != whole:
            self.path.write_text(kept, encoding="utf-8")
