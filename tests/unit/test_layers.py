"""Imports go down only. docs/structure.md draws the layers; this test reads the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.utils.deferred import HANDED_IN

SRC = Path(__file__).parents[2] / "src" / "forerun"
LAYERS = (
    ("errors", "config", "types", "utils"),
    ("kernels",),
    ("sampling", "verification", "chat"),
    ("speculation", "kv_cache"),
    ("models",),
    ("drafters",),
    ("engine",),
    ("server", "train", "export"),
    ("adaptation",),
    ("integrations", "lab"),
    ("cli",),
)
"""The packages and modules of the top level, the lowest first."""
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}
SEPARATE = ("train", "export", "lab")
"""Packages that must not import each other, wherever they lie."""


def imports(source: str, package: str) -> Iterator[str]:
    """Yield the dotted names that a module of `package` imports, relative ones resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def violations(source: str, package: str) -> list[str]:
    """Return why a module of `package` (such as "forerun.engine") may not be written so; empty when it may."""
    here = package.split(".")[1]
    found = []
    for name in imports(source, package):
        parts = name.split(".")
        if parts[0] != "forerun" or len(parts) < 2 or name == "forerun.__version__":
            continue
        other = parts[1]
        if other not in LAYER_OF:
            found.append(f"{name}: import it from its own package, not from the facade")
        elif LAYER_OF[other] > LAYER_OF[here]:
            found.append(f"{name}: {other} lies above {here}")
        elif other != here and other in SEPARATE and here in SEPARATE:
            found.append(f"{name}: {here} and {other} do not import each other")
    return found


def test_every_entry_of_the_top_level_has_a_layer() -> None:
    entries = {path.relative_to(SRC).parts[0].removesuffix(".py") for path in SRC.rglob("*.py")}
    assert entries - {"__init__", "__main__"} == LAYER_OF.keys()


def test_imports_go_down() -> None:
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).parts
        if parts[0].startswith("__"):
            continue
        package = ".".join(["forerun", *parts[:-1]]) if parts[:-1] else f"forerun.{path.stem}"
        if wrong := violations(path.read_text(encoding="utf-8"), package):
            found[path.relative_to(SRC).as_posix()] = wrong
    assert found == {}


TRITON = (
    "forerun.kernels.triton",
    *(f"forerun.models.fused.{name}" for name in ("triton", "triton_backend", "triton_layers", "cuda_graphs")),
)
"""What has not yet run on a GPU: these modules compute by Triton kernels."""


def test_one_line_finds_the_triton_kernels() -> None:
    finding = []
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(["forerun", *parts])
        if name.startswith(TRITON):
            continue
        source = path.read_text(encoding="utf-8")
        imported = list(imports(source, ".".join(["forerun", *parts[:-1]])))
        assert not any(each.startswith((*TRITON, "triton")) for each in imported), name
        finding += [name] * sum(source.count(f'"{module}') for module in TRITON[:2])
    assert finding == ["forerun.models.decoders"]


def test_one_package_is_handed_to_those_below_it() -> None:
    assert HANDED_IN.keys() == {"adaptation"}


def test_what_all_models_that_draft_share_knows_no_kind_of_head() -> None:
    drafters = SRC / "drafters"
    shared = [drafters / "model_drafter.py", drafters / "models/base.py", *(drafters / "models/heads").glob("*.py")]
    kinds = {f"forerun.drafters.models.{kind}" for kind in ("eagle", "block", "medusa", "mtp", "head_files")}
    found = {}
    for path in shared:
        names = imports(path.read_text(encoding="utf-8"), "forerun.drafters")
        found[path.name] = [name for name in names if ".".join(name.split(".")[:4]) in kinds]
    assert len(found) > 6 and not any(found.values()), found


def test_the_core_does_not_load_train_and_lab() -> None:
    """What `LLM` and the server import, all of the core's modules, holds nothing of train and lab."""
    apart = ("forerun.train", "forerun.lab", "forerun.cli", "forerun.integrations", "forerun.adaptation")
    names = [".".join(path.relative_to(SRC.parent).with_suffix("").parts) for path in sorted(SRC.rglob("*.py"))]
    core = [
        name.removesuffix(".__init__")
        for name in names
        if not (name.startswith(apart) or "triton" in name or "__main__" in name)
    ]
    code = "import sys, importlib\n"
    code += "for name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "print([name for name in sys.modules if name.startswith(('forerun.train', 'forerun.lab'))])"
    done = subprocess.run([sys.executable, "-c", code, *core], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("forerun.verification", "from forerun.engine import LLM"),
        ("forerun.verification", "import forerun.models.base"),
        ("forerun.models.fused", "from ...drafters import registry"),
        ("forerun.config", "def f():\n    from forerun.sampling import noise"),
        ("forerun.lab", "from forerun.train import loop"),
        ("forerun.train", "from forerun import lab"),
        ("forerun.lab", "from forerun import LLM"),
    ],
)
def test_a_climb_is_seen(package: str, source: str) -> None:
    assert violations(source, package)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("forerun.engine", "from forerun.verification import lossy"),
        ("forerun.lab", "from .measure import median\nfrom forerun.engine import LLM"),
        ("forerun.cli", "from forerun import __version__\nimport torch"),
    ],
)
def test_a_descent_is_allowed(package: str, source: str) -> None:
    assert violations(source, package) == []
