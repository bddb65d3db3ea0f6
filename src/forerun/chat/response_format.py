"""How a family writes its answers: Transformers' response templates, found for a chat template or read from a file.

`families/` has one for each family: the regions of an answer with what opens and closes them, and what they contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import regex

from forerun.chat.contents import CONTENTS, ERRORS, OPTIONS, transformed
from forerun.errors import ConfigError
from forerun.utils.json_file import read_json

CALL, REASONING, CONTENT = "tool_call", "reasoning", "content"
_KINDS = {"tool_calls": CALL, **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), REASONING)}
_REMEDY = "Write it as Transformers' response templates are written."
_FOLDER = Path(__file__).parent / "families"
_NOTHING = r"(?!)"
_OF_CONTENT = re.compile(r"\{content\.(\w+)\}")


@dataclass(frozen=True, slots=True)
class Region:
    """A field of a response template: a part of an answer.

    Attributes:
        kind: CALL, REASONING or CONTENT.
        opens: a pattern; None for what is outside of other regions.
        closes: a pattern; None if it ends with its JSON, or with the answer.
        literal: of the two, those of which no further text could change a match.
        inside: what is looked for within it: a group `_close`, and a `_tag`: of JSON's structure, or up to a tag's value.
        tag: matches a tag with its value; None without tags.
        content, args, transform, each: how calls are read from its text.
        join: what is put between the texts of several such regions.
        is_json: whether it holds plain JSON, which is followed while it grows.
        is_named: whether the name of a call stands where it opens, and the arguments are all of its content.
        head: matches the JSON of a call up to its arguments; None if these are not recognized before its end.
    """

    kind: str
    opens: str | None
    closes: str | None
    literal: frozenset[str]
    inside: regex.Pattern[str]
    tag: regex.Pattern[str] | None
    content: str
    args: Mapping[str, Any]
    transform: Any
    each: bool
    join: str
    is_json: bool
    is_named: bool
    head: re.Pattern[str] | None

    @classmethod
    def of(cls, name: str, field: Mapping[str, Any]) -> Region:
        """Read a field of a response template. Raises one of ERRORS, AttributeError or regex.error if it is none."""
        kind, content, args = _KINDS.get(name, CONTENT), field.get("content", "text"), field.get("content_args", {})
        patterns = {key: _pattern(field, key) for key in ("open", "close")}
        (opens, _), (closes, _) = patterns.values()
        if odd := sorted({content} - CONTENTS.keys() | args.keys() - OPTIONS):
            raise ValueError(f"{odd[0]} is unknown")
        is_json = kind == CALL and content == "json" and not args
        tag = args["tag_pattern"] if content == "xml-inline" else None
        mark = r'["{}\[\]]' if is_json else _NOTHING if tag is None else tag.partition("(?P<value>")[0]
        function = (field.get("transform") or {"function": "{content}"})["function"] if kind == CALL else None
        return cls(
            kind=kind,
            opens=opens,
            closes=closes,
            literal=frozenset(key for key, (_, is_literal) in patterns.items() if is_literal),
            inside=regex.compile(f"(?P<_close>{closes or _NOTHING})|(?P<_tag>{mark})", regex.DOTALL),
            tag=None if tag is None else regex.compile(tag, regex.DOTALL),
            content=content,
            args=args,
            transform=field.get("transform"),
            each=field.get("transform_each", False),
            join=field.get("join") or "",
            is_json=is_json,
            is_named=function == {"name": "{name}", "arguments": "{content}"},
            head=_head(function),
        )

    def calls(self, text: str, captures: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
        """Return the names and arguments of the calls that its text holds. Raises one of ERRORS or AttributeError."""
        value = CONTENTS[self.content](text, self.args)
        scopes = [{**captures, **item} for item in value] if self.each else [{**captures, "content": value}]
        values = [transformed(self.transform or "{content}", scope) for scope in scopes]
        functions = [
            call.get("function", call)
            for value in values
            for call in (value if isinstance(value, list) else [value])
        ]
        found = [(function["name"], function.get("arguments", {})) for function in functions]
        if not all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in found):
            raise TypeError("a call has a name and an object of arguments")
        return found


def _pattern(field: Mapping[str, Any], key: str) -> tuple[str | None, bool]:
    """Return a pattern of what opens or closes a region, and whether no further text could change a match.

    Whitespace at its beginning is left out, since it is markup wherever it surrounds markup.
    """
    if (pattern := field.get(f"{key}_pattern")) is not None:
        return re.sub(r"^\\s[*+]\??", "", pattern), False
    if (given := field.get(key)) is None:
        return None, False
    literals = sorted([given] if isinstance(given, str) else given, key=len, reverse=True)
    grows = any(one != other and one.startswith(other) for one in literals for other in literals)
    return "|".join(regex.escape(literal, special_only=True) for literal in literals), not grows


def _head(function: Any) -> re.Pattern[str] | None:
    """Return `Region.head` of a call's function in a transform."""
    if function == "{content}":
        function = {"name": "{content.name}", "arguments": "{content.arguments}"}
    if not isinstance(function, dict):
        return None
    keys = [_OF_CONTENT.fullmatch(str(function.get(key))) for key in ("name", "arguments")]
    name, arguments = (key and key[1] for key in keys)
    if name is None or arguments is None:
        return None
    return re.compile(rf'\s*\{{\s*"{name}"\s*:\s*"([^"\\]+)"\s*,\s*"{arguments}"\s*:\s*')


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A response template, ready for parsers.

    Attributes:
        regions: its fields.
        openings: what is looked for outside of regions without tools, and with them: groups `_open_N` for regions, and
            `_drop` for other markup.
        anchor: matches what stands before an answer in a prompt.
        forced: how a call is written that must be made (`forced_calls.py`); None if that is unknown.
    """

    regions: tuple[Region, ...]
    openings: tuple[regex.Pattern[str], regex.Pattern[str]]
    anchor: regex.Pattern[str]
    forced: Mapping[str, Any] | None

    @classmethod
    def of(cls, template: Any, place: str, forced: Mapping[str, Any] | None = None) -> ResponseFormat:
        """Read the values of a response template. Raises ConfigError, naming its place, if it is none."""
        try:
            regions = tuple(Region.of(name, field) for name, field in template["fields"].items())
            openings = (_opening(regions, with_tools=False), _opening(regions, with_tools=True))
            anchor = regex.compile(_pattern(template, "start_anchor")[0] or _NOTHING, regex.DOTALL)
        except (*ERRORS, AttributeError, regex.error) as error:
            raise ConfigError(f"{place}: it is no response template: {error!r}. {_REMEDY}") from None
        return cls(regions, openings, anchor, forced)


def read_format(path: str | Path) -> ResponseFormat:
    """Return the format of a file, a response template or one of `families/`. Raises ConfigError if it holds none."""
    values = read_json(path, ConfigError, remedy=_REMEDY)
    if isinstance(values, dict) and "response_template" in values:
        return ResponseFormat.of(values["response_template"], str(path), values.get("forced"))
    return ResponseFormat.of(values, str(path))


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
    families = [values for values in _families() if all(mark in chat_template for mark in values["written"])]
    if not families:
        return None
    family = max(families, key=lambda values: len(values["written"]))
    template = family["response_template"]
    # <think> is text where the chat template does not write it
    fields = {
        name: field
        for name, field in template["fields"].items()
        if _KINDS.get(name) != REASONING or field.get("close", "") in chat_template or "open_pattern" in field
    }
    return ResponseFormat.of({**template, "fields": fields}, family["name"], family.get("forced"))


@cache
def _families() -> list[dict[str, Any]]:
    return [{"name": path.stem, **read_json(path, ConfigError)} for path in sorted(_FOLDER.glob("*.json"))]


def _opening(regions: Iterable[Region], *, with_tools: bool) -> regex.Pattern[str]:
    found = [(at, region) for at, region in enumerate(regions) if with_tools or region.kind != CALL]
    opens = [f"(?P<_open_{at}>{region.opens})" for at, region in found if region.opens]
    drops = [region.closes for _, region in found if region.opens is None and region.closes and with_tools]
    return regex.compile("|".join([*opens, f"(?P<_drop>{'|'.join(drops) or _NOTHING})"]), regex.DOTALL)
