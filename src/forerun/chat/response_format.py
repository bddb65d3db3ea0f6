"""How a family writes its answers: Transformers' response templates, found for a chat template or read from a file.

`families/` has one for each family: the regions of an answer with what opens and closes them, and what they contain. In
regions with `offered`, calls are read in any of the forms of `_offered_call`, and those of other tools are text; if the
family has it, also those of LOOSE are read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import Any

import regex
from pydantic_core import from_json

from forerun.errors import ConfigError
from forerun.utils.json_file import read_json

CALL = "tool_call"
REASONING = "reasoning"
CONTENT = "content"
_KINDS = {"tool_calls": CALL, **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), REASONING)}
_REMEDY = "Write it as Transformers' response templates are written."
_FOLDER = Path(__file__).parent / "families"
_NOTHING = r"(?!)"
_OF_CONTENT = re.compile(r'\{"name": "\{content\.(\w+)\}", "arguments": "\{content\.(\w+)\}"\}')
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
OPTIONS = {"strip", "string_delims", "unquoted_keys", "tag_pattern"}
LOOSE: Mapping[str, Any] = {
    # at the beginning of a line or behind markup: perhaps a fence, perhaps a tag, which is no family's own mark, since
    # a search finds whole marks before the beginnings of others; then an object or a list of such
    "open_pattern": r"(?:\A|(?<=[\n>;}]))[ \t]*+(?:```[\w-]*+\s*+)?"
    r"(?:<(?:tools?|function_call|response|json|xml)>\s*+)?"
    r'(?=(?:\[\s*+)?\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?(?:"function"\s*+:\s*+\{\s*+)?'
    r'"(?:name"\s*+:\s*+"(?P<name>[^"\\\n]{1,200})"|(?:arguments|parameters)"\s*+:\s*+\{))',
    "content": "json",
    "offered": True,
    "transform": {"type": "function", "function": "{content}"},
}
"""A region of calls as models of several families write them beside their format, where they have tools."""
ERRORS = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)
"""What a content that is damaged raises."""


def _json(text: str, args: Mapping[str, Any]) -> Any:
    """Parse JSON, whose strings may stand between marks of their own and whose keys may be bare."""
    found = [f"{re.escape(begin)}(?P<marked>.*?){re.escape(end)}" for begin, end in args.get("string_delims", ())]
    key = r"(?<=[{,])\s*(?P<key>[\w.-]+)\s*:" if args.get("unquoted_keys") else "(?P<key>(?!))"
    pattern = "|".join([*found, r'(?P<quoted>"(?:[^"\\]|\\.)*(?:"|\Z))', key])

    def as_json(match: regex.Match[str]) -> str:
        if match.groupdict().get("marked") is not None:
            return json.dumps(match["marked"], ensure_ascii=False)
        return match["quoted"] or f'"{match["key"]}":'

    return from_json(regex.sub(pattern, as_json, text, flags=regex.DOTALL), allow_inf_nan=False)


def _tags(text: str, args: Mapping[str, Any]) -> dict[str, str]:
    """Parse tags with a key and a value, and nothing between them."""
    tags = regex.fullmatch(rf"(?>\s*(?:{args['tag_pattern']}))*+\s*", text, regex.DOTALL)
    if tags is None:
        raise ValueError("text stands between tags")
    return dict(zip(map(str.strip, tags.captures("key")), tags.captures("value"), strict=True))


def _python_calls(text: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parse `[name(key="value", ...), ...]`, whose values are literals."""
    tree = ast.parse(text.strip(), mode="eval").body
    found = []
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


