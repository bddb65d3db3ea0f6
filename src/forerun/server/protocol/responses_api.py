"""Requests and answers of /v1/responses: text, thinking and calls, in conversations that may be kept."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence as Seq
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field, WrapValidator
from typing_extensions import TypedDict

from forerun.chat.forced_calls import Forced, chat_tools
from forerun.chat.response_format import CALL, CONTENT, REASONING
from forerun.chat.response_parser import Delta
from forerun.engine.results import Choice, Generation, StepOutput
from forerun.errors import RequestBodyError
from forerun.server.kept_responses import KeptResponse, KeptResponses
from forerun.server.protocol.answers import Asked, chat_logprobs, metrics, progress_comment
from forerun.server.protocol.bodies import (
    BodyPart,
    Count,
    Format,
    Function,
    GenerationBody,
    TopLogprobs,
    content_text,
    grammar_of,
)
from forerun.server.protocol.requests import CompletionRequest, with_effort, with_read_calls
from forerun.server.protocol.without_effect import (
    WITHOUT_EFFECT,
    check_choice,
    ignored_tools,
    offered_tools,
    take_tool,
)

RESPONSES_URL = "/v1/responses"
_ECHOED = ("instructions", "max_output_tokens", "metadata", "user", "safety_identifier", "prompt_cache_key")
"""Fields that the answer repeats."""


class InputText(TypedDict):
    """A part of a message, or of what was thought; it may have labels."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str


class InputMessage(TypedDict):
    """A message of the client or of an earlier answer; it may have labels."""

    type: NotRequired[Literal["message"]]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText], Field(fail_fast=True)]


class InputCall(TypedDict):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutput(TypedDict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], Field(fail_fast=True)]


class InputReasoning(TypedDict):
    """What was thought before an earlier answer."""

    type: Literal["reasoning"]
    content: NotRequired[list[InputText] | None]


InputItem = InputMessage | InputCall | CallOutput | InputReasoning


