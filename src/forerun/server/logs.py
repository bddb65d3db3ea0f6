"""Logs as JSON, an object a line: no text of prompts or answers, unless it is asked for."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

LOGGER = "forerun.server"


class JsonFormatter(logging.Formatter):
    """A record's time, level and logger, and its message; a message that is a dict gives its entries."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        told |= record.msg if isinstance(record.msg, dict) else {"message": record.getMessage()}
        if record.exc_info and record.exc_info[0] is not None:
            # by type and place: an exception's own text may hold what a request held
            frames = self.formatException(record.exc_info).splitlines()
            told["error"] = record.exc_info[0].__name__
            told["at"] = [line.strip() for line in frames if line.startswith("  File ")]
        return json.dumps(told, ensure_ascii=False, default=str)


def log_as_json() -> None:
    """Let everything that is logged go to standard error in this form, from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.getLogger(LOGGER).setLevel(logging.INFO)