def _offered_call(call: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return a call of one of these tools: its arguments may be parameters, or JSON in a text.

    Raises:
        LookupError, TypeError: it is none, but the definition of a tool, or other JSON.
    """
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name = call["name"]
    if name not in names or "description" in call:
        raise LookupError("no tool that was offered is called")
    if call.keys() == {"name"}:
        return {"name": name, "arguments": {}}
    arguments = call["arguments"] if "arguments" in call else call["parameters"]
    if "arguments" not in call and isinstance(arguments, dict) and {"type", "properties"} <= arguments.keys():
        raise LookupError("the parameters are a schema")
    return {"name": name, "arguments": from_json(arguments) if isinstance(arguments, str) else arguments}


def typed_argument(text: str, schema: Any) -> Any:
    """Return the text of an argument as a value of the type that its JSON schema declares; as it is if it is none."""
    types = declared(schema)
    try:
        value = _CONSTANTS[text.strip()] if text.strip() in _CONSTANTS else from_json(text, allow_inf_nan=False)
    except ValueError:
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
    return reduce(getitem, placeholder[1].split("."), scope)


@dataclass(frozen=True, slots=True)
class Region:
    """A field of a response template: a part of an answer.

    Attributes:
        kind: CALL, REASONING or CONTENT.
        opens: a pattern; empty for what is outside of other regions.
        closes: a pattern, which matches nothing if the region ends with its JSON, or with the answer.
        inside: what is looked for within it: a group `_close`, and in calls a group `_json` of what opens a string and
            of the structure of plain JSON.
        strings: what opens a string of a call, within which marks are text, and a group `_string` of what ends it.
        field: the field itself.
        is_json: whether it holds plain JSON, which is followed while it grows.
        is_named: whether the name of a call stands where it opens, and the arguments are all of its content.
        head: matches the JSON of a call up to its arguments; None if these are not recognized before its end.
    """

    kind: str
    opens: str
    closes: str
    inside: regex.Pattern[str]
    strings: tuple[tuple[regex.Pattern[str], regex.Pattern[str]], ...]
    field: Mapping[str, Any]
    is_json: bool
    is_named: bool
    head: re.Pattern[str] | None

    @classmethod
    def of(cls, name: str, field: Mapping[str, Any]) -> Region:
        """Read a field of a response template. Raises one of ERRORS or regex.error if it is none."""
        kind = _KINDS.get(name, CONTENT)
        content = field.get("content", "text")
        args = field.get("content_args", {})
        if odd := sorted({content} - CONTENTS.keys() | args.keys() - OPTIONS):
            raise ValueError(f"{odd[0]} is not supported")
        function = (field.get("transform") or {"function": "{content}"})["function"] if kind == CALL else None
        is_json = kind == CALL and content == "json" and not args
        closes = _pattern(field, "close") or _NOTHING
        strings = _strings(content, args) if kind == CALL else {}
        structure = "|".join([*strings, *([r"[{}\[\]]"] if is_json else [])]) or _NOTHING
        inside = regex.compile(f"(?P<_close>{closes})|(?P<_json>{structure})", regex.DOTALL)
        ends = [regex.compile(f"(?P<_string>{end})", regex.DOTALL) for end in strings.values()]
        pairs = tuple(zip(map(regex.compile, strings), ends, strict=True))
        is_named = function == {"name": "{name}", "arguments": "{content}"}
        return cls(kind, _pattern(field, "open"), closes, inside, pairs, field, is_json, is_named, _head(function))

    @property
    def needs_close(self) -> bool:
        """Return whether its text does not show that it is whole."""
        return self.is_json or self.field.get("content") not in ("json", "python-call-list")

    @property
    def is_offered(self) -> bool:
        """Return whether its text holds calls only if these are of tools that were offered."""
        return bool(self.field.get("offered"))

    def calls(self, text: str, captures: Mapping[str, str], schemas: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the calls that its text holds: names, and arguments as JSON. Raises one of ERRORS.

        schemas: name -> JSON schemas of the parameters, by which arguments that are written as text get their types.
        """
        value = CONTENTS[self.field.get("content", "text")](text, self.field.get("content_args", {}))
        values = value if isinstance(value, list) and not self.is_named else [value]
        items = values if self.field.get("transform_each") else [{"content": each} for each in values]
        template = self.field.get("transform", "{content}")
        calls: list[Any] = [transformed(template, {**captures, **item}) for item in items if not self.is_offered]
        calls += [_offered_call(each, schemas) for each in values if self.is_offered]
        for call in chain.from_iterable(each if isinstance(each, list) else [each] for each in calls):
            function = call.get("function", call)
            name = function["name"]
            arguments = function.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError("a call has a name and an object of arguments")
            if self.field.get("content") == "xml-inline":
                arguments = {
                    key: typed_argument(value, schemas.get(name, {}).get(key)) for key, value in arguments.items()
                }
            # halves of characters cannot be encoded
            yield name, json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode().decode()


def _strings(content: str, args: Mapping[str, Any]) -> dict[str, str]:
    """Return patterns of what opens a string in the content of a call, and of what ends it or is escaped in it."""
    if content == "xml-inline":
        regex.compile(args["tag_pattern"])
        opens, _, ends = args["tag_pattern"].partition("(?P<value>.*?)")
        # not where the value stands within a group of more
        return {opens: ends} if ends and opens.count("(") == opens.count(")") else {}
    if delimiters := args.get("string_delims"):
        return {regex.escape(begin): regex.escape(end) for begin, end in delimiters}
    # a string of JSON ends with its line; three quotes of Python are an empty string and another one
    python = {quote: rf"{quote}|\\." for quote in "\"'"}
    return {"json": {'"': r'["\n]|\\.'}, "python-call-list": python}.get(content, {})


def _pattern(field: Mapping[str, Any], key: str) -> str:
    """Return a pattern of what opens or closes a region; empty without.

    Whitespace at its beginning is left out, since all of it around markup is markup.
    """
    if (pattern := field.get(f"{key}_pattern")) is not None:
        return re.sub(r"^\\s[*+]\??", "", pattern)
    literals = [field[key]] if isinstance(field.get(key), str) else field.get(key, ())
    return "|".join(regex.escape(literal, special_only=True) for literal in sorted(literals, key=len, reverse=True))


def _head(function: Any) -> re.Pattern[str] | None:
    """Return `Region.head` of a call's function in a transform."""
    named = _OF_CONTENT.fullmatch(json.dumps(function))
    if named is None and function != "{content}":
        return None
    name, arguments = ("name", "arguments") if named is None else named.groups()
    return re.compile(rf'\s*\{{\s*"{name}"\s*:\s*"([^"\\]+)"\s*,\s*"{arguments}"\s*:\s*')


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A response template, ready for parsers.

    Attributes:
        regions: its fields.
        openings: what is looked for outside of regions without tools, with tools, and with tools whose calls may be
            written in the ways of LOOSE: groups `_open_N` for regions, and `_drop` for other markup.
        anchor: matches what stands before an answer in a prompt.
        forced: how a call is written that must be made (`forced_calls.py`); None if that is unknown.
    """

    regions: tuple[Region, ...]
    openings: tuple[regex.Pattern[str], regex.Pattern[str], regex.Pattern[str]]
    anchor: regex.Pattern[str]
    forced: Mapping[str, Any] | None

    @classmethod
    def of(
        cls, template: Any, place: str, forced: Mapping[str, Any] | None = None, *, is_loose: bool = False
    ) -> ResponseFormat:
        """Read the values of a response template. Raises ConfigError, naming its place, if it is none.

        is_loose: calls are read in the ways of LOOSE, too.
        """
        try:
            own = [Region.of(name, field) for name, field in template["fields"].items()]
            regions = (*own, *([Region.of("tool_calls", LOOSE)] if is_loose else []))
            openings = (
                _opening(own, with_tools=False),
                _opening(own, with_tools=True),
                _opening(regions, with_tools=True),
            )
            anchor = regex.compile(_pattern(template, "start_anchor") or _NOTHING, regex.DOTALL)
        except (*ERRORS, regex.error) as error:
            raise ConfigError(f"{place}: it is no response template: {error!r}. {_REMEDY}") from None
        return cls(regions, openings, anchor, forced)

    def markup(self, special: Mapping[str, int]) -> dict[int, str]:
        """Return id -> text of the special tokens that marks consist of: a parser must find them in the answer's text.

        special: text -> id of the tokenizer's special tokens.
        """
        marks = json.dumps([dict(region.field) for region in self.regions], ensure_ascii=False)
        plain = re.sub(r"\\+(.)", r"\1", marks)
        return {token_id: text for text, token_id in special.items() if text in plain}


def _opening(regions: Iterable[Region], *, with_tools: bool) -> regex.Pattern[str]:
    found = [(at, region) for at, region in enumerate(regions) if with_tools or region.kind != CALL]
    opens = [f"(?P<_open_{at}>{region.opens})" for at, region in found if region.opens]
    # the end mark of JSON comes after its last brace, where the region has ended
    drops = [region.closes for _, region in found if with_tools and (region.is_json or not region.opens)]
    return regex.compile("|".join([*opens, f"(?P<_drop>{'|'.join(drops) or _NOTHING})"]), regex.DOTALL)


def read_format(path: str | Path) -> ResponseFormat:
    """Return the format of a file, a response template or one of `families/`. Raises ConfigError if it holds none."""
    values = read_json(path, ConfigError, remedy=_REMEDY)
    is_family = isinstance(values, dict) and "response_template" in values
    return ResponseFormat.of(values["response_template"] if is_family else values, str(path))


def find_format(chat_template: str, response_template: Any = None) -> ResponseFormat | None:
    """Return the format in which a model answers; None if its chat template writes none that is known.

    Args:
        chat_template: by which its prompts are written, and with them its former answers.
        response_template: the tokenizer's own, if it has one, which is taken.

    Raises:
        ConfigError: the tokenizer's own is none.
    """
    if response_template is not None:
        return ResponseFormat.of(response_template, "the tokenizer's response_template")
    families = [family for family in _families() if all(re.search(mark, chat_template) for mark in family["written"])]
    family = max(families, key=lambda family: len(family["written"]), default=None)
    if family is None:
        return None
    template = family["response_template"]
    fields = {
        name: field
        for name, field in template["fields"].items()
        # where the chat template does not write what opens or closes thinking, it is text
        if _KINDS.get(name) != REASONING
        or "open_pattern" in field
        or any(str(field.get(key)) in chat_template for key in ("open", "close"))
    }
    template = {**template, "fields": fields}
    return ResponseFormat.of(template, family["name"], family.get("forced"), is_loose=family.get("loose", False))


@cache
def _families() -> list[dict[str, Any]]:
    return [{"name": path.stem, **read_json(path, ConfigError)} for path in sorted(_FOLDER.glob("*.json"))]
