"""Logs as JSON, an object a line, without the text of prompts and answers."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

LOGGER = "forerun.server"


class JsonFormatter(logging.Formatter):
    """Formats a record's time, level, logger and message as JSON; a dict as message adds its entries."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        entry |= record.msg if isinstance(record.msg, dict) else {"message": record.getMessage()}
        if record.exc_info and record.exc_info[0] is not None:
            # type and lines only: an exception's text may contain parts of a request
            frames = self.formatException(record.exc_info).splitlines()
            entry["error"] = record.exc_info[0].__name__
            entry["at"] = [line.strip() for line in frames if line.startswith("  File ")]
        return json.dumps(entry, ensure_ascii=False, default=str)


def log_as_json() -> None:
    """Write all logs to standard error in this format from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger(LOGGER).setLevel(logging.INFO)
