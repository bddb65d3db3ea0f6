"""Conversion of exceptions into error bodies of each API with HTTP statuses."""

from __future__ import annotations

from typing import Any

from forerun.errors import (
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    EngineClosedError,
    ForerunError,
    GrammarDeadEndError,
    PromptError,
    QueueFullError,
    ReplicaError,
    RequestBodyError,
    RequestTimeoutError,
)
from forerun.server.protocol.requests import MESSAGES_URL

OLLAMA_PATHS = "/api/"
"""The beginning of paths that answer as Ollama does."""
_KINDS: tuple[tuple[type[ForerunError], int, str], ...] = (
    (PromptError, 400, "invalid_request_error"),
    (ConfigError, 400, "invalid_request_error"),
    (GrammarDeadEndError, 400, "invalid_request_error"),
    (QueueFullError, 429, "rate_limit_error"),
    (EngineClosedError, 503, "server_error"),
    (ReplicaError, 503, "server_error"),
    (DeviceError, 503, "server_error"),
    (DeviceMemoryError, 503, "server_error"),
    (RequestTimeoutError, 408, "timeout_error"),
    (ForerunError, 500, "server_error"),
)


def error_response(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an exception.

    Of an exception that is not forerun's only the type is named, since its text may contain parts of a request.
    """
    if isinstance(error, RequestBodyError):
        return error.status, _body(str(error), "invalid_request_error", error.param, error.code)
    for kind, status, name in _KINDS:
        if isinstance(error, kind):
            return status, _body(str(error), name)
    return 500, _body(
        f"The request failed with {type(error).__name__}, which is a fault of the server.", "server_error"
    )


def error_at(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's error body in the form of the API that a path belongs to."""
    if path.startswith(OLLAMA_PATHS):
        return {"error": body["error"]["message"]}
    return {"type": "error", **body} if path.startswith(MESSAGES_URL) else body


def failure_fields(error: BaseException) -> dict[str, str]:
    """Return what the log tells of an exception: its type, and the field that it names, of what is refused the body."""
    param = getattr(error, "param", None) or ("body" if error_response(error)[0] == 400 else None)
    return {"error": type(error).__name__} | ({} if param is None else {"param": str(param)[:200]})


def _body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
