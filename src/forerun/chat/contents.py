"""The contents of a tool call as families write them: JSON, a dialect of it, tags, lists of Python calls.

The names and options are those of `content` and `content_args` in Transformers' response templates.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_KEY = re.compile(r'("(?:[^"\\]|\\.)*(?:"|\Z))|(?<=[{,])\s*([\w.-]+)\s*:')
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
OPTIONS = {"strip", "string_delims", "unquoted_keys", "tag_pattern"}
ERRORS = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)
"""What a content that is damaged raises."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _json(text: str, args: Mapping[str, Any]) -> Any:
    """Parse JSON, whose strings may stand between marks of their own and whose keys may be bare."""
    strings: list[str] = []

    def numbered(match: re.Match[str]) -> str:
        strings.append(json.dumps(match[1], ensure_ascii=False))
        return f"\0{len(strings) - 1}\0"

    for begin, end in args.get("string_delims", ()):
        text = re.sub(f"{re.escape(begin)}(.*?){re.escape(end)}", numbered, text.replace("\0", ""), flags=re.DOTALL)
    if args.get("unquoted_keys"):
        text = _KEY.sub(lambda match: match[1] or f'"{match[2]}":', text)
    text = re.sub("\0([0-9]+)\0", lambda match: strings[int(match[1])], text)
    return json.loads(text, parse_constant=_refuse)


def _tags(text: str, args: Mapping[str, Any]) -> dict[str, str]:
    """Parse tags with a key and a value, and nothing between them."""
    tag, found, at = re.compile(rf"\s*(?:{args['tag_pattern']})", re.DOTALL), {}, 0
    while at < len(text.rstrip()):
        if (match := tag.match(text, at)) is None:
            raise ValueError("text stands between tags")
        found[match["key"].strip()], at = match["value"], match.end()
    return found


def _python_calls(text: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parse `[name(key="value", ...), ...]`, whose values are literals."""
    tree, found = ast.parse(text.strip(), mode="eval").body, []
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("it is no call with named arguments")
        arguments = {str(word.arg): ast.literal_eval(_Constants().visit(word.value)) for word in call.keywords}
        found.append({"name": ast.unparse(call.func), "arguments": arguments})
    return found


class _Constants(ast.NodeTransformer):
    """Reads JSON's constants among Python's. Raises KeyError for other names."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_CONSTANTS[node.id])


CONTENTS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": lambda text, args: text.strip() if args.get("strip", True) else text,
    "json": _json,
    "xml-inline": _tags,
    "python-call-list": _python_calls,
}


def typed(text: str, schema: Any) -> Any:
    """Return the text of an argument as a value of the type that its JSON schema declares; as it is if it is none."""
    types = declared(schema)
    try:
        value = _CONSTANTS[text.strip()] if text.strip() in _CONSTANTS else json.loads(text, parse_constant=_refuse)
    except ERRORS:
        return text
    if not types or ("string" in types and not (value is None and "null" in types)):
        return text
    return int(value) if isinstance(value, float) and value.is_integer() and "number" not in types else value


def declared(schema: Any) -> set[str]:
    """Return the types that a schema allows, those of its alternatives included."""
    if not isinstance(schema, dict):
        return set()
    types = schema.get("type") or []
    choices = [choice for key in ("anyOf", "oneOf") for choice in schema.get(key) or ()]
    return set([types] if isinstance(types, str) else types).union(*map(declared, choices))


def transformed(transform: Any, scope: Any) -> Any:
    """Return a transform of a response template with its placeholders, such as "{content.name}", filled in.

    Raises:
        LookupError, TypeError: the scope has no such value.
    """
    if isinstance(transform, dict):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if not isinstance(transform, str) or not (placeholder := _PLACEHOLDER.fullmatch(transform)):
        return transform
    for key in placeholder[1].split("."):
        scope = scope[key]
    return scope
