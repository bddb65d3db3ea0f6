"""Reads an answer while it grows: what was thought, what is said, and which tools are called.

Transformers' `ResponseParser` reads the same templates. This one gives the arguments of a call while they are written,
takes time in proportion to the length, keeps what stands before a call, and never fails: what contradicts the template
is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import Any

import regex

from forerun.chat.contents import ERRORS, read_json, tag_value, typed
from forerun.chat.response_format import CALL, CONTENT, REASONING, Region, ResponseFormat

_IN_STRING = re.compile(r'["\\\n]')
_SPACE = re.compile(r"\s*")
_OF_TEXT, _CERTAIN = ("xml-inline", "kv-lines"), ("json", "python-call-list")
"""Contents whose values are text, which tools' schemas give a type; and those that are not read if their end is missing."""
_TAIL = 200
"""Characters at a prompt's end within which it may open a region, where the anchor is not found."""
_SHORT = 64
"""Characters that may be searched again for each piece of an answer."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer.

    Attributes:
        kind: "reasoning", "content" or "tool_call".
        text: to be appended to the text of its kind, or to the arguments of the call.
        index: of the call.
        name, id: of the call that begins here; None in its other pieces.
    """

    kind: str
    text: str
    index: int = 0
    name: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A whole answer.

    Attributes:
        content: None if there are calls alone.
        reasoning: None without.
        tool_calls: as OpenAI's API has them.
        is_unclosed: whether the answer ends within a call, which is then part of the content.
    """

    content: str | None
    reasoning: str | None
    tool_calls: list[dict[str, Any]]
    is_unclosed: bool


@dataclass(slots=True)
class _Call:
    """A region of calls that is open: its markup and text, its arguments so far, and the place in its JSON."""

    region: Region
    captures: Mapping[str, str]
    opened: str
    body: list[str] = field(default_factory=list)
    closed: str = ""
    index: int = -1  # of the call that was announced; negative: none yet
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    depth: int = 0
    is_string: bool = False
    is_sought: bool = True  # the object of arguments may still come
    is_streaming: bool = False  # what comes belongs to it
    is_broken: bool = False  # it can be no call any more


class ResponseParser:
    """Splits one answer.

    A call's name and arguments are given as soon as they are certain to be such. If the call is not closed, or turns
    out to be none, all of its text is content: then it is not among the calls of the message, though pieces were given.

    Args:
        form: how the model writes.
        prompt: that it answers, as text; it may open a region.
        tools: OpenAI's definitions. Without any, calls are text.
        request_id: makes the ids of calls.
    """

    def __init__(self, form: ResponseFormat, prompt: str, tools: Iterable[Mapping[str, Any]], request_id: str) -> None:
        self._form, self._request_id = form, request_id
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas = {each["name"]: (each.get("parameters") or {}).get("properties") or {} for each in functions}
        self._opening = form.openings[bool(functions)]
        self._buffer, self._at = "", 0  # text, and where what was not read yet begins in it
        self._new: list[str] = []  # pieces that were not appended to it yet
        self._num_new = 0  # characters of them
        self._patience = 0  # characters that are awaited before what is held back is searched again
        self._region: Region | None = None
        self._call: _Call | None = None
        self._closing: Region | None = None  # whose JSON has ended, and whose end mark may follow
        self._is_edge = False  # nothing but whitespace has come since markup
        self._num_begun, self._is_unclosed = 0, False
        self._found: list[Delta] = []
        self._clear()
        self._read_prompt(prompt)

    def _clear(self) -> None:
        self._texts: dict[str, list[str]] = {CONTENT: [], REASONING: []}
        self._spaces: dict[str, list[str]] = {CONTENT: [], REASONING: []}  # not given yet: markup may follow
        self._calls: list[dict[str, Any]] = []

    @property
    def is_reasoning(self) -> bool:
        """Return whether the model is thinking."""
        return self._region is not None and self._region.kind == REASONING

    def push(self, text: str) -> list[Delta]:
        """Read a piece of the answer; return what it adds."""
        return self._read(text, last=False)

    def end(self) -> list[Delta]:
        """Return what was held back. Nothing may be pushed afterwards."""
        return self._read("", last=True)

    def message(self) -> ParsedMessage:
        """Return the whole answer, after `end`."""
        content, reasoning = ("".join(self._texts[kind]) for kind in (CONTENT, REASONING))
        said = content if content or not self._calls else None
        return ParsedMessage(said, reasoning or None, self._calls, self._is_unclosed)

    def _read_prompt(self, prompt: str) -> None:
        """Open the region in which the prompt ends."""
        ends = [match.end() for match in self._form.anchor.finditer(prompt)]
        if ends:
            self._read(prompt[ends[-1] :], last=False)
            self._clear()
            self._is_edge = self._region is not None
        for region in () if ends else self._form.regions:
            for match in regex.finditer(region.opens or "", prompt, pos=max(0, len(prompt) - _TAIL)):
                if region.kind == REASONING and match[0] and not prompt[match.end() :].strip():
                    self._region, self._is_edge = region, True

    def _read(self, text: str, *, last: bool) -> list[Delta]:
        self._new.append(text)
        self._num_new += len(text)
        if self._num_new < self._patience and not last:
            return []
        start = max(self._at - 1, 0)  # patterns may look back at one character
        self._buffer, self._at = self._buffer[start:] + "".join(self._new), self._at - start
        self._new, self._num_new, self._found = [], 0, []
        num_idle, before = 0, -1
        while self._step(last):
            num_idle, before = num_idle + 1 if self._at == before else 0, self._at
            if num_idle > 3:  # patterns that match nothing, in turn
                self._pass(self._buffer[self._at : self._at + 1])
                self._at += 1
        num_pending = len(self._buffer) - self._at
        self._patience = num_pending // 8 if num_pending > _SHORT else 0  # so that the time is linear in the length
        if last:
            self._end()
        merged = groupby(self._found, lambda delta: (delta.kind, delta.index, delta.name, delta.id))
        return [Delta(kind, "".join(each.text for each in group), *rest) for (kind, *rest), group in merged]

    def _end(self) -> None:
        if self._call is not None:
            region = self._call.region
            self._is_unclosed = not self._finish(is_whole=not region.is_json and region.content in _CERTAIN)
        elif not self._is_edge:
            kind = CONTENT if self._region is None else self._region.kind
            self._emit(kind, "".join(self._spaces[kind]))

    def _step(self, last: bool) -> bool:
        """Read up to the next mark. Return whether there may be another one."""
        region, size = self._region, len(self._buffer)
        if self._closing is not None:
            return self._step_closing(self._closing, last)
        if self._call is not None and self._call.is_string:
            return self._step_string(self._call, last)
        pattern = self._opening if region is None else region.inside
        match = pattern.search(self._buffer, self._at, partial=not last)
        marks = () if match is None else [name for name, value in match.groupdict().items() if value is not None]
        mark = next((name for name in marks if name.startswith("_")), "")
        stop = size if match is None else match.start()
        self._pass(self._buffer[self._at : stop])
        self._at = stop
        if mark == "_tag" and self._call is not None and region.tag is not None and not self._call.is_broken:
            tag = region.tag.match(self._buffer, stop, partial=not last)
            self._call.is_broken = tag is None
            match = tag or match
        if match is None or not last and (match.partial or match.end() == size and not self._is_certain(mark)):
            return False
        self._at = match.end()
        if mark.startswith("_open"):
            self._open(self._form.regions[int(mark[6:])], match)
        elif mark == "_tag":
            self._read_tag(self._call, match)
        elif mark == "_close":
            self._close(match[0])
        return True

    def _is_certain(self, mark: str) -> bool:
        """Return whether what follows a mark could not change where it ends."""
        if mark.startswith("_open"):
            return "open" in self._form.regions[int(mark[6:])].literal
        region = self._region
        return region is not None and ("close" in region.literal if mark == "_close" else region.is_json)

    def _step_closing(self, region: Region, last: bool) -> bool:
        """Pass over the end mark of a region whose JSON has ended."""
        self._at = _SPACE.match(self._buffer, self._at).end()
        match = regex.compile(region.closes, regex.DOTALL).match(self._buffer, self._at, partial=not last)
        if match is None and self._at == len(self._buffer) and not last:
            return False
        if match is not None:
            if not last and (match.partial or match.end() == len(self._buffer) and "close" not in region.literal):
                return False
            self._at = match.end()
        self._closing = None
        return True

    def _step_string(self, call: _Call, last: bool) -> bool:
        """Read JSON up to the end of a string."""
        match = _IN_STRING.search(self._buffer, self._at)
        mark, stop = ("", len(self._buffer)) if match is None else (match[0], match.end())
        is_held = mark == "\\" and stop == len(self._buffer) and not last
        stop += -1 if is_held else mark == "\\"
        self._take(call, self._buffer[self._at : stop])
        self._at = min(stop, len(self._buffer))
        call.is_string = mark not in ('"', "\n")
        call.is_broken = call.is_broken or mark == "\n"  # JSON has no line break in a string
        return bool(mark) and not is_held

    def _pass(self, text: str) -> None:
        """Read text without marks."""
        if self._call is not None:
            self._call.is_broken |= self._call.region.content == "xml-inline" and bool(text.strip())
            self._take(self._call, text)
        else:
            self._say(CONTENT if self._region is None else self._region.kind, text)

    def _say(self, kind: str, text: str) -> None:
        """Give text; whitespace at its end is held back, and at an edge that at its beginning is dropped."""
        text = text.lstrip() if self._is_edge else text
        self._is_edge = self._is_edge and not text
        if said := text.rstrip():
            self._emit(kind, "".join(self._spaces[kind]) + said)
            self._spaces[kind] = []
        self._spaces[kind].append(text[len(said) :])

    def _emit(self, kind: str, text: str) -> None:
        self._texts[kind].append(text)
        self._found += [Delta(kind, text)] if text else []

    def _open(self, region: Region, match: regex.Match[str]) -> None:
        self._region, self._is_edge = region, True
        if not self._texts[CONTENT]:
            self._spaces[CONTENT] = []
        if region.kind == CALL:
            captures = {name: value for name, value in match.groupdict().items() if value is not None}
            self._call = _Call(region, captures, match[0])
            if region.is_named and "name" in captures:
                self._begin(self._call, captures["name"])
        elif self._texts[region.kind] and region.join:
            self._spaces[region.kind] = [region.join]

    def _close(self, mark: str) -> None:
        if self._call is not None:
            self._call.closed = mark
            self._finish(is_whole=True)
        elif self._region is not None:
            self._spaces[self._region.kind].clear()
            self._region, self._is_edge = None, True

    def _read_tag(self, call: _Call, match: regex.Match[str]) -> None:
        """Read an argument between tags, or what opens or closes a part of JSON."""
        mark = match[0]
        if not call.region.is_json or call.is_broken:
            call.body.append(mark)
            if call.index >= 0 and not call.is_broken:
                key, value = match["key"].strip(), tag_value(match["value"], call.region.args)
                argument = {key: typed(value, self._schema(call.name, key))}
                self._give(call, (", " if call.pieces else "{") + json.dumps(argument, ensure_ascii=False)[1:-1])
            return
        if mark == "{" and call.is_sought and call.depth == (not call.region.is_named):
            self._begin_arguments(call)
        call.is_string = mark == '"'
        call.depth += {"{": 1, "[": 1, "}": -1, "]": -1, '"': 0}[mark]
        self._take(call, mark)
        call.is_streaming = call.is_streaming and call.depth > (not call.region.is_named)
        if call.depth <= 0 and mark != '"':
            self._closing = call.region if call.region.closes else None
            self._finish(is_whole=True)

    def _begin_arguments(self, call: _Call) -> None:
        """Give what follows as arguments if it is certain that it is an object of arguments."""
        call.is_sought = False
        if call.region.is_named:
            call.is_streaming = call.index >= 0
        elif call.region.head is not None and (head := call.region.head.fullmatch("".join(call.body))):
            self._begin(call, head[1])
            call.is_streaming = True

    def _take(self, call: _Call, text: str) -> None:
        call.body.append(text)
        if call.is_streaming:
            self._give(call, text)

    def _begin(self, call: _Call, name: str) -> None:
        """Announce a call."""
        call.index, call.name, call.pieces = self._num_begun, name, []
        self._num_begun += 1
        self._found.append(Delta(CALL, "", call.index, name, self._id(call)))

    def _give(self, call: _Call, arguments: str) -> None:
        call.pieces.append(arguments)
        self._found.append(Delta(CALL, arguments, call.index))

    def _id(self, call: _Call) -> str:
        """Return the id of a call: nine letters and digits, since Mistral's templates take no other."""
        return sha256(f"{self._request_id} {call.index}".encode()).hexdigest()[:9]

    def _schema(self, name: str, argument: str) -> Any:
        properties = self._schemas.get(name)
        return properties.get(argument) if isinstance(properties, dict) else None

    def _finish(self, *, is_whole: bool) -> bool:
        """End a region of calls; return whether it held any. All of its text is content if it did not."""
        call, self._call, self._region, self._is_edge = self._call, None, None, True
        assert call is not None
        region = call.region
        try:
            calls = region.calls("".join(call.body), call.captures) if is_whole and not call.is_broken else []
        except (*ERRORS, AttributeError):
            calls = []
        if calls and call.index >= 0:  # it was announced
            if region.content == "xml-inline":
                self._give(call, "}" if call.pieces else "{}")
            elif not call.pieces:
                self._give(call, json.dumps(calls[0][1], ensure_ascii=False))
            self._keep(call)
            return True
        for name, arguments in calls:
            self._begin(call, name)
            if region.content in _OF_TEXT:
                arguments = {key: typed(value, self._schema(name, key)) for key, value in arguments.items()}
            self._give(call, json.dumps(arguments, ensure_ascii=False))
            self._keep(call)
        if not calls:
            self._emit(CONTENT, "".join([*self._spaces[CONTENT], call.opened, *call.body, call.closed]))
            self._spaces[CONTENT], self._is_edge = [], False
        return bool(calls)

    def _keep(self, call: _Call) -> None:
        function = {"name": call.name, "arguments": "".join(call.pieces)}
        self._calls.append({"id": self._id(call), "type": "function", "function": function})
