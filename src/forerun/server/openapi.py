"""OpenAPI schemas of request bodies, made from the supported fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.config import MAX_NUM_DRAFT_TOKENS, MAX_TOP_LOGPROBS, NO_DRAFTER, SamplingParams
from forerun.drafters.parse_text import K_OPTION
from forerun.server.protocol.fields import LABELS
from forerun.server.protocol.requests import SAME_NAMES
from forerun.utils.fields import Described, described

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 1}
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
_FORMAT: Schema = {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]}
_FORMS: Mapping[str, Schema] = {
    "response_format": _FORMAT,
    "structured_outputs": {
        "type": "object",
        "properties": {"choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}},
        "required": ["choice"],
    },
}


@dataclass(frozen=True, slots=True)
class SchemaFacts:
    """The names and sizes of one server in its schemas.

    Attributes:
        model: its name.
        drafters: names that requests may choose.
        vocab_size: of the target.
    """

    model: str
    drafters: Sequence[str]
    vocab_size: int

    @property
    def tokens(self) -> Schema:
        """Return the schema of a list of token ids."""
        token = {"type": "integer", "minimum": 0, "maximum": self.vocab_size - 1}
        return {"type": "array", "items": token, "minItems": 1}

    @property
    def common(self) -> dict[str, Schema]:
        """Return the fields of both chats and completions."""
        options = {
            "type": "object",
            "properties": {"include_usage": _FLAG, "include_drafts": _FLAG},
            "additionalProperties": False,
        }
        return {"max_tokens": _COUNT, "stream_options": options, **_FORMS, **self.everywhere, **self.sampling}

    @property
    def everywhere(self) -> dict[str, Schema]:
        """Return the fields of the model, of streaming and of drafting."""
        name: Schema = {"enum": [*self.drafters, NO_DRAFTER]}
        k: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_NUM_DRAFT_TOKENS}
        choice = {"type": "object", "properties": {"drafter": name, K_OPTION: k}, "additionalProperties": False}
        prediction = {
            "type": "object",
            "properties": {"type": {"const": "content"}, "content": _CONTENT},
            "required": ["type", "content"],
        }
        return {
            "model": {"const": self.model},
            "stream": _FLAG,
            "speculative": {"anyOf": [_FLAG, name, choice]},
            "prediction": prediction,
        }

    @property
    def sampling(self) -> dict[str, Schema]:
        """Return the sampling options that have the same name in SamplingParams."""
        stop = {"type": "string", "minLength": 1}
        lists: dict[str, Schema] = {
            "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": 4}]},
            "stop_token_ids": {**self.tokens, "minItems": 0},
            "logit_bias": {
                "type": "object",
                "patternProperties": {"^[0-9]{1,2}$": {"type": "number"}},
                "additionalProperties": False,
            },
        }
        fields = described(SamplingParams)
        return {name: lists.get(name) or _number(fields[name]) for name in SAME_NAMES}


def chat_schema(facts: SchemaFacts) -> Schema:
    """Return the schema of the body of a chat."""
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
    return _body({**facts.common, **fields}, "messages")


def completion_schema(facts: SchemaFacts) -> Schema:
    """Return the schema of the body of a completion."""
    texts = {"type": "array", "items": _TEXT, "minItems": 1}
    fields = {
        "prompt": {"anyOf": [_TEXT, texts, facts.tokens, {"type": "array", "items": facts.tokens, "minItems": 1}]},
        "echo": _FLAG,
        "best_of": _COUNT,
        "logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    }
    return _body({**facts.common, **fields}, "prompt")


def response_schema(facts: SchemaFacts) -> Schema:
    """Return the schema of the body of a response."""
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
        "input": {"anyOf": [_TEXT, {"type": "array", "items": item, "minItems": 1}]},
        "instructions": _TEXT,
        "max_output_tokens": _COUNT,
        "text": {"type": "object", "properties": {"format": _FORMAT}},
        "include": {"type": "array", "items": {"const": "message.output_text.logprobs"}},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "chat_template_kwargs": {"type": "object"},
    }
    sampling = {name: schema for name, schema in facts.sampling.items() if name != "n"}
    return _body({**facts.everywhere, **sampling, **fields}, "input")


def tokenize_schema(facts: SchemaFacts) -> Schema:
    """Return the schema of the body of /tokenize."""
    fields = {"model": {"const": facts.model}, "prompt": _TEXT, "messages": _MESSAGES, "add_special_tokens": _FLAG}
    return _body({**fields, "chat_template_kwargs": {"type": "object"}})


def detokenize_schema(facts: SchemaFacts) -> Schema:
    """Return the schema of the body of /detokenize."""
    return _body({"model": {"const": facts.model}, "tokens": {**facts.tokens, "minItems": 0}}, "tokens")


def operation(schema: Schema) -> Schema:
    """Return the OpenAPI operation of an endpoint that reads such a body."""
    errors = (400, 401, 404, 408, 413, 429, 503)
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The answer, or a stream of server-sent events."},
            **{str(status): {"description": "An error body of OpenAI's."} for status in errors},
        },
    }


def _body(properties: Mapping[str, Schema], *required: str) -> Schema:
    """Return the schema of an object with these fields and the client's labels."""
    labels = {name: {} if name == "metadata" else _TEXT for name in LABELS}
    every = {**labels, **properties}
    return {"type": "object", "properties": every, "required": list(required), "additionalProperties": False}


def _number(field: Described) -> Schema:
    """Return the schema of a number or a switch, with its range and help."""
    if field.number is None:
        return {"type": "boolean", "description": field.option.help}
    made: Schema = {"type": "integer" if field.number is int else "number", "description": field.option.help}
    if field.option.low != -math.inf:
        made["exclusiveMinimum" if field.option.above else "minimum"] = field.option.low
    if field.option.high != math.inf:
        made["maximum"] = field.option.high
    return made
