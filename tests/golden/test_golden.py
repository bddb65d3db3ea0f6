"""What the kernels are given, and what models and drafters say, is what the golden files have."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import version

import pytest

from forerun.kernels.cpu import native
from golden import names
from golden.processor import BITS, compared_with
from golden.texts import FOLDER, TEXTS, VERSIONS

_WRITE = "If the change is meant: PYTHONPATH=src:tests python -m golden.make"


def _known(text: str, other: str) -> list[str]:
    """Return the lines of a text but for digests of which the other has none, those of another processor."""
    keys = {line.partition(" = ")[0] for line in other.splitlines()}
    lines = text.splitlines()
    return [line for line in lines if not line.startswith(BITS) or line.partition(" = ")[0] in keys]


SLOW = ("formats/published",)


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in TEXTS])
def test_the_text_is_that_of_the_file(name: str) -> None:
    if name != "options":
        if native() is None:
            pytest.skip("there are no native kernels: the first lines of this run say why")
        _skip_other_versions()
    expected = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    with compared_with(expected):
        found = TEXTS[name]()
    before, after = _known(expected, found), _known(found, expected)
    difference = list(difflib.unified_diff(before, after, "file", "now", lineterm="", n=2))
    assert not difference, "\n".join([*difference, f"{_WRITE} {name}"])


def _skip_other_versions() -> None:
    """Skip the test where Transformers' families are of another version than the files."""
    for line in (FOLDER / "versions.txt").read_text(encoding="utf-8").splitlines():
        package, _, written = line.partition(" ")
        if version(package).split(".")[:2] != written.split(".")[:2]:
            pytest.skip(f"the files are of {package} {written}")


def test_every_file_is_made() -> None:
    there = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.txt")}
    assert there == {*TEXTS, VERSIONS}


def test_names_are_those_of_today() -> None:
    structures: Mapping[str, object] = {
        "model": names.MODEL,
        "layer": names.LAYER,
        "recurrence": names.RECURRENCE,
        "experts": names.EXPERTS,
        "latent": names.LATENT,
        "linear": names.LINEAR,
    }
    for old, new in names.RENAMED.items():
        of, _, name = new.partition(".")
        assert old.partition(".")[0] == of
        assert of not in structures or hasattr(structures[of], name), new
