"""Bodies of /v1/responses as requests: text in, nothing kept between requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import RequestBodyError
from forerun.files.json_file import Fields
from forerun.openai_format import speculative, structured
from forerun.openai_format.fields import checked_body, field
from forerun.openai_format.requests import CompletionRequest, drafting_options, model_of, template_options
from forerun.openai_format.sampling import SAME_NAMES, sampling_params

RESPONSES_URL = "/v1/responses"

_HONOURED = (
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
    speculative.NAME,
    *(name for name in SAME_NAMES if name != "n"),
)
_NOTHING_ASKED: Mapping[str, tuple[Any, ...]] = {
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
    """A body as a request for one answer to a chat.

    Raises:
        RequestBodyError: naming the field that is missing, malformed, or cannot be honoured.
    """
    body = checked_body(value, _HONOURED, _NOTHING_ASKED)
    length = body.get("max_output_tokens", context_length)
    others = {**drafting_options(body), **_grammar(body), "max_tokens": ("max_output_tokens", length)}
    if _wants_logprobs(body):
        others["logprobs"] = ("top_logprobs", field(body, "top_logprobs").integer("top_logprobs", 0))
    given = value if isinstance(value, dict) else {}
    text = {"text": body["text"]} if "text" in body and body["text"].get("format") is not None else {}
    return CompletionRequest(
        RESPONSES_URL,
        model_of(body),
        [_messages(body)],
        sampling_params(body, others),
        stream=field(body, "stream").flag("stream", False),
        template_options=template_options(body),
        repeated={name: given.get(name) for name in _ECHOED} | text,
    )


def _grammar(body: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """What the answer must be: `text.format`, which chats call `response_format`; the schema stands elsewhere in it."""
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
    return [*messages, *(_message(item, place) for place, item in enumerate(items))]


def _message(item: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A message, as the client writes it or as an earlier answer had it."""
    where = f"Item {place} of the input"
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
