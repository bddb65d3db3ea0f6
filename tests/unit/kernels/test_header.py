"""The structures that Python reads from the kernels' header are those that the compiler makes of it."""

from __future__ import annotations

import re
import subprocess
from ctypes import c_float, sizeof
from pathlib import Path

import pytest

from forerun.kernels.block_weight import BLOCK_TYPES
from forerun.kernels.cpu import library
from forerun.kernels.cpu.compiler import SOURCES
from forerun.kernels.cpu.header import Header
from forerun.kernels.cpu.library import HEADER, WEIGHT_KINDS

from .conftest import compiled_program

STRUCTURES = {name: getattr(library, f"{name.removeprefix('Forerun')}Struct") for name in HEADER.fields}


def test_offsets_sizes_and_numbers_are_those_of_the_compiler(tmp_path: Path) -> None:
    lines = [f'show("{name}", sizeof({name}), 0, false);' for name in STRUCTURES]
    expected = [f"{name} {sizeof(cls)} 0 0" for name, cls in STRUCTURES.items()]
    for name, cls in STRUCTURES.items():
        for field, kind in cls._fields_:
            place, what = getattr(cls, field), f"{name}::{field}"
            lines.append(f'show("{what}", sizeof({what}), offsetof({name}, {field}), is_float<decltype({what})>);')
            expected.append(f"{what} {place.size} {place.offset} {int(kind is c_float)}")
    for enum, members in HEADER.enums.items():
        for member, number in members.items():
            lines.append(f'show("{enum} {member}", FORERUN_{member}, 0, false);')
            expected.append(f"{enum} {member} {number} 0 0")
    program = (
        '#include "forerun.h"\n#include <cstddef>\n#include <cstdio>\n#include <type_traits>\n'
        "template <class T> constexpr bool is_float = std::is_floating_point<T>::value;\n"
        "void show(const char* name, size_t size, size_t at, bool real) "
        '{ printf("%s %zu %zu %d\\n", name, size, at, real); }\n'
        f"int main() {{\n{chr(10).join(lines)}\n}}\n"
    )
    shown = subprocess.run(
        [compiled_program(tmp_path, program)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert shown.splitlines() == expected


def test_every_declaration_of_the_header_is_read() -> None:
    text = (SOURCES / "forerun.h").read_text()
    assert text.count("\nstruct ") == len(HEADER.fields)
    assert text.count("\nenum ") == len(HEADER.enums)
    assert len(re.findall(r" forerun_\w+\(", text)) == len(HEADER.functions)
    assert WEIGHT_KINDS["FLOAT32"] == 0
    assert {form.layout or form.name for form in BLOCK_TYPES.values()} <= set(WEIGHT_KINDS)


def test_what_a_header_may_have() -> None:
    header = Header(
        "struct Inner { int32_t a; };  // why\nstruct Outer { const float *b, *c; Inner inner; float* d, e; };\n"
        "enum Kind : int32_t { FORERUN_A = 0, FORERUN_B = 7, };\n#define ABI 3\nvoid f(const Inner* x, int64_t n);"
    )
    assert header.fields["Outer"] == [
        ("b", "float*"),
        ("c", "float*"),
        ("inner", "Inner"),
        ("d", "float*"),
        ("e", "float"),
    ]
    assert header.enums == {"Kind": {"A": 0, "B": 7}}
    assert header.constants == {"ABI": 3}
    assert header.functions == {"f": ("void", [("x", "Inner*"), ("n", "int64_t")])}


@pytest.mark.parametrize(
    "text",
    [
        "struct A { int32_t x[4]; };",
        "struct A { int32_t x : 3; };",
        "struct A { unsigned int x; };",
        "struct A { float** x; };",
        "struct A { union { int32_t x; float y; }; };",
        "struct A : B { int32_t x; };",
        "typedef int32_t A;",
        "enum A : int32_t { X, Y };",
        "enum A { X = 1 };",
        "double f(int32_t x);",
        "int32_t f(int32_t);",
    ],
)
def test_what_is_not_understood_raises(text: str) -> None:
    with pytest.raises(ValueError):
        Header(text)


@pytest.mark.parametrize("text", ["struct A { double x; };", "struct A { Other x; };", "struct A { uint8_t x; };"])
def test_unknown_types_raise(text: str) -> None:
    with pytest.raises(ValueError, match="no type"):
        Header(text).structure("A")(type("A", (library.Structure,), {}))
