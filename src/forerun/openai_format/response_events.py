"""Answers of /v1/responses: the whole, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from typing import Any

from forerun.engine.results import Choice, Generation, StepOutput
from forerun.openai_format.logprobs import chat_logprobs
from forerun.openai_format.requests import CompletionRequest
from forerun.openai_format.responses import Responses
from forerun.openai_format.speculation import speculation_metrics

_PLACE = {"output_index": 0, "content_index": 0}
"""Of the only text of the only message."""


class ResponseEvents:
    """Makes what one answer consists of.

    Args:
        model, name, created: as `Responses.body`.
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
        self._number = 0

    def whole(self, generations: Seq[Generation]) -> dict[str, Any]:
        """The body of the answer."""
        (generation,) = generations
        (choice,) = generation.choices
        whole = choice.finish_reason == "stop"
        details = {} if whole else {"reason": "max_output_tokens"}
        told = speculation_metrics([choice.stats])
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
            "metrics": {"speculative_decoding": told},
        }

    def of(self, place: int, output: StepOutput) -> Iterator[dict[str, Any]]:
        """The events of one output."""
        if not self._number:
            yield self._event("response.created", response=self._unfinished("in_progress"))
            yield self._event("response.in_progress", response=self._unfinished("in_progress"))
            message = {"id": self._item, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
            yield self._event("response.output_item.added", output_index=0, item=message)
            yield self._event("response.content_part.added", item_id=self._item, **_PLACE, part=_part("", []))
        chunk = output.chunk
        if chunk.text or chunk.logprobs:
            logprobs = self._logprobs(chunk.logprobs)
            yield self._event(
                "response.output_text.delta", item_id=self._item, **_PLACE, delta=chunk.text, logprobs=logprobs
            )

    def last(self, generations: Seq[Generation]) -> Iterator[dict[str, Any]]:
        """The events that end the stream."""
        whole = self.whole(generations)
        (message,) = whole["output"]
        (part,) = message["content"]
        text, logprobs = part["text"], part["logprobs"]
        yield self._event("response.output_text.done", item_id=self._item, **_PLACE, text=text, logprobs=logprobs)
        yield self._event("response.content_part.done", item_id=self._item, **_PLACE, part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failure(self, body: dict[str, Any]) -> dict[str, Any]:
        """The event that ends a stream with an error. body: as `error_response` makes it."""
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
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
