"""Read the C interface from a header, so that ctypes has each structure, function and number as C++ has it.

A header consists of enumerations with their numbers, structures, functions and comments behind `//`. The types are
int32_t, int64_t, float, structures, and pointers. An enumeration may include a file of rows FORMAT(NAME, number, ...),
which stand for FORERUN_NAME = number. Anything else raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeVar

_NUMBERS: dict[str, Any] = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float, "void": None}
_INCLUDED = re.compile(r"#define FORMAT\(name, number, \.\.\.\) FORERUN_##name = number,\n#include \"(\w+\.h)\"\n")
_ROW = re.compile(r"FORMAT\((\w+), (\d+),[^()]*\)")

# Of a header without comments, whose words are one space apart.
_VARIABLE = r"(?:const )?\w+(?:\* | \*?)\w+"
_CONSTANT = r"#define (\w+) (\d+)"
_MEMBER = r" FORERUN_(\w+) = (\d+)"
_ENUM = rf"enum (\w+) : int32_t \{{((?:{_MEMBER},?)+) \}};"
_STRUCTURE = rf"struct (\w+) \{{((?: {_VARIABLE}(?:, \*?\w+)*;)+) \}};"
_FUNCTION = rf"(void|int32_t|int64_t) (\w+)\(((?:{_VARIABLE}(?:, {_VARIABLE})*|void))\);"
_ALL = re.compile(rf'{_CONSTANT}|{_ENUM}|{_STRUCTURE}|{_FUNCTION}|#pragma once|#include <\w+>|extern "C" \{{|\}}$')
_S = TypeVar("_S", bound=Structure)


class Header:
    """The parts of a header.

    Attributes:
        constants: by name, what #define gives.
        enums: by name of the enumeration, the numbers by name without FORERUN_.
        fields: by name of the structure, the name and type of each field; pointers end with "*".
        functions: by name, the type of the result, and names and types of the arguments.

    Raises:
        ValueError: there is something in it that this class does not read.
    """

    def __init__(self, text: str) -> None:
        text = " ".join(re.sub(r"//.*", "", text).split())
        if rest := _ALL.sub("", text).strip():
            raise ValueError(f"this part of the header is not understood: {rest[:80]!r}")
        self.constants = {name: int(number) for name, number in re.findall(_CONSTANT, text)}
        self.enums = {
            name: {member: int(number) for member, number in re.findall(_MEMBER, body)}
            for name, body, *_ in re.findall(_ENUM, text)
        }
        self.fields = {
            name: [variable for declaration in body.split(";")[:-1] for variable in _variables(declaration)]
            for name, body in re.findall(_STRUCTURE, text)
        }
        self.functions = {
            name: (result, [_variables(each)[0] for each in arguments.split(",") if each != "void"])
            for result, name, arguments in re.findall(_FUNCTION, text)
        }
        self._classes = dict[str, type[Structure]]()

    @classmethod
    def read(cls, path: Path) -> Header:
        """Read a header and what its enumerations include.

        Raises:
            OSError: a file cannot be read.
            ValueError: there is something in it that this class does not read.
        """

        def included(found: re.Match[str]) -> str:
            text = (path.parent / found[1]).read_text(encoding="utf-8")
            return _ROW.sub(r"FORERUN_\1 = \2,", text).replace("#undef FORMAT", "")

        return cls(_INCLUDED.sub(included, path.read_text(encoding="utf-8")))

    def structure(self, name: str) -> Callable[[type[_S]], type[_S]]:
        """Return a decorator that gives a class the fields of a structure. Those of structures in it come before."""

        def decorate(cls: type[_S]) -> type[_S]:
            cls._fields_ = [(field, c_void_p if "*" in kind else self._type(kind)) for field, kind in self.fields[name]]
            self._classes[name] = cls
            return cls

        return decorate

    def signatures(self) -> dict[str, tuple[Any, list[Any]]]:
        """Return ctypes' types of the result and of the arguments of each function. The structures come before."""
        return {
            name: (_NUMBERS[result], [self._type(kind) for _, kind in arguments])
            for name, (result, arguments) in self.functions.items()
        }

    def _type(self, kind: str) -> Any:
        types = _NUMBERS | self._classes
        if kind.endswith("*"):
            return POINTER(types[kind[:-1]]) if kind[:-1] in self._classes else c_void_p
        if kind not in types:
            raise ValueError(f"{kind} is no type that the header may have here")
        return types[kind]


def _variables(declaration: str) -> list[tuple[str, str]]:
    """Return names and types: of "const float *a, *b", two pointers."""
    kind, names = re.findall(r"^ ?(?:const )?(\w+)(.*)", declaration)[0]
    return [(name.strip(" *"), kind + "*" * name.count("*")) for name in names.split(",")]
