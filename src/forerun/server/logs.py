"""The log, for people or as JSON, without the text of prompts and answers: in both, a line an event."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

LOGGER = "forerun.server"
TEXT = "text"
JSON = "json"
LOG_FORMATS = (TEXT, JSON)

_SHOWN: Mapping[str, str] = {
    "model": "{}",
    "seconds": "{:.2f} s",
    "prompt_tokens": "prompt {}",
    "cached_tokens": "{} cached",
    "computed_tokens": "{} computed",
    "first_token_seconds": "first token {:.2f} s",
    "completion_tokens": "{} tokens",
    "tokens_per_second": "{:.1f} a second",
    "tokens_per_step": "{:.2f} a step",
    "finish_reasons": "{}",
    "ignored": "without effect {}",
    "param": "field {}",
    "error": "{}",
    "cut": "cut: {}",
    "disconnected": "the client has gone",
}
"""What people read of a request's event, where it is there, and how."""


def _failure(record: logging.LogRecord) -> dict[str, Any]:
    """Return type and lines of a record's exception alone: its text may contain parts of a request."""
    if record.exc_info is None or record.exc_info[0] is None:
        return {}
    frames = logging.Formatter().formatException(record.exc_info).splitlines()
    at = [line.strip() for line in frames if line.startswith("  File ")]
    return {"error": record.exc_info[0].__name__, "at": at}


class JsonFormatter(logging.Formatter):
    """Formats a record's time, level, logger and message as JSON; a dict as message adds its entries."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        entry |= record.msg if isinstance(record.msg, dict) else {"message": record.getMessage()}
        return json.dumps(entry | _failure(record), ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record as a line of local time and text; of a dict, that of a request by `_SHOWN`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = record.msg if isinstance(record.msg, dict) else {"event": record.getMessage()}
        if entry["event"] == "request":
            head = f"{entry['status'] or 499} {entry['method']} {entry['path']}"
            told = [shown.format(_joined(entry[name])) for name, shown in _SHOWN.items() if name in entry]
        else:
            head = entry["event"]
            told = [f"{name} {_joined(value)}" for name, value in entry.items() if name != "event"]
        told += [f"{name} {_joined(value)}" for name, value in _failure(record).items()]
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        said = ": ".join(filter(None, (head, ", ".join(told))))
        line = f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} {level}{said}"
        # paths and names of fields come from clients, who could write lines of their own, or to the terminal
        return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def _joined(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def start_log(log_format: str) -> None:
    """Write all logs to standard error in this format of LOG_FORMATS from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == JSON else TextFormatter())
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger(LOGGER).setLevel(logging.INFO)
