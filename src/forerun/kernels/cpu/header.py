"""Read the C interface from a header, so that ctypes has each structure, function and number as C++ has it.

A header consists of enumerations with their numbers, structures, functions and comments behind `//`. The types are
int32_t, int64_t, float, structures, and pointers. Anything else raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, TypeVar

_NUMBERS: dict[str, Any] = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float}
_PART = re.compile(
    r"""(?: \#pragma\ once | \#include\ <\w+> | extern\ "C"\ \{ | \}
    | \#define\ (?P<constant>\w+)\ (?P<value>\d+)
    | enum\ (?P<enum>\w+)\ :\ int32_t\ \{ (?P<members>[^{}]*) \};
    | struct\ (?P<struct>\w+)\ \{ (?P<fields>[^{}]*) \};
    | (?P<result>void|int32_t|int64_t)\ (?P<function>\w+)\( (?P<arguments>[^()]*) \);
    )\s*""",
    re.VERBOSE,
)
_VARIABLE = re.compile(r"(?:const )?(?P<type>\w+) ?(?P<pointer>\*?) ?\b(?P<name>\w+)")
_S = TypeVar("_S", bound=Structure)


class Header:
    """The parts of a header.

    Attributes:
        constants: by name, what #define gives.
        enums: by name of the enumeration, the numbers by name without FORERUN_.
        fields: by name of the structure, the name and type of each field; "*" is any pointer.
        functions: by name, the type of the result and those of the arguments; pointers end with "*".

    Raises:
        ValueError: there is something in it that this class does not read.
    """

    def __init__(self, text: str) -> None:
        self.constants = dict[str, int]()
        self.enums = dict[str, dict[str, int]]()
        self.fields = dict[str, list[tuple[str, str]]]()
        self.functions = dict[str, tuple[str, list[str]]]()
        self._classes = dict[str, type[Structure]]()
        rest = re.sub(r"//.*", "", text).strip()
        while rest:
            if (found := _PART.match(rest)) is None:
                raise ValueError(f"this part of the header is not understood: {rest[:80]!r}")
            self._add(found)
            rest = rest[found.end() :]

    def _add(self, part: re.Match[str]) -> None:
        if name := part["constant"]:
            self.constants[name] = int(part["value"])
        elif name := part["enum"]:
            members = [each.split(" = ") for each in _split(part["members"], ",")]
            self.enums[name] = {member.removeprefix("FORERUN_"): int(number) for member, number in members}
        elif name := part["struct"]:
            declared = [each for declaration in _split(part["fields"], ";") for each in _variables(declaration)]
            self.fields[name] = [(field, "*" if kind.endswith("*") else kind) for field, kind in declared]
        elif name := part["function"]:
            arguments = [] if part["arguments"] == "void" else _split(part["arguments"], ",")
            self.functions[name] = part["result"], [_variables(each)[0][1] for each in arguments]

    def structure(self, name: str) -> Callable[[type[_S]], type[_S]]:
        """Return a decorator that gives a class the fields of a structure. Those of structures in it come before."""

        def decorate(cls: type[_S]) -> type[_S]:
            cls._fields_ = [(field, c_void_p if kind == "*" else self._type(kind)) for field, kind in self.fields[name]]
            self._classes[name] = cls
            return cls

        return decorate

    def signatures(self) -> dict[str, tuple[Any, list[Any]]]:
        """Return ctypes' types of the result and of the arguments of each function."""
        return {
            name: (None if result == "void" else self._type(result), [self._argument(each) for each in arguments])
            for name, (result, arguments) in self.functions.items()
        }

    def _argument(self, kind: str) -> Any:
        if not kind.endswith("*"):
            return self._type(kind)
        structure = self._classes.get(kind.removesuffix("*"))
        return c_void_p if structure is None else POINTER(structure)

    def _type(self, kind: str) -> Any:
        found = _NUMBERS.get(kind) or self._classes.get(kind)
        if found is None:
            raise ValueError(f"{kind} is no type that the header may have here")
        return found


def _split(text: str, separator: str) -> list[str]:
    """Return what stands between separators, with single spaces. The last may be followed by one, too."""
    parts = [" ".join(part.split()) for part in text.split(separator)]
    return parts if parts[-1] else parts[:-1]


def _variables(declaration: str) -> list[tuple[str, str]]:
    """Return names and types: of "const float *a, *b", two pointers."""
    first, *others = _split(declaration, ",")
    found = [_VARIABLE.fullmatch(first)]
    found += [_VARIABLE.fullmatch(f"{found[0]['type']} {other}") for other in others if found[0]]
    if not all(found):
        raise ValueError(f"this declaration is not understood: {declaration!r}")
    return [(each["name"], each["type"] + each["pointer"]) for each in found if each]
