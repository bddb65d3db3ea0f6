"""Tool calls, for models whose chat template supports them: definitions in the prompt, calls in the answer.

The only format is Hermes' (Qwen's too): the model writes `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence as Seq
from typing import Any

from forerun.errors import RequestBodyError
from forerun.server.protocol.fields import field
from forerun.utils.json_file import Fields

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


def check_template_carries(tokenizer: Any, param: str) -> None:
    """Raise RequestBodyError if the chat template does not support tools in this format."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or "tools" not in template or _OPEN not in template:
        raise RequestBodyError(
            f"{param} cannot be used with this model: its chat template does not carry tools, or not with {_OPEN} "
            "around calls. Leave it out, or take a model that was made for tools.",
            param=param,
        )


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the functions that the model may call; none if the body has none or disables calls.

    Raises:
        RequestBodyError: they are malformed, or the body forces or forbids calls in an unsupported way.
    """
    tools = field(body, "tools").list_of("tools", dict, [])
    for tool in tools:
        fields = Fields("A tool", tool, lambda text: RequestBodyError(text, param="tools"), "Give functions.", True)
        fields.string("type", choices=("function",))
        function = fields.fields("function")
        function.string("name")
        function.string("description", None)
        function.fields("parameters", None)
        if function.flag("strict", False):
            raise RequestBodyError("strict tools are not supported. Leave strict out.", param="tools")
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none") or not isinstance(choice, str):
        raise RequestBodyError(
            "tool_choice is not supported, other than 'auto' or 'none': no call can be forced. Leave it out.",
            param="tool_choice",
        )
    if not field(body, "parallel_tool_calls").flag("parallel_tool_calls", True) and tools:
        raise RequestBodyError(
            "parallel_tool_calls is not supported, other than true. Leave it out.", param="parallel_tool_calls"
        )
    return [] if choice == "none" else tools


def read_messages(messages: Seq[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Return the messages with the arguments of calls as objects, and whether there are calls.

    Raises:
        RequestBodyError: a call is malformed.
    """
    found, any_calls = [], False
    for message in messages:
        calls = message.get("tool_calls")
        any_calls = any_calls or bool(calls) or message.get("role") == "tool"
        if calls:
            message = {"content": None, **message, "tool_calls": [_read_call(call) for call in _list(calls)]}
        found.append(message)
    return found, any_calls


def _list(calls: Any) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestBodyError("tool_calls of a message must be a list of objects.", param="messages")
    return calls


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestBodyError("A tool call of a message has no function with a name.", param="messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestBodyError("The arguments of a tool call are not JSON.", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


class CallReader:
    """Splits a growing text into content and calls; text that may become a call is held back.

    Text that resembles a call but is none stays content.

    Args:
        name: prefix of the calls' ids.

    Attributes:
        num_calls: so far.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = ""
        self.num_calls = 0

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Add text; return the content and the calls that it completes. last: nothing follows."""
        self._held += text
        content, calls = "", []
        while (block := _BLOCK.search(self._held)) is not None:
            content += self._held[: block.start()]
            call = self._call(block[1])
            content += "" if call else block[0]
            calls += call
            self._held = self._held[block.end() :].lstrip("\n") if call else self._held[block.end() :]
        shown = len(self._held) if last else _safe_length(self._held)
        content, self._held = content + self._held[:shown], self._held[shown:]
        return content, calls

    def _call(self, text: str) -> list[dict[str, Any]]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return []
        arguments = found.get("arguments", {})
        if not isinstance(arguments, dict):
            return []
        function = {"name": found["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        self.num_calls += 1
        return [{"id": f"call_{self._name}_{self.num_calls - 1}", "type": "function", "function": function}]


def as_message(text: str, name: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the content of an answer, None if it only has calls; and the calls."""
    content, calls = CallReader(name).push(text, last=True)
    if calls:
        content = content.strip()
    return content if content or not calls else None, calls


def numbered(calls: Iterable[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """Return calls with their index, as in chunks of a stream."""
    return [{"index": index, **call} for index, call in enumerate(calls, first)]


def _safe_length(text: str) -> int:
    """Return the number of characters that cannot belong to a call."""
    at = text.find(_OPEN)
    if at >= 0:
        return at
    for size in range(min(len(_OPEN) - 1, len(text)), 0, -1):
        if text.endswith(_OPEN[:size]):
            return len(text) - size
    return len(text)
