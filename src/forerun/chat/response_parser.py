"""Reads an answer while it grows: what was thought, what is said, and which tools are called.

Transformers' `ResponseParser` reads the same templates. This one gives the arguments of a call while they are written,
takes time in proportion to the length, keeps what stands before a call, and never fails: what contradicts the template
is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import Any

import regex

from forerun.chat.response_format import CALL, CONTENT, ERRORS, REASONING, Region, ResponseFormat

_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_TAIL = 200
"""Characters at a prompt's end within which it may open thinking, where the anchor is not found."""
_SHORT = 64
"""Characters that may be searched again with each piece of an answer."""
_BEHIND = regex.compile(r"\s*+(```(?![\w-])|</[a-z_]{2,20}>)")
"""What ends the fence or the tag that stands around a call."""


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


class PlainText:
    """An answer that is text alone, with the attributes of `ResponseParser`."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls = list[dict[str, Any]]()

    def push(self, text: str, *, last: bool = False) -> list[Delta]:
        self.content += text
        return [Delta(CONTENT, text)] if text else []


@dataclass(slots=True)
class _Call:
    """A region of calls that is open: its captures, markup and text, the place in its JSON, and the call it begins."""

    region: Region
    captures: Mapping[str, str]
    opened: str
    body: list[str] = field(default_factory=list)
    depth: int = 0
    string: regex.Pattern[str] | None = None  # what ends the string that is open
    is_sought: bool = True  # the object of arguments may still come
    is_streaming: bool = False  # what comes belongs to it
    is_broken: bool = False  # it can be no JSON any more
    index: int = -1  # negative: no call was announced
    name: str = ""
    id: str = ""
    pieces: list[str] = field(default_factory=list)


class ResponseParser:
    """Splits one answer.

    A call's name and arguments are given as soon as they are certain to be such. If the call is not closed, or turns
    out to be none, all of its text is content: then it is not among the calls of the message, though pieces were given.

    Args:
        form: how the model writes.
        prompt: that it answers, as text; it may open a region.
        tools: OpenAI's definitions. Without any, calls are text.
        request_id: makes the ids of calls.
        one_call: calls after the first are left out.
        goes_on_thinking: the prompt ends within thinking, wherever that was opened.
        is_loose: calls are read as models write them beside their format, too, if that has `response_format.LOOSE`.

    Attributes:
        content, reasoning, calls: of the whole answer, with its last text; calls as OpenAI's API has them. The content
            is None if there are calls alone.
    """

    def __init__(
        self,
        form: ResponseFormat,
        prompt: str,
        tools: Iterable[Mapping[str, Any]],
        request_id: str,
        *,
        one_call: bool = False,
        goes_on_thinking: bool = False,
        is_loose: bool = True,
    ) -> None:
        self._form = form
        self._request_id = request_id
        self._one_call = one_call
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas = {each["name"]: (each.get("parameters") or {}).get("properties") or {} for each in functions}
        self._opening = form.openings[(1 + is_loose) * bool(functions)]
        # text, and where what was not read yet begins in it
        self._buffer = ""
        self._at = 0
        self._new: list[str] = []  # pieces that were not appended to it yet
        self._patience = 0  # characters that are awaited before the next search
        self._region: Region | None = None
        self._call: _Call | None = None
        self._is_edge = False  # nothing but whitespace has come since markup
        self._around = ""  # what has opened a call, and may be closed behind it: a fence or a tag
        self._texts: dict[str, list[str]] = {CONTENT: [], REASONING: []}
        self._spaces: dict[str, list[str]] = {CONTENT: [], REASONING: []}  # not given yet: markup may follow
        self._found: list[Delta] = []
        self._num_begun = 0
        self.content: str | None = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self._num_owed = 0  # characters of the prompt that are read already, and not of the answer
        self._read_prompt(prompt, goes_on_thinking)

    @property
    def kind(self) -> str:
        """Return what the model writes: REASONING, CONTENT or CALL."""
        return CONTENT if self._region is None else self._region.kind

    def _read_prompt(self, prompt: str, goes_on_thinking: bool) -> None:
        """Open the region in which the prompt ends: what follows the last anchor is read, or else a mark at its end."""
        ends = [match.end() for match in self._form.anchor.finditer(prompt)]
        thoughts = "|".join(region.opens for region in self._form.regions if region.kind == REASONING) or r"\Z"
        if goes_on_thinking and not ends:
            ends = [match.start() for match in regex.finditer(thoughts, prompt)]
        if ends:
            self.push(prompt[ends[-1] :])
        elif mark := regex.search(rf"(?:{thoughts})\s*\Z", prompt[-_TAIL:]):
            self.push(mark[0])
        else:
            self.push("")
        if self._region is None and self._opening.fullmatch(self._buffer, self._at):
            self._step(last=True)
        self._is_edge = self._is_edge and self._region is not None
        self._num_begun = 0
        self._around = ""
        if self._call is not None:  # it is told as a whole at its end, since its beginning is none of the answer
            self._call.index = -1
            self._call.is_sought = self._call.is_streaming = False
            self._call.pieces = []
        self._num_owed = len(self._buffer) - self._at
        for texts in (*self._texts.values(), *self._spaces.values()):
            texts.clear()
        self.calls.clear()

    def push(self, text: str, *, last: bool = False) -> list[Delta]:
        """Read a piece of the answer; return what it adds. last: nothing follows, and nothing is held back."""
        self._new.append(text)
        self._patience -= len(text)
        if self._patience > 0 and not last:
            return []
        start = max(self._at - 1, 0)  # patterns may look back at one character
        self._buffer = self._buffer[start:] + "".join(self._new)
        self._at = self._at - start
        self._new = []
        self._found = []
        num_pending = len(self._buffer) - self._at
        for _ in range(3 * num_pending + 3):  # a bound for patterns that match nothing, in turn
            if not self._step(last):
                break
        num_pending = len(self._buffer) - self._at
        self._patience = num_pending // 8 if num_pending > _SHORT else 0  # so that the time is linear in the length
        if last:
            self._end()
        given = (delta for delta in self._found if not (self._one_call and delta.index))
        merged = groupby(given, lambda delta: (delta.kind, delta.index, delta.name, delta.id))
        return [Delta(kind, "".join(each.text for each in group), *rest) for (kind, *rest), group in merged]

    def _end(self) -> None:
        self._pass(self._buffer[self._at :])
        if self._call is not None:
            self._finish("", may_be_whole=not self._call.region.needs_close)
        elif not self._is_edge:
            self._emit(self.kind, "".join(self._spaces[self.kind]))
        content, self.reasoning = ("".join(self._texts[kind]) for kind in (CONTENT, REASONING))
        self.content = content if content or not self.calls else None
        self.calls = self.calls[:1] if self._one_call else self.calls

    def _step(self, last: bool) -> bool:
        """Read up to the next mark and the mark; return whether there may be another one."""
        region = self._region
        call = self._call
        if self._around and region is None and (behind := self._close_around(last)) is not None:
            return behind
        pattern = self._opening if region is None else (call and call.string) or region.inside
        match = pattern.search(self._buffer, self._at, partial=not last)
        stop = len(self._buffer) if match is None else match.start()
        self._pass(self._buffer[self._at : stop])
        self._at = stop
        if match is None or (match.end() == len(self._buffer) and not last):  # more text could change it
            return False
        mark = next(name for name, text in match.groupdict().items() if name.startswith("_") and text is not None)
        opened = self._form.regions[int(mark.removeprefix("_open_"))] if mark.startswith("_open") else None
        name = match.groupdict().get("name")
        if opened is not None and opened.is_offered and name and name not in self._schemas:
            self._at = max(match.end(), stop + 1)
            self._pass(self._buffer[stop : self._at])
            return True
        self._at = match.end()
        self._num_owed = 0
        if opened is not None:
            self._open(opened, match)
        elif mark == "_close":
            self._close(match[0])
        elif call is not None:
            self._read_json(call, match[0])
        return True

    def _close_around(self, last: bool) -> bool | None:
        """Read what ends the fence or the tag around the last call, as `_step`; None if that does not come next."""
        match = _BEHIND.match(self._buffer, self._at, partial=not last)
        if match is None:
            return None
        if match.partial or (match.end() == len(self._buffer) and not last):
            return False
        if match[1][0] not in self._around:
            return None
        self._around = self._around.replace(match[1][0], "")
        self._at = match.end()
        return True

    def _pass(self, text: str) -> None:
        """Read text without marks. Whitespace at its end is held back; at an edge that at its beginning is dropped."""
        if self._call is not None:
            return self._take(self._call, text)
        num_told = min(self._num_owed, len(text))
        self._num_owed -= num_told
        text = text[num_told:]
        kind = self.kind
        text = text.lstrip() if self._is_edge else text
        self._is_edge = self._is_edge and not text
        if said := text.rstrip():
            self._around = ""
            self._emit(kind, "".join(self._spaces[kind]) + said)
            self._spaces[kind] = []
        self._spaces[kind].append(text[len(said) :])
        return None

    def _emit(self, kind: str, text: str) -> None:
        if text:
            self._texts[kind].append(text)
            self._found.append(Delta(kind, text))

    def _open(self, region: Region, match: regex.Match[str]) -> None:
        self._region = region
        self._is_edge = True
        if not (self._texts[CONTENT] or region.is_offered):
            self._spaces[CONTENT] = []
        if region.kind == CALL:
            captures = {name: text for name, text in match.groupdict().items() if text is not None}
            self._call = _Call(region, captures, match[0])
            if region.is_named and "name" in captures:
                self._begin(self._call, captures["name"])
        elif self._texts[region.kind]:
            self._spaces[region.kind] = [region.field.get("join") or ""]

    def _close(self, mark: str) -> None:
        if self._call is not None:
            self._finish(mark)
        elif self._region is not None:
            self._spaces[self._region.kind] = []
            self._region = None
            self._is_edge = True

    def _read_json(self, call: _Call, mark: str) -> None:
        """Read what opens or closes a string or a part of JSON, or is escaped in a string."""
        if call.string is not None:
            call.string = call.string if mark[0] == "\\" else None
            call.is_broken |= mark == "\n"
            self._take(call, mark)
            if call.is_broken and call.region.is_offered:  # nothing closes it
                self._finish("")
            return
        begins = mark == "{" and call.is_sought and call.depth == (not call.region.is_named)
        if begins and not call.is_broken:  # what follows are arguments if it is certain that it is an object of them
            call.is_sought = False
            head = call.region.head and call.region.head.fullmatch("".join(call.body))
            if head and (not call.region.is_offered or head[1] in self._schemas):
                self._begin(call, head[1])
            call.is_streaming = call.index >= 0
        ends = (ends for opens, ends in call.region.strings if opens.fullmatch(mark))
        call.string = None if call.is_broken else next(ends, None)
        call.depth += _DEPTH.get(mark, 0)
        self._take(call, mark)
        call.is_streaming = call.is_streaming and call.depth > (not call.region.is_named)
        if mark in "}]" and call.depth <= 0 and not call.is_broken:
            self._finish("")

    def _take(self, call: _Call, text: str) -> None:
        call.body.append(text)
        if call.is_streaming:
            self._give(call, text)

    def _begin(self, call: _Call, name: str) -> None:
        """Announce a call. Its id is nine letters and digits, since Mistral's templates take no other."""
        call.index = self._num_begun
        call.name = name
        call.pieces = []
        call.id = sha256(f"{self._request_id} {call.index}".encode()).hexdigest()[:9]
        self._num_begun += 1
        self._found.append(Delta(CALL, "", call.index, name, call.id))

    def _give(self, call: _Call, arguments: str) -> None:
        call.pieces.append(arguments)
        self._found.append(Delta(CALL, arguments, call.index))

    def _finish(self, mark: str, *, may_be_whole: bool = True) -> None:
        """End a region of calls. All of its text is content if it held none."""
        call = self._call
        self._call = None
        self._region = None
        self._is_edge = True
        assert call is not None
        calls: list[tuple[str, str]] = []
        if may_be_whole and not call.is_broken:
            with suppress(*ERRORS):
                calls = list(call.region.calls("".join(call.body), call.captures, self._schemas))
        if not calls:
            self._emit(CONTENT, "".join([*self._spaces[CONTENT], call.opened, *call.body, mark]))
            self._spaces[CONTENT] = []
            self._is_edge = False
        elif call.region.is_offered:
            self._around = call.opened.strip() or self._around
            self._spaces[CONTENT] = self._spaces[CONTENT] if self._texts[CONTENT] else []
        is_announced = call.index >= 0
        for name, arguments in calls:
            if not is_announced:
                self._begin(call, name)
            if not call.pieces:
                self._give(call, arguments)
            function = {"name": call.name, "arguments": "".join(call.pieces)}
            self.calls.append({"id": call.id, "type": "function", "function": function})
