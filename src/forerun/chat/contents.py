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
_NUMBERED = "\x00{}\x00"
_KEY = re.compile(r'("(?:[^"\\]|\\.)*")|(?<=[{,])\s*([\w.-]+)\s*:')
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_TYPES = {"integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list, "object": dict}
OPTIONS = {"strip", "string_delims", "unquoted_keys", "allow_non_json", "tag_pattern", "value_parser"}
OPTIONS |= {"line_sep", "kv_sep"}
# Every error of a content is one of these.
ERRORS = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def read_json(text: str) -> Any:
    """Parse JSON; unlike Python's, without NaN and infinity. Raises one of ERRORS."""
    return json.loads(text, parse_constant=_refuse)


def _json(text: str, args: Mapping[str, Any]) -> Any:
    """Parse JSON whose strings may stand between marks of their own, and whose keys may be bare."""
    strings: list[str] = []

    def stored(match: re.Match[str]) -> str:
        strings.append(json.dumps(match[1], ensure_ascii=False))
        return _NUMBERED.format(len(strings) - 1)

    if (delimiters := args.get("string_delims")) and "\0" in text:
        raise ValueError("it holds a null character")
    plain = text
    for begin, end in delimiters or ():
        plain = re.sub(f"{re.escape(begin)}(.*?){re.escape(end)}", stored, plain, flags=re.DOTALL)
    if args.get("unquoted_keys"):
        plain = _KEY.sub(lambda match: match[1] or f'"{match[2]}":', plain)
    try:
        return read_json(re.sub("\0([0-9]+)\0", lambda match: strings[int(match[1])], plain))
    except ValueError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def _python_calls(text: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parse `[name(key="value", ...), ...]`, whose values are literals."""
    tree = ast.parse(text.strip(), mode="eval").body
    return [_python_call(call) for call in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _python_call(call: ast.expr) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("it is no call with named arguments")
    arguments = {str(word.arg): ast.literal_eval(_Constants().visit(word.value)) for word in call.keywords}
    return {"name": ast.unparse(call.func), "arguments": arguments}


class _Constants(ast.NodeTransformer):
    """Reads JSON's constants among Python's. Raises KeyError for other names."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_CONSTANTS[node.id])


def _lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Parse lines of a key, a separator and a value."""
    pairs = [line.partition(args.get("kv_sep", ":")) for line in text.split(args.get("line_sep", "\n"))]
    return {key.strip(): tag_value(value.strip(), args) for key, separator, value in pairs if separator}


def _tags(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    tags = re.finditer(args["tag_pattern"], text, re.DOTALL)
    return {tag["key"].strip(): tag_value(tag["value"], args) for tag in tags}


def tag_value(text: str, args: Mapping[str, Any]) -> Any:
    """Return the value of a tag or line by the parser that the template names for values, if it names one."""
    parser = args.get("value_parser") or {}
    return CONTENTS[parser.get("name", "text")](text, {"strip": False, **parser.get("args", {})})


CONTENTS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": lambda text, args: text.strip() if args.get("strip", True) else text,
    "int": lambda text, args: int(text),
    "float": lambda text, args: float(text),
    "bool": lambda text, args: text.strip().lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
    "python-call-list": _python_calls,
}


def typed(text: Any, schema: Any) -> Any:
    """Return the text of an argument as the type that its JSON schema declares; as it is where it is of no such type."""
    types = _declared(schema)
    if not isinstance(text, str) or not types - {"string"}:
        return text
    try:
        value = _CONSTANTS[text.strip()] if text.strip() in _CONSTANTS else read_json(text)
        if isinstance(value, float) and value.is_integer() and "number" not in types:
            value = int(value)
    except ERRORS:
        return text
    # True is an int in Python
    fits = (name for name in types & _TYPES.keys() if isinstance(value, bool) == (name == "boolean"))
    return value if any(isinstance(value, _TYPES[name]) for name in fits) else text


def _declared(schema: Any) -> set[str]:
    """Return the types that a schema allows, those of its alternatives included."""
    if not isinstance(schema, dict):
        return set()
    own = schema.get("type")
    types = {own} if isinstance(own, str) else set(own) if isinstance(own, list) else set()
    choices = [choice for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for choice in schema[key]]
    return types.union({"null"} if schema.get("nullable") else (), *map(_declared, choices))


def transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return a transform of a response template with its placeholders, such as "{content.name}", filled in.

    Raises:
        KeyError, TypeError: the scope has no such value.
    """
    if isinstance(transform, dict):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [transformed(value, scope) for value in transform]
    if not isinstance(transform, str) or not (placeholder := _PLACEHOLDER.fullmatch(transform)):
        return transform
    value: Any = scope
    for key in placeholder[1].split("."):
        value = value[key]
    return value