def _chat(items: Seq[Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat: calls belong to the message of the model before them, thoughts to the one after
    them."""
    chat: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        kind = item.get("type", "message")
        if thought and item.get("role", "assistant") != "assistant":
            chat.append(_cut_answer(thought))
            thought = ""
        if kind == "reasoning":
            thought += content_text(item.get("content") or "")
        elif kind == "function_call_output":
            chat.append({"role": "tool", "tool_call_id": item["call_id"], "content": content_text(item["output"])})
        elif kind == "function_call":
            if not chat or chat[-1]["role"] != "assistant":
                chat.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            chat[-1].setdefault("tool_calls", []).append(call)
        else:
            chat.append({"role": item["role"], "content": content_text(item["content"])})
        if thought and kind in ("message", "function_call") and chat[-1]["role"] == "assistant":
            chat[-1]["reasoning_content"] = thought
            thought = ""
    return [*chat, _cut_answer(thought)] if thought else chat


def _cut_answer(thought: str) -> dict[str, Any]:
    """Return the message of an answer that has ended while the model thought."""
    return {"role": "assistant", "content": "", "reasoning_content": thought}


class Reasoning(BodyPart):
    """How much the model thinks, where its chat template reads it."""

    effort: str | None = None


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class ToolChoiceFunction(BodyPart):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class TextOptions(BodyPart):
    """The form of the text."""

    format: Format | None = None


_LOGPROBS = "message.output_text.logprobs"
Included: Any = Literal[(_LOGPROBS, *(WITHOUT_EFFECT["include"].values or ()))]
"""Parts of an answer that a client may ask for: one of them there is."""


class ResponseBody(GenerationBody):
    """The body of a response."""

    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1)] = Field(
        description="a text, or a list of messages of text, calls, their outputs and reasoning that is not empty"
    )
    instructions: str | None = None
    n: None = Field(None, description="left out, since there is one answer")
    max_output_tokens: Count | None = None
    include: list[Included] | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[Annotated[FunctionTool, WrapValidator(take_tool)]], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | ToolChoiceFunction | None, BeforeValidator(check_choice)
    ] = Field(None, description="'auto', 'none', 'required', or {\"type\": \"function\", \"name\": ...}")
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None

    def request(self, context_length: int, own: Mapping[str, Any], kept: KeptResponses) -> CompletionRequest:
        """Return the request; arguments as of `ChatBody`. Raises RequestBodyError.

        kept: responses on which this one may follow, and where it is kept.
        """
        name = self.previous_response_id
        given = self.input
        given = [{"role": "user", "content": given}] if isinstance(given, str) else given
        before = KeptResponse() if name is None else kept.find(name, "previous_response_id")
        items: list[Any] = [*before.input, *before.output, *given]
        keep = partial(kept.keep, items, before.item_bytes + len(json.dumps(given)))
        with_logprobs = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not with_logprobs:
            raise RequestBodyError(f"top_logprobs needs include to hold {_LOGPROBS!r}. Add it.", param="top_logprobs")
        params = self.params(
            own,
            max_tokens=self.max_output_tokens or context_length,
            logprobs=(self.top_logprobs or 0) if with_logprobs else None,
            grammar=grammar_of({"text": None if self.text is None else self.text.format}),
        )
        messages = [with_read_calls(message, "input") for message in _chat(items)]
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        ignored_includes = ["include"] if set(self.include or ()) - {_LOGPROBS} else []
        choice = self.tool_choice
        tools = () if self.tool_choice == "none" else chat_tools(offered_tools(self.tools))
        tool = choice.name if isinstance(choice, ToolChoiceFunction) else None
        return CompletionRequest(
            RESPONSES_URL,
            self.model,
            [messages],
            params,
            "input",
            stream=bool(self.stream),
            template_options=with_effort(self.chat_template_kwargs, self.reasoning.effort if self.reasoning else None),
            repeated=self._repeated(),
            keep=None if self.store is False else keep,
            tools=tools,
            one_call=self.parallel_tool_calls is False,
            forced=Forced.by(choice if isinstance(choice, str) else None, tool, tools, params.grammar),
            ignored=(*self.ignored, *ignored_includes, *ignored_tools(self.tools)),
        )

    def _repeated(self) -> dict[str, Any]:
        """Return the fields that the answer repeats. Raises RequestBodyError if one cannot be written as JSON."""
        given = {**(self.model_extra or {}), "instructions": self.instructions}
        found = {name: given.get(name) for name in _ECHOED} | {
            "max_output_tokens": self.max_output_tokens,
            "previous_response_id": self.previous_response_id,
            "store": self.store is not False,
        }
        if self.text is not None and self.text.format is not None:
            found["text"] = self.text.model_dump(by_alias=True, exclude_unset=True)
        if self.tools:
            found |= self.model_dump(include={"tools", "tool_choice", "parallel_tool_calls"}, exclude_none=True)
        for name, value in found.items():
            try:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except (ValueError, RecursionError):
                raise RequestBodyError(
                    f"{name} cannot be repeated in the answer: it holds NaN, an infinite number, a lone surrogate, or "
                    "is nested too deeply. Correct it, or leave it out.",
                    param=name,
                ) from None
        return found


_ITEMS = {
    CONTENT: ("msg", "message", "output_text"),
    REASONING: ("rs", "reasoning", "reasoning_text"),
    CALL: ("fc", "function_call", "function_call_arguments"),
}
"""Of each kind of text: the beginning of an item's id, the item's type, and the name of the text in events."""


class ResponseEvents:
    """Makes the body or the events of one answer.

    Attributes:
        num_events: made so far, the number of the next one.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        params = asked.request.params
        self._message = asked.message()
        self._head: dict[str, Any] = {
            "id": f"resp_{asked.name}",
            "object": "response",
            "created_at": asked.created,
            "model": asked.model,
            "error": None,
            "parallel_tool_calls": True,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "top_logprobs": params.logprobs or 0,
            "truncation": "disabled",
            **asked.request.repeated,
        }
        self._items: list[dict[str, Any]] = []
        self._open: tuple[str, int] | None = None  # kind of the last item, and index of its call, while it grows
        self._pieces: list[str] = []  # of its text
        self._held: list[dict[str, Any]] = []  # log-probabilities that come with its next piece of text
        self._logprobs: list[dict[str, Any]] = []  # of its pieces
        self.num_events = 0

    def whole(self, generations: Seq[Generation]) -> dict[str, Any]:
        """Return the body of the answer."""
        (choice,) = generations[0].choices
        deque(chain(self._pushed(choice.text, choice.logprobs, last=True), self._ended(choice)), maxlen=0)
        return self._body(generations[0])

    def begun(self) -> Iterator[dict[str, Any]]:
        """Yield the event that comes before any output."""
        yield self._event("response.created", response=self._unfinished("in_progress"))

    def keep_alive(self, progress: Mapping[str, int]) -> Iterator[str | dict[str, Any]]:
        """Yield what comes while the prompt is computed (`Chunks.keep_alive`); to some clients' patience, comments do
        not count."""
        yield progress_comment(progress)
        yield self._event("response.in_progress", response=self._unfinished("in_progress"))

    def of(self, place: int, output: StepOutput) -> Iterator[dict[str, Any]]:
        """Yield the events of one output."""
        chunk = output.chunk
        yield from self._pushed(chunk.text, chunk.logprobs, last=chunk.finish_reason is not None)

    def last(self, generations: Seq[Generation]) -> Iterator[dict[str, Any]]:
        """Yield the events that end the stream."""
        yield from self._ended(generations[0].choices[0])
        whole = self._body(generations[0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def _unfinished(self, status: str) -> dict[str, Any]:
        return {**self._head, "status": status, "incomplete_details": None, "output": [], "usage": None}

    def _body(self, generation: Generation) -> dict[str, Any]:
        (choice,) = generation.choices
        ends = choice.finish_reason == "stop"
        made = {call["id"] for call in self._message.calls}  # others were begun, and were none
        body = {
            **self._unfinished("completed" if ends else "incomplete"),
            "incomplete_details": None if ends else {"reason": "max_output_tokens"},
            "output": [item for item in self._items if item["type"] != "function_call" or item["call_id"] in made],
            "usage": {
                "input_tokens": len(generation.prompt_token_ids),
                "input_tokens_details": {"cached_tokens": choice.stats.num_cached_tokens},
                "output_tokens": len(choice.token_ids),
                "output_tokens_details": {"reasoning_tokens": self._asked.texts.count(self._message.reasoning)},
                "total_tokens": len(generation.prompt_token_ids) + len(choice.token_ids),
            },
            **metrics([choice.stats]),
        }
        if self._asked.request.keep is not None:
            self._asked.request.keep(body)
        return body

    def _pushed(self, text: str, logprobs: Any, *, last: bool) -> Iterator[dict[str, Any]]:
        """Yield the events of a text, which grow the items."""
        if logprobs:
            self._held += chat_logprobs(logprobs, self._asked.texts.names)["content"]
        deltas = self._message.push(text, last=last)
        if self._held and not deltas and self._open == (CONTENT, 0):
            deltas = [Delta(CONTENT, "")]
        for delta in deltas:
            yield from self._piece(delta)

    def _piece(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if self._open != (delta.kind, delta.index):
            yield from self._closed("completed")
            yield from self._begun(delta)
        self._pieces.append(delta.text)
        more: dict[str, Any] = {}
        if delta.kind == CONTENT:
            more["logprobs"] = self._held
            self._held = []
            self._logprobs += more["logprobs"]
        if delta.kind == CONTENT or delta.text:
            yield self._event(f"response.{_ITEMS[delta.kind][2]}.delta", **self._place(), delta=delta.text, **more)

    def _begun(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the events of a new item."""
        self._open = (delta.kind, delta.index)
        self._pieces = []
        self._logprobs = []
        head, kind, _ = _ITEMS[delta.kind]
        fields: dict[str, dict[str, Any]] = {
            CONTENT: {"role": "assistant", "content": []},
            REASONING: {"summary": [], "content": []},
            CALL: {"call_id": delta.id, "name": delta.name, "arguments": ""},
        }
        name = f"{head}_{self._asked.name}_{len(self._items)}"
        item = {"id": name, "type": kind, "status": "in_progress", **fields[delta.kind]}
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item={**item})
        if delta.kind != CALL:
            yield self._event("response.content_part.added", **self._place(), part=_part(delta.kind, "", []))

    def _closed(self, status: str) -> Iterator[dict[str, Any]]:
        """Yield the events that end the last item, if it grows still."""
        if self._open is None:
            return
        (kind, _), text, item, place = self._open, "".join(self._pieces), self._items[-1], self._place()
        self._open = None
        item["status"] = status
        if kind == CALL:
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            part = _part(kind, text, self._logprobs)
            logprobs = {"logprobs": self._logprobs} if kind == CONTENT else {}
            item["content"] = [part]
            yield self._event(f"response.{part['type']}.done", **place, text=text, **logprobs)
            yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _ended(self, choice: Choice) -> Iterator[dict[str, Any]]:
        if not self._items:
            yield from self._piece(Delta(CONTENT, ""))
        yield from self._closed("completed" if choice.finish_reason == "stop" else "incomplete")

    def _place(self) -> dict[str, Any]:
        """Return where the last item, and its only text, is."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place if self._items[-1]["type"] == "function_call" else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self.num_events
        self.num_events = self.num_events + 1
        return {"type": kind, "sequence_number": number, **fields}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
