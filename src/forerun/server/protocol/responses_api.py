"""Requests and answers of /v1/responses: text in and out, nothing kept between requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from forerun.engine.results import Choice, Generation, StepOutput
from forerun.errors import RequestBodyError
from forerun.server.protocol.answers import chat_logprobs, speculation_metrics
from forerun.server.protocol.bodies import Count, Format, GenerationBody, Part, TopLogprobs, grammar_of
from forerun.server.protocol.model_texts import ModelTexts
from forerun.server.protocol.requests import CompletionRequest

RESPONSES_URL = "/v1/responses"
_ECHOED = ("instructions", "max_output_tokens", "metadata", "user", "safety_identifier", "prompt_cache_key")
"""Fields that the answer repeats."""


class InputText(TypedDict):
    """A part of a message; it may have labels."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(TypedDict):
    """A message of the client or of an earlier answer; it may have labels."""

    type: NotRequired[Literal["message"]]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText], Field(fail_fast=True)]


def _of_chat(message: InputMessage) -> dict[str, str]:
    """Return the message of a chat."""
    content, role = message["content"], message["role"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {"role": "system" if role == "developer" else role, "content": text}


class TextOptions(Part):
    """The form of the text."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponseBody(GenerationBody):
    """The body of a response."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "truncation": ("disabled",),
        "stream_options": ({"include_obfuscation": False}, {}),
    }

    input: str | Annotated[list[InputMessage], Field(fail_fast=True, min_length=1)] = Field(
        description="a text, or a list of messages of text that is not empty"
    )
    instructions: str | None = None
    max_output_tokens: Count | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextOptions | None = None

    def request(self, context_length: int, own: Mapping[str, Any]) -> CompletionRequest:
        """Return the request; arguments as of `ChatBody`. Raises RequestBodyError."""
        if self.n is not None:
            raise RequestBodyError("n is not supported: a response is one answer. Leave it out.", param="n")
        if self.top_logprobs is not None and not self.include:
            raise RequestBodyError("top_logprobs needs include to hold its only value.", param="top_logprobs")
        params = self.params(
            own,
            max_tokens=self.max_output_tokens or context_length,
            logprobs=(self.top_logprobs or 0) if self.include else None,
            grammar=grammar_of({"text": None if self.text is None else self.text.format}),
        )
        messages = (
            [{"role": "user", "content": self.input}] if isinstance(self.input, str) else [*map(_of_chat, self.input)]
        )
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        return CompletionRequest(
            RESPONSES_URL,
            self.model,
            [messages],
            params,
            "input",
            stream=bool(self.stream),
            template_options=self.chat_template_kwargs or {},
            repeated=self._repeated(),
        )

    def _repeated(self) -> dict[str, Any]:
        """Return the fields that the answer repeats. Raises RequestBodyError if one cannot be written as JSON."""
        given = {**(self.model_extra or {}), "instructions": self.instructions}
        found = {name: given.get(name) for name in _ECHOED} | {"max_output_tokens": self.max_output_tokens}
        if self.text is not None and self.text.format is not None:
            found["text"] = self.text.model_dump(by_alias=True, exclude_unset=True)
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


_POSITION = {"output_index": 0, "content_index": 0}
"""Of the only text of the only message."""


class ResponseEvents:
    """Makes the body or the events of one answer.

    Args:
        model, name, created: as of `Chunks`.

    Attributes:
        num_events: made so far, the number of the next one.
    """

    ends_with_done = False

    def __init__(
        self,
        texts: ModelTexts,
        request: CompletionRequest,
        prompts: Seq[Seq[int]],
        *,
        model: str,
        name: str,
        created: int,
    ) -> None:
        self._texts = texts
        params = request.params
        self._head: dict[str, Any] = {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": created,
            "model": model,
            "error": None,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "top_logprobs": params.logprobs or 0,
            "truncation": "disabled",
            **request.repeated,
        }
        self._item = f"msg_{name}"
        self.num_events = 0

    def whole(self, generations: Seq[Generation]) -> dict[str, Any]:
        """Return the body of the answer."""
        (generation,) = generations
        (choice,) = generation.choices
        whole = choice.finish_reason == "stop"
        details = {} if whole else {"reason": "max_output_tokens"}
        metrics = speculation_metrics([choice.stats])
        return {
            **self._unfinished("completed" if whole else "incomplete"),
            "incomplete_details": details or None,
            "output": [self._message(choice)],
            "usage": {
                "input_tokens": len(generation.prompt_token_ids),
                "input_tokens_details": {"cached_tokens": choice.stats.num_cached_tokens},
                "output_tokens": len(choice.token_ids),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(generation.prompt_token_ids) + len(choice.token_ids),
            },
            "metrics": {"speculative_decoding": metrics},
        }

    def of(self, place: int, output: StepOutput) -> Iterator[dict[str, Any]]:
        """Yield the events of one output."""
        if not self.num_events:
            yield self._event("response.created", response=self._unfinished("in_progress"))
            yield self._event("response.in_progress", response=self._unfinished("in_progress"))
            message = {"id": self._item, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
            yield self._event("response.output_item.added", output_index=0, item=message)
            yield self._event("response.content_part.added", item_id=self._item, **_POSITION, part=_part("", []))
        chunk = output.chunk
        if chunk.text or chunk.logprobs:
            logprobs = self._logprobs(chunk.logprobs)
            yield self._event(
                "response.output_text.delta", item_id=self._item, **_POSITION, delta=chunk.text, logprobs=logprobs
            )

    def last(self, generations: Seq[Generation]) -> Iterator[dict[str, Any]]:
        """Yield the events that end the stream."""
        whole = self.whole(generations)
        (message,) = whole["output"]
        (part,) = message["content"]
        text, logprobs = part["text"], part["logprobs"]
        yield self._event("response.output_text.done", item_id=self._item, **_POSITION, text=text, logprobs=logprobs)
        yield self._event("response.content_part.done", item_id=self._item, **_POSITION, part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failure(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the event that ends a stream with an error. body: as `error_response` makes it."""
        error = body["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def _unfinished(self, status: str) -> dict[str, Any]:
        return {**self._head, "status": status, "incomplete_details": None, "output": [], "usage": None}

    def _message(self, choice: Choice) -> dict[str, Any]:
        status = "completed" if choice.finish_reason == "stop" else "incomplete"
        part = _part(choice.text, self._logprobs(choice.logprobs))
        return {"id": self._item, "type": "message", "status": status, "role": "assistant", "content": [part]}

    def _logprobs(self, entries: Any) -> list[dict[str, Any]]:
        if entries is None:
            return []
        found: list[dict[str, Any]] = chat_logprobs(entries, self._texts.names)["content"]
        return found

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self.num_events = self.num_events, self.num_events + 1
        return {"type": kind, "sequence_number": number, **fields}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
