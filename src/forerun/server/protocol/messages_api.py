"""Requests and answers of /v1/messages, Anthropic's form of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, WrapValidator
from typing_extensions import TypedDict

from forerun.chat.forced_calls import Forced, chat_tools
from forerun.chat.response_format import CALL, CONTENT, REASONING
from forerun.chat.response_parser import Delta
from forerun.engine.chat_template import encode
from forerun.engine.results import Choice, Generation, StepOutput
from forerun.errors import PromptError, RequestBodyError
from forerun.server.protocol.answers import Asked, metrics, progress_comment
from forerun.server.protocol.bodies import (
    BodyPart,
    Count,
    Format,
    GenerationBody,
    Strings,
    TextPart,
    TextParts,
    content_text,
    grammar_of,
)
from forerun.server.protocol.requests import MESSAGES_URL, CompletionRequest, with_effort
from forerun.server.protocol.without_effect import check_choice, ignored_tools, offered_tools, take_tool


class ThinkingBlock(TypedDict):
    """What the model has thought."""

    type: Literal["thinking"]
    thinking: str


class ToolUse(TypedDict):
    """A call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(TypedDict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[str | TextParts]
    is_error: NotRequired[bool | None]


Block = Annotated[TextPart | ThinkingBlock | ToolUse | ToolResult, Field(discriminator="type")]


class MessageParam(TypedDict):
    """A message."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class CustomTool(TypedDict):
    """A function that the model may call."""

    type: NotRequired[Literal["custom"]]
    name: str
    description: NotRequired[str]
    input_schema: dict[str, Any]
    strict: NotRequired[bool]


def _take(tool: Any, check: Callable[[Any], Any]) -> Any:
    """Return a tool as `take_tool`, but of the type custom only with a schema."""
    if isinstance(tool, Mapping) and tool.get("type") == "custom":
        check(tool)
    return take_tool(tool, check)


class ToolChoice(BodyPart):
    """Whether the model may call functions, or must; name: of the one that it must."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BodyPart):
    """Whether the model thinks, where its chat template can switch it. A budget is held to before a call that is
    required."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None


class OutputConfig(BodyPart):
    """The form of the answer, and how much the model thinks, where its chat template reads it."""

    format: Format | None = None
    effort: str | None = None


class MessagesBody(GenerationBody):
    """The body of /v1/messages and, without max_tokens, of /v1/messages/count_tokens."""

    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1)] = Field(
        description="a list of messages of user and assistant, each a text or blocks of text, thinking, tool_use and "
        "tool_result: only text is read, no images or documents"
    )
    system: str | TextParts | None = Field(None, description="a text, or a list of blocks of text")
    n: None = Field(None, description="left out, since there is one answer")
    max_tokens: Count | None = None
    stop_sequences: Strings | None = None
    tools: Annotated[list[Annotated[CustomTool, WrapValidator(_take)]], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def request(self, context_length: int, own: Mapping[str, Any], kept: object = None) -> CompletionRequest:
        """Return the request; arguments as of `ChatBody`. Raises RequestBodyError."""
        if self.max_tokens is None:
            raise RequestBodyError("max_tokens is missing. Give the most tokens of the answer.", param="max_tokens")
        stops = {"stop": self.stop_sequences} if self.stop_sequences else {}
        grammar = grammar_of({"output_config": None if self.output_config is None else self.output_config.format})
        params = self.params(own, max_tokens=min(self.max_tokens, context_length), grammar=grammar, **stops)
        choice = self.tool_choice or ToolChoice(type="auto")
        if (choice.type == "tool") != (choice.name is not None):
            raise RequestBodyError("tool_choice has a name if its type is 'tool'. Correct it.", param="tool_choice")
        if choice.name is not None:
            check_choice(next((tool for tool in self.tools or () if tool.get("name") == choice.name), None))
        tools = () if choice.type == "none" else chat_tools(offered_tools(self.tools), "input_schema")
        budget = None if self.thinking is None else self.thinking.budget_tokens
        forced = Forced.by(choice.type, choice.name, tools, params.grammar, budget)
        not_held = budget is not None and not (forced and forced.is_required)
        return CompletionRequest(
            MESSAGES_URL,
            self.model,
            [self._chat()],
            params,
            stream=bool(self.stream),
            template_options=self._template_options(),
            ending=self._ending(),
            tools=tools,
            one_call=choice.disable_parallel_tool_use,
            forced=forced,
            ignored=(*self.ignored, *ignored_tools(self.tools), *(["thinking.budget_tokens"] if not_held else [])),
        )

    def _template_options(self) -> dict[str, Any]:
        options = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        return with_effort(options, None if self.output_config is None else self.output_config.effort)

    def _ending(self) -> dict[str, bool]:
        """Return how the prompt ends: a last message of the assistant is continued, as Anthropic's API does."""
        return {"continue_final_message": True} if self.messages and self.messages[-1]["role"] == "assistant" else {}

    def _chat(self) -> list[dict[str, Any]]:
        """Return the messages of a chat."""
        chat = [] if self.system is None else [{"role": "system", "content": content_text(self.system)}]
        for turn in self.messages:
            chat += _messages(turn["role"], turn["content"])
        return chat


class CountBody(MessagesBody):
    """The body of /v1/messages/count_tokens."""

    def answer(self, service: Any) -> dict[str, Any]:
        """Return the number of the prompt's tokens. Raises RequestBodyError."""
        tools = chat_tools(offered_tools(self.tools), "input_schema")
        options = self._template_options() | self._ending() | ({"tools": [*tools]} if tools else {})
        target = service.llm.target
        try:
            ids = encode(self._chat(), service.llm.tokenizer, target.name, options, model=target)
        except PromptError as error:
            raise RequestBodyError(str(error), "messages") from None
        return {"input_tokens": len(ids)}


_KINDS = ("text", "thinking", "tool_use", "tool_result")


def _messages(role: str, content: str | list[Any]) -> Iterator[dict[str, Any]]:
    """Yield a turn as messages of a chat: the results of calls, then the rest."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts, thoughts, uses, results = ([block for block in content if block["type"] == kind] for kind in _KINDS)
    for result in results:
        told = content_text(result.get("content", ""))
        if result.get("is_error"):
            told = f"Error: {told}" if told else "Error"
        yield {"role": "tool", "tool_call_id": result["tool_use_id"], "content": told}
    message: dict[str, Any] = {"role": role, "content": content_text(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(block["thinking"] for block in thoughts)
    if uses:
        message["tool_calls"] = [
            {"id": use["id"], "type": "function", "function": {"name": use["name"], "arguments": use["input"]}}
            for use in uses
        ]
    if message["content"] or len(message) > 2 or not results:
        yield message


_EMPTY = {REASONING: {"type": "thinking", "thinking": "", "signature": ""}, CONTENT: {"type": "text", "text": ""}}
_PIECES = {
    REASONING: ("thinking_delta", "thinking"),
    CONTENT: ("text_delta", "text"),
    CALL: ("input_json_delta", "partial_json"),
}
"""Type of a piece of a block, and the key of its text."""


class MessageEvents:
    """Makes the body or the events of one answer.

    Attributes:
        num_events: 0, since events have no numbers.
    """

    num_events = 0

    def __init__(self, asked: Asked) -> None:
        (self._prompt,) = asked.prompts
        self._head = {"id": f"msg_{asked.name}", "type": "message", "role": "assistant", "model": asked.model}
        self._message = asked.message()
        self._open: tuple[str, int] | None = None  # kind of the open block, and index of its call
        # blocks that are closed; white space before a text
        self._num_blocks = 0
        self._blank = ""

    def whole(self, generations: Seq[Generation]) -> dict[str, Any]:
        """Return the body of the answer."""
        (choice,), message = generations[0].choices, self._message
        message.push(choice.text, last=True)
        content: list[dict[str, Any]] = []
        if message.reasoning:
            content.append({**_EMPTY[REASONING], "thinking": message.reasoning})
        if message.content and not message.content.isspace():
            content.append({**_EMPTY[CONTENT], "text": message.content})
        functions = [(call["id"], call["function"]) for call in message.calls]
        content += [_tool_use(call, each["name"], json.loads(each["arguments"])) for call, each in functions]
        return {**self._head, "content": content, **self._end(choice), **self._figures(choice)}

    def begun(self) -> Iterator[dict[str, Any]]:
        """Yield the event that comes before any output."""
        usage = {"input_tokens": len(self._prompt), "output_tokens": 0}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": {**self._head, **empty}}

    def keep_alive(self, progress: Mapping[str, int]) -> Iterator[str | dict[str, Any]]:
        """Yield what comes while the prompt is computed (`Chunks.keep_alive`)."""
        yield progress_comment(progress)
        yield {"type": "ping"}

    def of(self, prompt: int, output: StepOutput) -> Iterator[dict[str, Any]]:
        """Yield the events of one output."""
        for delta in self._message.push(output.chunk.text, last=output.chunk.finish_reason is not None):
            yield from self._of_delta(delta)

    def _of_delta(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the events of a piece of the answer."""
        block = (delta.kind, delta.index)
        text = delta.text
        if delta.kind == CONTENT:
            text = self._blank + text
            self._blank = "" if text.strip() or self._open == block else text
        if delta.kind == CONTENT and self._blank:
            return
        if self._open != block:
            yield from self._close()
            self._open = block
            empty = _tool_use(delta.id, delta.name, {}) if delta.kind == CALL else _EMPTY[delta.kind]
            yield {"type": "content_block_start", "index": self._num_blocks, "content_block": empty}
        kind, key = _PIECES[delta.kind]
        yield {"type": "content_block_delta", "index": self._num_blocks, "delta": {"type": kind, key: text}}

    def last(self, generations: Seq[Generation]) -> Iterator[dict[str, Any]]:
        """Yield the events that end the stream."""
        (choice,) = generations[0].choices
        yield from self._close()
        yield {"type": "message_delta", "delta": self._end(choice), **self._figures(choice)}
        yield {"type": "message_stop"}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._open = None
            self._num_blocks = self._num_blocks + 1

    def _end(self, choice: Choice) -> dict[str, Any]:
        """Return why an answer has ended."""
        reason = "end_turn"
        stop = None
        if choice.finish_reason != "stop":
            reason = "max_tokens"
        elif self._message.calls:
            reason = "tool_use"
        elif isinstance(choice.stop_reason, str):
            stop = choice.stop_reason
        return {"stop_reason": reason if stop is None else "stop_sequence", "stop_sequence": stop}

    def _figures(self, choice: Choice) -> dict[str, Any]:
        cached = choice.stats.num_cached_tokens
        usage = {
            "input_tokens": len(self._prompt) - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(choice.token_ids),
        }
        return {"usage": usage, **metrics([choice.stats])}


def _tool_use(call: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": name, "input": arguments}
