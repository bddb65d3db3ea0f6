"""Imports go down only. docs/design.md draws the floors; this test reads the imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "forerun"
FLOORS = {
    "errors": 0,
    "files": 0,
    "tree": 0,
    "fields": 0,
    "grammar": 0,
    "constraints": 0,
    "device": 0,
    "device_errors": 0,
    "option_values": 0,
    "config": 0,
    "types": 0,
    "caches": 0,
    "workloads": 0,
    "home": 0,
    "processor": 0,
    "machine_memory": 0,
    "sampling": 1,
    "verify": 1,
    "kernels": 1,
    "policy": 1,
    "fetch": 1,
    "cache": 2,
    "retrieval": 2,
    "vocabulary": 2,
    "heads": 2,
    "results": 2,
    "traffic": 2,
    "gguf_format": 2,
    "guidance": 2,
    "models": 3,
    "drafters": 4,
    "engine": 5,
    "plan": 5,
    "openai_format": 6,
    "server": 6,
    "batch": 6,
    "train": 6,
    "bench": 6,
    "export": 6,
    "audit": 6,
    "integrations": 6,
    "tune": 7,
    "cluster": 7,
    "cli": 8,
}
SEPARATE = ("server", "batch", "train", "bench", "export", "audit", "integrations")
"""Rooms of one floor that must not import each other."""


def imports(source: str, package: str) -> Iterator[str]:
    """The dotted names that a module of `package` imports, relative ones resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def violations(source: str, package: str) -> list[str]:
    """Why a module of `package` (such as "forerun.verify") may not be written so; empty when it may."""
    room = package.split(".")[1]
    found = []
    for name in imports(source, package):
        parts = name.split(".")
        if parts[0] != "forerun" or len(parts) < 2:
            continue
        other = parts[1]
        if other not in FLOORS:
            if name == "forerun.__version__":
                continue
            found.append(f"{name}: import it from its own room, not from the facade")
        elif FLOORS[other] > FLOORS[room]:
            found.append(f"{name}: floor {FLOORS[other]} is above floor {FLOORS[room]} of {room}")
        elif other != room and other in SEPARATE and room in SEPARATE:
            found.append(f"{name}: {room} and {other} do not import each other")
    return found


def modules() -> list[Path]:
    return sorted(path for path in SRC.rglob("*.py") if path.parent != SRC or path.stem in FLOORS)


def test_every_room_has_a_floor() -> None:
    rooms = {path.relative_to(SRC).parts[0].removesuffix(".py") for path in SRC.rglob("*.py")}
    assert rooms - {"__init__", "__main__"} <= FLOORS.keys()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_imports_go_down(path: Path) -> None:
    package = ".".join(["forerun", *path.relative_to(SRC).parts[:-1]])
    if path.parent == SRC:
        package = f"forerun.{path.stem}"
    assert violations(path.read_text(encoding="utf-8"), package) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("forerun.verify", "from forerun.engine import LLM"),
        ("forerun.verify", "import forerun.models.load"),
        ("forerun.models.nn", "from ...drafters import table"),
        ("forerun.config", "def f():\n    from forerun.sampling import noise"),
        ("forerun.bench", "from forerun.train import loop"),
        ("forerun.train", "from forerun import bench"),
        ("forerun.bench", "from forerun import LLM"),
    ],
)
def test_a_climb_is_seen(room: str, source: str) -> None:
    assert violations(source, room)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("forerun.engine", "from forerun.verify import walk"),
        ("forerun.bench", "from .measure import median\nfrom forerun.engine import LLM"),
        ("forerun.cli", "from forerun import __version__\nimport torch"),
    ],
)
def test_a_descent_is_allowed(room: str, source: str) -> None:
    assert violations(source, room) == []
