"""JSON schemas that allow the same as others, in keywords that llguidance holds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import combinations
from typing import Any

FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
"""Those that llguidance holds."""
_NAMES = {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
"""Keywords of objects whose keys are names, of which none is a keyword."""
_VALUES = {"const", "default", "enum", "example", "examples"}
"""Keywords whose values hold no schemas."""
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_TYPES = frozenset(("array", "boolean", "null", "number", "object", "string"))
_TYPE_OF = {bool: "boolean", type(None): "null", str: "string", list: "array", dict: "object"}
_MOST_CHOICES = 8
"""That the keywords of one object may become: llguidance makes an object of each combination."""
_MOST_COMPARED, _DEEPEST = 10_000, 12
"""Pairs of schemas of which it is asked whether they exclude each other, and their depth."""


class Rewriter:
    """Rewrites one schema.

    What asks for nothing is left out: formats that llguidance does not know, which JSON Schema calls annotations, and
    `uniqueItems: false`. A `oneOf` whose choices exclude each other is an `anyOf`. What a property's presence asks for
    is a choice between its absence and that.

    Attributes:
        formats: those that were left out, in their order.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._compared = 0
        self._renames = "/oneOf/" not in json.dumps(root)  # no reference leads there
        self.formats: dict[str, None] = {}

    def rewritten(self, schema: Any, *, is_names: bool = False) -> Any:
        """Return a schema, or what holds some, rewritten. is_names: the object's keys are no keywords."""
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
                more.append({"type": "object", **_absent(names)})
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
        if all(self._exclude(*pair) for pair in combinations(typed, 2)):
            return choices
        required = [_required(each) for each in choices]
        if len(required) > _MOST_CHOICES // 2 or not all(required):
            return None
        made = []
        for names in required:
            others = [set(other) - set(names) for other in required if other is not names]
            if all(others):
                absent = [_absent(sorted(other)) for other in others]
                made.append({"type": "object", "required": names, "allOf": absent})
        return made or None

    def _exclude(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return whether it is seen that nothing fits both of two schemas."""
        self._compared += 1
        if self._compared > _MOST_COMPARED or depth > _DEEPEST:
            return False
        one = self._resolved(one)
        other = self._resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
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

    def _resolved(self, schema: Any) -> Any:
        """Return what a reference leads to; True, which allows anything, if that is not clear."""
        for _ in range(_DEEPEST):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            first, *path = str(schema["$ref"]).split("/")
            schema = self._root if first == "#" else True
            for each in path:
                schema = schema.get(each, True) if isinstance(schema, dict) else True
        return True


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows; an integer is a number."""
    given = schema.get("type", [*_TYPES])
    types = frozenset(
        "number" if each == "integer" else str(each) for each in ([given] if isinstance(given, str) else given)
    )
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types &= {_TYPE_OF.get(type(each), "number") for each in values}
    return types


def _values(schema: dict[str, Any]) -> frozenset[Any] | None:
    """Return all values that a schema allows, by type; None if they are not listed, or no scalars."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(each, (list, dict)) for each in values):
        return None
    return frozenset((isinstance(each, bool), each) for each in values)


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
