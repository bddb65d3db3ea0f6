"""Inspection of large bodies in another process, and the limits that they must keep."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from forerun.engine.request_checks import naming_prompt
from forerun.errors import RequestBodyError
from forerun.server.body_inspector_process import LENGTH, MOST_FIELDS
from forerun.utils.json_file import Fields

LARGE_BODY = 1 << 17
"""Bytes of a body that is inspected: parsing it would block the interpreter for longer than a step may wait."""
_MOST_VALUES = 100_000
"""Maximum number of values of a field that is no prompt."""
_PROMPTS, _CHATS = ("prompt",), ("messages", "input", "instructions")
_END = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum sizes of a request.

    Attributes:
        name: the model's name in requests.
        context_length: tokens.
        token_length: characters of the longest token; None if the model has no tokenizer.
        prompts: prompts of one request.
    """

    name: str
    context_length: int
    token_length: int | None
    prompts: int

    def check(self, report: Fields) -> None:
        """Raise RequestBodyError for a body that cannot be served. report: of `body_inspector_process`."""
        if "error" in report:
            raise RequestBodyError(report.string("error"))
        if not report.flag("is_object"):
            raise RequestBodyError("The request's body is not a JSON object. Give one, with the fields of the request.")
        if report.integer("num_fields") > MOST_FIELDS:
            raise RequestBodyError(
                f"The request's body has {report.integer('num_fields')} fields, more than there are. Leave them out."
            )
        for name, counts in report.fields("fields").values.items():
            self._check(name, Fields("The request", counts, RequestBodyError))

    def _check(self, name: str, counts: Fields) -> None:
        is_prompt, is_chat = name in _PROMPTS, name in _CHATS
        numbers, values, entries = (counts.integer(key) for key in ("numbers", "values", "entries"))
        is_list_of_ids = is_prompt and numbers == entries
        if is_prompt or is_chat:
            characters = counts.integer("characters" if is_chat else "text")
            num_prompts = entries if is_prompt and not is_list_of_ids else 1
            with naming_prompt(counts.integer("longest"), num_prompts):
                if numbers >= self.context_length:
                    raise self._too_long(name, f"{numbers} tokens")
                if self.token_length is not None and characters > self.token_length * self.context_length:
                    size = f"{characters} characters, of which a token has at most {self.token_length}"
                    raise self._too_long(name, size)
        most = self.context_length * self.prompts if is_prompt else _MOST_VALUES
        if values > max(most, self.context_length) or (is_prompt and not is_list_of_ids and entries > self.prompts):
            raise RequestBodyError(
                f"{ascii(name)[1:-1]} holds {values} values, more than this server takes. Send fewer.",
                param=ascii(name)[1:-1],
            )

    def _too_long(self, name: str, size: str) -> RequestBodyError:
        return RequestBodyError(
            f"The prompt has {size}, but the context of {self.name} holds {self.context_length} tokens, and at least "
            "one position is needed for the answer. Shorten it.",
            param=name,
            code="context_length_exceeded",
        )


class BodyInspector:
    """A process that inspects large bodies, one after another; started for the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def inspect(self, content: bytes) -> Fields:
        """Return a report about a body. Blocks."""
        with self._lock:
            try:
                line = self._send(content)
            except OSError:  # the process was killed: retry with a new one
                self.close()
                line = self._send(content)
        return Fields.parse(line, "The inspection of a large body", RuntimeError)

    def close(self) -> None:
        """End the process; the next body starts another."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.kill()
            process.wait(_END)
            process.stdout.close()
            with suppress(OSError):
                process.stdin.close()

    def _send(self, content: bytes) -> str:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forerun.server.body_inspector_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at a terminal is for the server, which ends it
            )
        pipes: Any = self._process
        pipes.stdin.write(len(content).to_bytes(LENGTH, "big"))
        pipes.stdin.write(content)
        pipes.stdin.flush()
        line = pipes.stdout.readline()
        if not line:
            raise BrokenPipeError
        return str(line, "utf-8")
