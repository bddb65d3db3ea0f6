"""Large bodies are looked at in another process first; what cannot be served is refused by what that one tells."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from forerun.errors import RequestBodyError
from forerun.server.body_inspector_process import LENGTH, MOST_FIELDS
from forerun.utils.json_file import Fields

LARGE_BODY = 1 << 17
"""Bytes of JSON that keep the interpreter to themselves for longer than a step may wait."""
_MOST_VALUES = 100_000
"""Of a field that is no prompt."""
_PROMPTS, _CHATS = ("prompt",), ("messages", "input", "instructions")
_END = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt may be.

    Attributes:
        name: of the model, as clients know it.
        context: tokens.
        token: characters of the longest token; None where the model has no tokenizer.
        prompts: of one request.
    """

    name: str
    context: int
    token: int | None
    prompts: int

    def check(self, told: Fields) -> None:
        """Raise RequestBodyError for a body that cannot be served. told: by `weigh.answer`."""
        if "error" in told:
            raise RequestBodyError(told.string("error"))
        if not told.flag("is_object"):
            raise RequestBodyError("The request's body is not a JSON object. Give one, with the fields of the request.")
        if told.integer("num_fields") > MOST_FIELDS:
            raise RequestBodyError(
                f"The request's body has {told.integer('num_fields')} fields, more than there are. Leave them out."
            )
        for name, weight in told.fields("fields").values.items():
            self._check(name, Fields("The request", weight, RequestBodyError))

    def _check(self, name: str, weight: Fields) -> None:
        is_prompt, is_chat = name in _PROMPTS, name in _CHATS
        numbers, values = weight.integer("numbers"), weight.integer("values")
        if is_prompt or is_chat:
            characters = weight.integer("characters" if is_chat else "text")
            if numbers >= self.context:
                raise self._too_long(name, f"{numbers} tokens")
            if self.token is not None and characters > self.token * self.context:
                raise self._too_long(name, f"{characters} characters, of which a token has at most {self.token}")
        is_list_of_ids = is_prompt and numbers == weight.integer("entries")
        most = self.context * self.prompts if is_prompt else _MOST_VALUES
        if values > max(most, self.context) or (
            is_prompt and not is_list_of_ids and weight.integer("entries") > self.prompts
        ):
            raise RequestBodyError(
                f"{ascii(name)[1:-1]} holds {values} values, more than this server takes. Send fewer.",
                param=ascii(name)[1:-1],
            )

    def _too_long(self, name: str, size: str) -> RequestBodyError:
        return RequestBodyError(
            f"The prompt has {size}, but the context of {self.name} holds {self.context} tokens, and at least one "
            "place is needed for the answer. Shorten it.",
            param=name,
            code="context_length_exceeded",
        )


class BodyInspector:
    """The process that looks at large bodies, one after another; started when the first of them comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def told(self, content: bytes) -> Fields:
        """What a body holds. Waits; for threads that may."""
        with self._lock:
            try:
                line = self._ask(content)
            except OSError:  # it has been killed: once more, with another
                self.close()
                line = self._ask(content)
        return Fields.parse(line, "The look at a large body", RuntimeError)

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

    def _ask(self, content: bytes) -> str:
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


def longest_token(tokenizer: Any) -> int | None:
    """Characters of the longest token as the vocabulary writes it, which are no fewer than those it stands for."""
    if tokenizer is None:
        return None
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    return max(map(len, vocabulary))
