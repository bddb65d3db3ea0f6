"""Structured outputs: the fields `response_format` and, as in vLLM, `structured_outputs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.config import Grammar
from forerun.errors import GrammarError, RequestBodyError
from forerun.server.protocol.fields import field

RESPONSE_FORMAT, STRUCTURED_OUTPUTS = FIELDS = ("response_format", "structured_outputs")

_FORMATS = ("text", "json_object", "json_schema")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
}
_SCHEMA_KEYS = ("name", "description", "schema", "strict")
_REMEDY = "Correct it, or leave it out."


def grammar_of(body: Mapping[str, Any]) -> tuple[str, Grammar] | None:
    """Return the field of the body that sets a grammar, and the grammar; None without one.

    Raises:
        RequestBodyError: one is malformed or unsupported, or there are two.
    """
    found = [
        (name, grammar)
        for name, read in ((RESPONSE_FORMAT, _response_format), (STRUCTURED_OUTPUTS, _structured_outputs))
        if name in body and (grammar := _read(name, read, body)) is not None
    ]
    if len(found) > 1:
        raise RequestBodyError(
            "response_format and structured_outputs both constrain the answer. Give one of them.",
            param=STRUCTURED_OUTPUTS,
        )
    return found[0] if found else None


def _read(name: str, read: Callable[[Mapping[str, Any]], Grammar | None], body: Mapping[str, Any]) -> Grammar | None:
    try:
        return read(body)
    except GrammarError as error:
        raise RequestBodyError(f"{name}: {error}", param=name) from None


def _response_format(body: Mapping[str, Any]) -> Grammar | None:
    fields = field(body, RESPONSE_FORMAT).fields(RESPONSE_FORMAT)
    kind = fields.string("type", choices=_FORMATS)
    _check_keys(RESPONSE_FORMAT, fields.values, _KEYS[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    schema = fields.fields("json_schema")
    _check_keys(RESPONSE_FORMAT, schema.values, _SCHEMA_KEYS)
    schema.string("name", "")
    schema.string("description", "")
    schema.flag("strict", None)  # every schema is held to strictly
    return Grammar.json_schema(schema.fields("schema").values)


def _structured_outputs(body: Mapping[str, Any]) -> Grammar | None:
    fields = field(body, STRUCTURED_OUTPUTS).fields(STRUCTURED_OUTPUTS)
    given = [name for name, value in fields.values.items() if value is not None]
    _check_keys(STRUCTURED_OUTPUTS, fields.values, ("json", "json_object", "regex", "choice", "grammar"))
    if len(given) != 1:
        raise RequestBodyError(
            "structured_outputs must have one of json, json_object, regex, choice and grammar. " + _REMEDY,
            param=STRUCTURED_OUTPUTS,
        )
    name = given[0]
    if name == "json_object":
        return Grammar.json_object() if fields.flag(name) else None
    if name == "choice":
        return Grammar.choice(fields.list_of(name, str))
    if name == "regex":
        return Grammar.regex(fields.string(name))
    if name == "grammar":
        return Grammar.lark(fields.string(name))
    return Grammar.json_schema(
        fields.values[name] if isinstance(fields.values[name], str) else fields.fields(name).values
    )


def _check_keys(name: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise RequestBodyError for keys that would be ignored."""
    odd = [key for key, value in values.items() if key not in known and value is not None]
    if odd:
        shown = ascii(odd[0][:60])
        raise RequestBodyError(f"{name} has a key {shown}, which is not supported. Leave it out.", param=name)
