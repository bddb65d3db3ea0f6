"""The options of drafters with type, default and help, read from their source: importing it would load PyTorch."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from forerun.config import AUTO, MAX_NUM_DRAFT_TOKENS
from forerun.drafters.parse_text import K_OPTION, option_types
from forerun.drafters.registry import DrafterRow

_ROOT = Path(__file__).parents[2]
_TYPES = ("bool", "int", "float", "str")


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """One option that a text may set: NAME:key=value.

    Attributes:
        type: "bool", "int", "float" or "str".
        default: of the constructor; None leaves the choice to the drafter.
        help: what it does, and its range.
    """

    name: str
    type: str
    default: Any
    help: str


_K = DrafterOption(
    K_OPTION, "int", AUTO, f"K, at most this many tokens are drafted in a step, or {AUTO} (0..{MAX_NUM_DRAFT_TOKENS})."
)


def drafter_options(row: DrafterRow) -> list[DrafterOption]:
    """Return the options of a drafter in the constructor's order, and K, which every drafter has."""
    made = next(
        node for node in _parsed(row.module).body if isinstance(node, ast.ClassDef) and node.name == row.class_name
    )
    module, init = _constructor(row.module, row.class_name)
    texts = _helps(ast.get_docstring(made) or "")
    options = []
    for argument, default in [] if init is None else _arguments(init):
        if types := [name for name in _union(argument.annotation) if name in _TYPES]:
            help_text = texts.get(argument.arg, "")
            options.append(DrafterOption(argument.arg, types[0], _value(default, module), help_text))
    return [*options, _K]


def class_options(made: type) -> list[DrafterOption]:
    """Return the same of a class that has been imported."""
    taken = inspect.signature(made).parameters
    texts = _helps(inspect.getdoc(made) or "")
    types = option_types(made).items()
    return [*(DrafterOption(key, kind.__name__, taken[key].default, texts.get(key, "")) for key, kind in types), _K]


def _constructor(module: str, name: str) -> tuple[str, ast.FunctionDef | None]:
    """Return the constructor of a class, which may be that of a base, and the module in which it stands."""
    body = _parsed(module).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        homes = {alias.name: node.module for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
        home = homes.get(name) or ""
        return _constructor(home, name) if home.startswith("forerun.drafters.") else (module, None)
    functions = (node for node in classes[name].body if isinstance(node, ast.FunctionDef))
    if (init := next((node for node in functions if node.name == "__init__"), None)) is not None:
        return module, init
    bases = [_constructor(module, base.id) for base in classes[name].bases if isinstance(base, ast.Name)]
    return next((found for found in bases if found[1] is not None), (module, None))


@cache
def _parsed(module: str) -> ast.Module:
    return ast.parse((_ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))


def _arguments(init: ast.FunctionDef) -> list[tuple[ast.arg, ast.expr | None]]:
    """Return the arguments after `self`, each with its default."""
    named = init.args.args[1:]
    before: list[ast.expr | None] = [None] * (len(named) - len(init.args.defaults))
    by_keyword = zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    return [*zip(named, [*before, *init.args.defaults], strict=True), *by_keyword]


def _union(annotation: ast.expr | None) -> list[str]:
    """Return the names of the types in X | Y | Z."""
    if isinstance(annotation, ast.BinOp):
        return [*_union(annotation.left), *_union(annotation.right)]
    return [annotation.id] if isinstance(annotation, ast.Name) else []


def _value(node: ast.expr | None, module: str) -> Any:
    """Return the value of a constant, of the name of a constant, or of an entry of one."""
    if isinstance(node, ast.Name):
        return _named(node.id, module)
    if isinstance(node, ast.Subscript):
        return _value(node.value, module)[ast.literal_eval(node.slice)]
    return None if node is None else ast.literal_eval(node)


def _named(name: str, module: str) -> Any:
    """Return the constant of this name in a module, which may import it from another module of forerun."""
    for node in _parsed(module).body:
        targets: list[ast.expr] = (
            node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", ast.expr())]
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return _value(getattr(node, "value", None), module)
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _named(name, node.module)
    raise LookupError(f"{module} has no constant {name}")


def _helps(docstring: str) -> Mapping[str, str]:
    """Return the descriptions under "Args:" by argument; several names before one colon share it."""
    texts: dict[str, str] = {}
    names: list[str] = []
    _, _, section = docstring.partition("Args:\n")
    for line in section.splitlines():
        if not line.startswith("    "):
            break
        if found := re.match(r"    ([\w, ]+): (.*)", line):
            names = found[1].split(", ")
            texts |= dict.fromkeys(names, found[2])
        else:
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts
