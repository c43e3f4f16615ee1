"""Log records of a server, as text or as one JSON object to a line."""

from __future__ import annotations

import json
import logging

from forerun.errors import BadRequest


class JsonFormatter(logging.Formatter):
    """The record's `fields`, where it has some, beside time, level, message and the replica's name."""

    def __init__(self, replica: str = "") -> None:
        super().__init__()
        self._own = {"replica": replica} if replica else {}

    def format(self, record: logging.LogRecord) -> str:
        made = {"time": self.formatTime(record), "level": record.levelname, "message": record.getMessage()}
        if record.exc_info:
            made["error"] = self.formatException(record.exc_info)
        return json.dumps(made | self._own | getattr(record, "fields", {}))


def configure_logs(form: str, replica: str = "") -> None:
    """`form`: text or json; `replica`: the name of the one whose process this is."""
    if form not in ("text", "json"):
        raise BadRequest(f"--log-format is {form!r:.40}", "use text or json")
    handler = logging.StreamHandler()
    text = logging.Formatter(f"%(asctime)s %(levelname)s {f'{replica} ' if replica else ''}%(message)s")
    handler.setFormatter(JsonFormatter(replica) if form == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
