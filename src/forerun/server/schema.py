"""The bodies of requests as OpenAPI describes them, made from the fields that are honoured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forerun.config import MAX_NUM_DRAFT_TOKENS, MAX_TOP_LOGPROBS, SamplingParams
from forerun.fields import Described, described
from forerun.openai_format.fields import LABELS
from forerun.openai_format.sampling import SAME_NAMES

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_ROLE: Schema = {"enum": ["system", "user", "assistant"]}
_CONTENT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}
_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"role": _ROLE, "content": _CONTENT},
        "required": ["role", "content"],
    },
}
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _TEXT, "description": _TEXT, "parameters": {"type": "object"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_LISTS: Mapping[str, Schema] = {
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
}
_DRAFTING: Mapping[str, Schema] = {
    "prediction": {
        "type": "object",
        "properties": {"type": {"const": "content"}, "content": _CONTENT},
        "required": ["type", "content"],
    },
    "speculative": {
        "anyOf": [
            _FLAG,
            _TEXT,
            {
                "type": "object",
                "properties": {
                    "drafter": _TEXT,
                    "num_draft_tokens": {"type": "integer", "minimum": 0, "maximum": MAX_NUM_DRAFT_TOKENS},
                },
                "additionalProperties": False,
            },
        ]
    },
}
_COMMON: Mapping[str, Schema] = {
    "model": _TEXT,
    "max_tokens": _COUNT,
    "stream": _FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}, "additionalProperties": False},
    **_DRAFTING,
}


def chat_schema() -> Schema:
    """The body of a chat."""
    fields = {
        "messages": _MESSAGES,
        "max_completion_tokens": _COUNT,
        "logprobs": _FLAG,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "chat_template_kwargs": {"type": "object"},
        "tools": {"type": "array", "items": _TOOL},
        "tool_choice": {"enum": ["auto", "none"]},
        "parallel_tool_calls": _FLAG,
    }
    return _body({**_COMMON, **_sampling(), **fields}, "messages")


def completion_schema() -> Schema:
    """The body of a completion."""
    texts = {"type": "array", "items": _TEXT, "minItems": 1}
    fields = {
        "prompt": {"anyOf": [_TEXT, texts, _TOKENS, {"type": "array", "items": _TOKENS, "minItems": 1}]},
        "echo": _FLAG,
        "best_of": _COUNT,
        "logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    }
    return _body({**_COMMON, **_sampling(), **fields}, "prompt")


def response_schema() -> Schema:
    """The body of a response."""
    item = {
        "type": "object",
        "properties": {
            "type": {"const": "message"},
            "role": {"enum": ["system", "user", "assistant"]},
            "content": _TEXT,
        },
        "required": ["role", "content"],
    }
    fields = {
        "model": _TEXT,
        "input": {"anyOf": [_TEXT, {"type": "array", "items": item, "minItems": 1}]},
        "instructions": _TEXT,
        "stream": _FLAG,
        "max_output_tokens": _COUNT,
        "include": {"type": "array", "items": {"const": "message.output_text.logprobs"}},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "chat_template_kwargs": {"type": "object"},
        **_DRAFTING,
    }
    sampling = {name: schema for name, schema in _sampling().items() if name != "n"}
    return _body({**sampling, **fields}, "input")


def tokenize_schema() -> Schema:
    """The body of /tokenize."""
    fields = {"model": _TEXT, "prompt": _TEXT, "messages": _MESSAGES, "add_special_tokens": _FLAG}
    return _body({**fields, "chat_template_kwargs": {"type": "object"}})


def detokenize_schema() -> Schema:
    """The body of /detokenize."""
    return _body({"model": _TEXT, "tokens": {**_TOKENS, "minItems": 0}}, "tokens")


def operation(schema: Schema) -> Schema:
    """What OpenAPI is told of an endpoint that reads such a body."""
    errors = (400, 401, 404, 408, 413, 429, 503)
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The answer, or a stream of server-sent events."},
            **{str(status): {"description": "An error body of OpenAI's."} for status in errors},
        },
    }


def _body(properties: Mapping[str, Schema], *required: str) -> Schema:
    """An object with these fields, and the client's labels."""
    labels = {name: {} if name == "metadata" else _TEXT for name in LABELS}
    every = {**labels, **properties}
    return {"type": "object", "properties": every, "required": list(required), "additionalProperties": False}


def _sampling() -> dict[str, Schema]:
    fields = described(SamplingParams)
    return {name: _LISTS.get(name) or _number(fields[name]) for name in SAME_NAMES}


def _number(field: Described) -> Schema:
    """Of a number or a switch, with its range and help."""
    if field.number is None:
        return {"type": "boolean", "description": field.option.help}
    made: Schema = {"type": "integer" if field.number is int else "number", "description": field.option.help}
    if field.option.low != -math.inf:
        made["exclusiveMinimum" if field.option.above else "minimum"] = field.option.low
    if field.option.high != math.inf:
        made["maximum"] = field.option.high
    return made
