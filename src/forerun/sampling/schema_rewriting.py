"""JSON schemas that allow the same as others, in keywords that llguidance holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from forerun.errors import GrammarError

FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
"""Those that llguidance holds."""
_NAMES = {
    "$defs",
    "definitions",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "properties",
}
"""Keywords of objects whose keys are names, of which none is a keyword."""
_VALUES = {"const", "default", "enum", "example", "examples"}
"""Keywords whose values hold no schemas."""
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_TYPES = frozenset(("array", "boolean", "null", "number", "object", "string"))
_TYPE_OF = {bool: "boolean", type(None): "null", str: "string", list: "array", dict: "object"}
_MOST_CHOICES = 8
"""That the keywords of one object may become: llguidance makes an object of each combination."""
_MOST_COMPARED = 10_000
"""Pairs of schemas of which it is asked whether they exclude each other."""
_DEEPEST = 12
"""Depth of these."""
_LONG = 16
"""Values of a keyword that take no longer than a pair."""
_LONG_REFERENCE = 64
"""Characters of a reference that take no longer than a pair."""
_MOST_NAMES = 256
"""Of which choices may require some and not others: each choice names all that the others require."""
_MOST_PARTS = 100_000
"""Schemas, and values in them: more take too long, and llguidance refuses fewer where it uses them."""


class _EnoughError(Exception):
    """Too many pairs were compared."""


@dataclass(slots=True)
class Work:
    """What the schemas of one request have taken: nothing interrupts it. Pairs compared, and parts seen."""

    compared: int = 0
    parts: int = 0


class Rewriter:
    """Rewrites one schema.

    What asks for nothing is left out: formats that llguidance does not know, which JSON Schema calls annotations, and
    `uniqueItems: false`. A `oneOf` whose choices exclude each other is an `anyOf`. What a property's presence asks for
    is a choice between its absence and that.

    Args:
        work: that of other schemas of the same request is counted too.

    Attributes:
        formats: those that were left out, in their order.
    """

    def __init__(self, root: Any, work: Work | None = None) -> None:
        self._root = root
        self._work = work or Work()
        self._renames = "/oneOf/" not in json.dumps(root)  # no reference leads there
        self.formats: dict[str, None] = {}

    def rewritten(self, schema: Any, *, is_names: bool = False) -> Any:
        """Return a schema, or what holds some, rewritten. is_names: the object's keys are no keywords.

        Raises:
            GrammarError: it has too many parts.
        """
        self._work.parts += 1
        if self._work.parts > _MOST_PARTS:
            raise GrammarError(f"The JSON schema has more than {_MOST_PARTS} parts. Shorten it, or leave it out.")
        if isinstance(schema, list):
            return [self.rewritten(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        if is_names:
            return {name: self.rewritten(each) for name, each in schema.items()}
        found = {}
        more: list[Any] = []
        for key, value in schema.items():
            if key == "format" and isinstance(value, str) and value not in FORMATS:
                self.formats[value] = None
            elif key in _VALUES:
                found[key] = value
            elif key in _DEPENDENCIES and (conditions := _conditions(value)) is not None:
                more += self.rewritten(conditions)
            elif key == "not" and (names := _required(value)):
                more.append(({} if "type" in value else {"type": "object"}) | _absent(names))
            elif key == "oneOf" and (choices := self._choices(schema, value)) is not None:
                more.append({"anyOf": self.rewritten(choices)})
            elif key != "uniqueItems" or value is not False:
                found[key] = self.rewritten(value, is_names=key in _NAMES)
        if more:
            all_of = found.pop("allOf", [])
            found["allOf"] = [*all_of, *more] if isinstance(all_of, list) else all_of
        return found

    def _choices(self, schema: dict[str, Any], choices: Any) -> list[Any] | None:
        """Return the choices of an `anyOf` that allows the same as a schema's `oneOf`; None where that is not seen."""
        if not isinstance(choices, list) or not choices or not self._renames:
            return None
        known = {key: schema[key] for key in ("type",) if key in schema}
        typed = [known | each if isinstance(each, dict) and "$ref" not in each else each for each in choices]
        with suppress(_EnoughError):
            if all(self._exclude(*pair) for pair in combinations(typed, 2)):
                return choices
        if len(choices) > _MOST_CHOICES // 2:
            return None
        required = [_required(each) for each in choices]
        if not all(required) or sum(map(len, required)) > _MOST_NAMES:
            return None
        if sum("type" not in each for each in choices) == 1 and schema.get("type") != "object":
            return None  # what is no object fits that one
        made = []
        for place, names in enumerate(required):
            others = [set(other) - set(names) for at, other in enumerate(required) if at != place]
            if all(others):
                absent = [_absent(sorted(other)) for other in others]
                made.append({"type": "object", "required": names, "allOf": absent})
        return made or None

    def _exclude(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return whether it is seen that nothing fits both of two schemas. Raises _EnoughError."""
        self._spend(1)
        if depth > _DEEPEST:
            return False
        one = self._resolved(one)
        other = self._resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        lists = (each.get(key) for each in (one, other) for key in ("enum", "required", "type"))
        self._spend(sum(len(each) for each in lists if isinstance(each, list)) // _LONG)
        types = _types(one) & _types(other)
        values = _values(one)
        others = _values(other)
        if not types or (values is not None and others is not None and values.isdisjoint(others)):
            return True
        for each, second in ((one, other), (other, one)):
            for key, enough in (("anyOf", all), ("oneOf", all), ("allOf", any)):
                parts = each.get(key)
                if (
                    isinstance(parts, list)
                    and parts
                    and enough(self._exclude(part, second, depth + 1) for part in parts)
                ):
                    return True
        names = {*_names(one), *_names(other)} if types == {"object"} else ()
        return any(self._exclude(_property(one, name), _property(other, name), depth + 1) for name in names)

    def _spend(self, pairs: int) -> None:
        self._work.compared += pairs
        if self._work.compared > _MOST_COMPARED:
            raise _EnoughError

    def _resolved(self, schema: Any) -> Any:
        """Return what a reference leads to; True, which allows anything, if that is not clear."""
        for _ in range(_DEEPEST):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            reference = schema["$ref"]
            if not isinstance(reference, str):
                return True
            self._spend(len(reference) // _LONG_REFERENCE)
            first, *path = reference.split("/")
            schema = self._root if first == "#" else True
            for each in path:
                schema = schema.get(each, True) if isinstance(schema, dict) else True
        return True


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows; an integer is a number."""
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    types = _TYPES  # where none are given, or what is no type
    if isinstance(names, list) and all(isinstance(each, str) for each in names):
        types = frozenset("number" if each == "integer" else each for each in names)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types &= {_TYPE_OF.get(type(each), "number") for each in values}
    return types


def _values(schema: dict[str, Any]) -> frozenset[Any] | None:
    """Return all values that a schema allows, by type; None if they are not listed, or no scalars."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(each, (list, dict)) for each in values):
        return None
    return frozenset(map(_scalar, values))


def _scalar(value: Any) -> Any:
    """Return what is the same for the same value. Of numbers it is text, since their hashes can be made to collide."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return (value,)
    with suppress(OverflowError):
        return repr(float(value) + 0.0)  # 0.0 for -0.0
    return repr(math.inf if value > 0 else -math.inf)


def _names(schema: dict[str, Any]) -> Iterable[str]:
    required = schema.get("required")
    return [each for each in required if isinstance(each, str)] if isinstance(required, list) else ()


def _property(schema: dict[str, Any], name: str) -> Any:
    """Return a schema that the values of a property must fit."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))


def _required(schema: Any) -> list[str]:
    """Return the properties that a schema requires, if that is all that it asks for."""
    if not isinstance(schema, dict) or schema.keys() - {"required", "type"} or schema.get("type", "object") != "object":
        return []
    names = schema.get("required")
    return names if isinstance(names, list) and all(isinstance(each, str) for each in names) else []


def _absent(names: list[str]) -> dict[str, Any]:
    """Return what an object without one of these properties fits."""
    absent = [{"properties": {name: False}} for name in names]
    return absent[0] if len(absent) == 1 else {"anyOf": absent}


def _conditions(dependencies: Any) -> list[Any] | None:
    """Return what dependencies ask for, as schemas of which each must fit; None if they are too many, or none."""
    if not isinstance(dependencies, dict) or 2 ** len(dependencies) > _MOST_CHOICES:
        return None
    made = []
    for name, each in dependencies.items():
        asked = [{"required": [name, *each]}] if isinstance(each, list) else [{"required": [name]}, each]
        made.append({"anyOf": [_absent([name]), {"allOf": asked}]})
    return made
