"""Messages of a chat: which are read, and the forms in which chat templates may have to be given them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import Any

from forerun.errors import PromptError
from forerun.utils.child_program import THOUGHTS

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMERLY = {"function_call": "tool_calls", "audio": "text"}
"""Fields of messages that are not read, and those that are."""


def read_message(entry: Any, index: int) -> dict[str, Any]:
    """Return a message as chat templates read it: without fields that are None, its parts of text joined, its calls as
    `read_calls` returns them; its content may be None beside calls or thinking.

    Raises:
        PromptError: it has parts or fields that are not read, or has no content.
    """
    message = {key: value for key, value in dict(entry).items() if value is not None}
    has_more = message.get("role") == "assistant" and any(map(message.get, ("tool_calls", *THOUGHTS)))
    if "role" not in message or not ("content" in entry or has_more):
        raise PromptError(f"Message {index} of the chat needs both 'role' and 'content'.")
    if odd := next((field for field in _FORMERLY if field in message), None):
        raise PromptError(f"Message {index} of the chat has {odd}, which is not read. Give {_FORMERLY[odd]}.")
    content = message.setdefault("content", None)
    if calls := message.pop("tool_calls", None):  # templates may ask whether there is a list, though it be empty
        message["tool_calls"] = read_calls(calls)
    if content is None and not has_more:
        raise PromptError(
            f"The content of message {index} of the chat is null, which only that of an assistant's message with calls "
            "may be. Give a text."
        )
    if isinstance(content, Seq) and not isinstance(content, str):
        if not all(map(_is_text, content)):
            raise PromptError(
                f"The content of message {index} of the chat has parts that are not text. Pictures, sound and files "
                'are not read: give {"type": "text", "text": "..."} alone.'
            )
        message["content"] = "".join(part["text"] for part in content)
    elif not isinstance(content, str | None):
        raise PromptError(
            f"The content of message {index} of the chat is of type {type(content).__name__}. "
            "Give text, or a list of parts of text."
        )
    return message


def _is_text(part: Any) -> bool:
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    return kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str)


def read_calls(calls: Any) -> list[dict[str, Any]]:
    """Return the calls of a message with their arguments as objects. Raises PromptError if one is malformed."""
    if not isinstance(calls, Seq) or isinstance(calls, str):
        raise PromptError("tool_calls of a message must be a list of objects.")
    return [_read_call(call.model_dump() if hasattr(call, "model_dump") else call) for call in calls]


def _read_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError("A tool call of a message has no function with a name.")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise PromptError("The arguments of a tool call are not JSON.") from None
    return {**call, "function": {**function, "arguments": arguments}}


def check_roles(messages: Seq[Mapping[str, Any]], template: str) -> None:
    """Raise PromptError if a message has a role that is none of OpenAI's, and that the template does not name."""
    for index, message in enumerate(messages):
        role = message["role"]
        if role in _ROLES or (isinstance(role, str) and role != "function" and _names(template, role)):
            continue
        remedy = "The result of a call has the role 'tool'." if role == "function" else f"Give {', '.join(_ROLES)}."
        raise PromptError(f"Message {index} of the chat has the role {ascii(role)[:60]}, which is not known. {remedy}")


def _names(template: str, role: str) -> bool:
    """Return whether a template compares something with a role."""
    texts = (f"{quote}{role}{quote}" for quote in "\"'")
    return any(re.search(rf"(?:==|\bin\b)[^%}}]*?{re.escape(text)}", template) for text in texts if text in template)


def key_to_continue(messages: Seq[Mapping[str, Any]], asked: bool | str) -> str:
    """Return which text of the last message is to be continued: what it says, or, if that is empty, what it thinks.

    asked: or the name of this text.

    Raises:
        PromptError: there is no such text, or nothing can follow the message.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        raise PromptError(
            f"Only a last message of the role 'assistant' can be continued, and this chat's has {last['role']!a}. "
            "Leave continue_final_message out."
        )
    if last.get("tool_calls"):
        raise PromptError(
            "The last message of the chat has calls, so it is not continued. Give their results in messages of the "
            "role 'tool', or leave the calls out."
        )
    thought = next((key for key in THOUGHTS if last.get(key)), "content")
    written = "content" if last["content"] else thought
    key = asked if isinstance(asked, str) else written
    if not isinstance(last.get(key), str):
        raise PromptError(f"The last message of the chat has no {ascii(key)[1:-1][:60]} to continue. Give a text.")
    return key


def forms_of(messages: Seq[dict[str, Any]], template: str) -> Iterator[list[dict[str, Any]]]:
    """Yield forms of the same messages, of which a template may read one alone, the usual one first.

    A developer's message is the system's where the template does not name that role; system messages at the beginning
    are one where it reads one alone.
    """
    as_system = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    if as_system == messages or "developer" in template:
        yield from _contents(messages, template)
    if as_system != messages:
        yield from _contents(as_system, template)
    num_system = next((place for place, each in enumerate(as_system) if each["role"] != "system"), len(messages))
    if num_system > 1:
        whole = "\n\n".join(each["content"] for each in as_system[:num_system])
        yield from _contents([{**as_system[0], "content": whole}, *as_system[num_system:]], template)


def _contents(chat: Seq[dict[str, Any]], template: str) -> Iterator[list[dict[str, Any]]]:
    """Yield messages with contents that are None left out, empty or None; with arguments of calls as text; with lists
    of parts, as templates of models that also see read them; and with calls as the model writes them in its text."""
    plain = [{key: value for key, value in each.items() if value is not None} for each in chat]
    has_calls = any("tool_calls" in each for each in plain)
    written = [_written(each) for each in plain] if has_calls else plain
    for form in (plain, written) if has_calls else (plain,):
        yield form
        if any("content" not in each for each in form):
            yield [{"content": "", **each} for each in form]
            yield [{"content": None, **each} for each in form]
    yield [{**each, "content": [{"type": "text", "text": each.get("content", "")}]} for each in plain]
    if has_calls:
        from forerun.chat.response_format import find_format  # seldom needed

        known = find_format(template)
        if known is not None and known.forced is not None and "argument" not in known.forced:
            yield [_said(each, known.forced) for each in plain]


def _written(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as text."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _said(message: dict[str, Any], forced: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its calls in its content. forced: how they are written (`forced_calls.py`)."""
    functions = [call["function"] for call in _written(message).get("tool_calls", ())]
    calls = [
        forced["call"].replace("{name}", each["name"]).replace("{arguments}", each["arguments"]) for each in functions
    ]
    content = "\n".join(filter(None, [message.get("content"), forced.get("between", "").join(calls)]))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
