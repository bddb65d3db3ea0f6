"""The parser of an answer's text: content, thinking, and tool calls, whole or in pieces.

The only format so far is Hermes' (Qwen's too): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.errors import RequestBodyError

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a text adds to a tool call.

    Attributes:
        index: of the call in the answer.
        name: of the function, with the first piece of the call; else None.
        arguments: a piece of JSON.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Delta:
    """What a text adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ResponseParser(Protocol):
    """Splits the growing text of one answer. What may become something else is held back."""

    def push(self, text: str, *, last: bool = False) -> Delta:
        """Add text. last: nothing follows, so that nothing is held back."""


def response_parser(tools: Seq[dict[str, Any]]) -> ResponseParser:
    """Return a parser of one answer to a request with these tools."""
    return HermesParser(bool(tools))


def check_template_carries(tokenizer: Any, param: str) -> None:
    """Raise RequestBodyError if the chat template does not support tools in this format."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or "tools" not in template or _OPEN not in template:
        raise RequestBodyError(
            f"{param} cannot be used with this model: its chat template does not carry tools, or not with {_OPEN} "
            "around calls. Leave it out, or take a model that was made for tools.",
            param=param,
        )


class HermesParser:
    """Reads calls of Hermes' format. Text that resembles a call but is none stays content.

    has_tools: there may be calls.
    """

    def __init__(self, has_tools: bool) -> None:
        self._has_tools, self._held, self._num_calls = has_tools, "", 0

    def push(self, text: str, *, last: bool = False) -> Delta:
        if not self._has_tools:
            return Delta(text)
        self._held += text
        found = Delta()
        while (block := _BLOCK.search(self._held)) is not None:
            found.content += self._held[: block.start()]
            self._held = self._held[block.end() :]
            if (call := self._call(block[1])) is None:
                found.content += block[0]
            else:
                found.calls.append(call)
                self._held = self._held.lstrip("\n")
        shown = len(self._held) if last else _safe_length(self._held)
        found.content, self._held = found.content + self._held[:shown], self._held[shown:]
        return found

    def _call(self, text: str) -> CallDelta | None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        arguments = found.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        self._num_calls += 1
        return CallDelta(self._num_calls - 1, found["name"], json.dumps(arguments, ensure_ascii=False))


def _safe_length(text: str) -> int:
    """Return the number of characters that cannot belong to a call."""
    at = text.find(_OPEN)
    if at >= 0:
        return at
    for size in range(min(len(_OPEN) - 1, len(text)), 0, -1):
        if text.endswith(_OPEN[:size]):
            return len(text) - size
    return len(text)
