"""Requests and answers of /v1/responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import Any, cast

from forerun.engine.results import Choice, Generation, StepOutput
from forerun.errors import RequestBodyError
from forerun.server.protocol import structured
from forerun.server.protocol.fields import SPECULATIVE, checked_body, field
from forerun.server.protocol.requests import (
    SAME_NAMES,
    CompletionRequest,
    drafting_options,
    model_of,
    sampling_params,
    template_options,
)
from forerun.server.protocol.responses import Responses, chat_logprobs
from forerun.server.protocol.speculation import speculation_metrics
from forerun.utils.json_file import Fields

_POSITION = {"output_index": 0, "content_index": 0}
"""Of the only text of the only message."""


class ResponseEvents:
    """Makes the body or the events of one answer.

    Args:
        model, name, created: as `Responses.body`.

    Attributes:
        num_events: made so far, the number of the next one.
    """

    ends_with_done = False

    def __init__(
        self, responses: Responses, request: CompletionRequest, *, model: str, name: str, created: int
    ) -> None:
        self._responses, self._request = responses, request
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
        found: list[dict[str, Any]] = chat_logprobs(entries, self._responses.names)["content"]
        return found

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self.num_events = self.num_events, self.num_events + 1
        return {"type": kind, "sequence_number": number, **fields}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


# Bodies of /v1/responses as requests: text in, nothing kept between requests.

RESPONSES_URL = "/v1/responses"

_SUPPORTED = (
    "model",
    "input",
    "instructions",
    "stream",
    "max_output_tokens",
    "include",
    "top_logprobs",
    "chat_template_kwargs",
    "text",
    "prediction",
    SPECULATIVE,
    *(name for name in SAME_NAMES if name != "n"),
)
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "stream_options": ({"include_obfuscation": False}, {}),
}
"""As `fields.NOTHING_ASKED`, of these bodies alone."""
_LOGPROBS = "message.output_text.logprobs"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_ECHOED = ("instructions", "max_output_tokens", "metadata", "user", "safety_identifier", "prompt_cache_key")
"""Fields that the answer repeats."""


def parse_response(value: object, context_length: int) -> CompletionRequest:
    """Parse a body: a request for one answer to a chat.

    Raises:
        RequestBodyError: naming the field that is missing, malformed, or unsupported.
    """
    body = checked_body(value, _SUPPORTED, _WITHOUT_EFFECT)
    length = body.get("max_output_tokens", context_length)
    others = {**drafting_options(body), **_grammar(body), "max_tokens": ("max_output_tokens", length)}
    if _wants_logprobs(body):
        others["logprobs"] = ("top_logprobs", field(body, "top_logprobs").integer("top_logprobs", 0))
    return CompletionRequest(
        RESPONSES_URL,
        model_of(body),
        [_messages(body)],
        sampling_params(body, others),
        stream=field(body, "stream").flag("stream", False),
        template_options=template_options(body),
        repeated=_repeated(cast(Mapping[str, Any], value), body),
    )


def _repeated(given: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the answer repeats. Raises RequestBodyError if one cannot be written as JSON."""
    found = {name: given.get(name) for name in _ECHOED}
    if "text" in body and body["text"].get("format") is not None:
        found["text"] = body["text"]
    for name, value in found.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            raise RequestBodyError(
                f"{name} cannot be repeated in the answer: it holds NaN, an infinite number, a lone surrogate, or is "
                "nested too deeply. Correct it, or leave it out.",
                param=name,
            ) from None
    return found


def _grammar(body: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the grammar of `text.format`, which is `response_format` of chats with the schema at another key."""
    text = field(body, "text").fields("text", None)
    if text is None:
        return {}
    if any(key != "format" and key in text for key in text.values):
        raise RequestBodyError("text may hold format alone. Leave the rest out.", param="text")
    if "format" not in text:
        return {}
    given = dict(text.fields("format").values)
    if given.get("type") == "json_schema":
        given = {"type": "json_schema", "json_schema": {key: given[key] for key in given if key != "type"}}
    try:
        found = structured.grammar_of({structured.RESPONSE_FORMAT: given})
    except RequestBodyError as error:
        raise RequestBodyError(f"text.format, read as response_format: {error}", param="text") from None
    return {} if found is None else {"grammar": ("text", found[1])}


def _wants_logprobs(body: Mapping[str, Any]) -> bool:
    include = field(body, "include").list_of("include", str, [])
    odd = sorted(set(include) - {_LOGPROBS})
    if odd:
        raise RequestBodyError(f"include may hold {_LOGPROBS!r} alone. Leave the rest out.", param="include")
    if "top_logprobs" in body and not include:
        raise RequestBodyError(f"top_logprobs needs include to hold {_LOGPROBS!r}.", param="top_logprobs")
    return bool(include)


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    instructions = field(body, "instructions").string("instructions", None)
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    items = field(body, "input").list_of("input", dict)
    if not items:
        raise field(body, "input").wrong("input", "a text, or a list of messages that is not empty")
    return [*messages, *(_message(item, index) for index, item in enumerate(items))]


def _message(item: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a message of the client or of an earlier answer."""
    where = f"Item {index} of the input"
    fields = Fields(where, item, lambda text: RequestBodyError(text, param="input"), "Give messages of text.", True)
    fields.string("type", "message", choices=("message",))
    role = _ROLES[fields.string("role", choices=tuple(_ROLES))]
    content = item.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    parts = fields.list_of("content", dict)
    if not all(part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str) for part in parts):
        raise fields.wrong("content", "a text, or a list of parts of text")
    return {"role": role, "content": "".join(part["text"] for part in parts)}
