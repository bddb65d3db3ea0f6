"""Drafters of other packages: by module and class, and by entry point."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forerun.drafters import Hybrid, Suffix, build_drafter
from forerun.drafters.third_party import installed_drafters, named_module
from forerun.errors import DrafterError

SOURCE = """
from forerun.drafters.lookup.suffix import Suffix

class Theirs(Suffix):
    def __init__(self, width: int = 1):
        super().__init__()
        self.width = width

class Other:
    pass
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a module theirs.drafting, and the metadata of an installed package that declares it."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "drafting.py").write_text(SOURCE)
    (tmp_path / "theirs" / "broken.py").write_text("import nothing_of_this_name")
    facts = tmp_path / "theirs-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[forerun.drafters]\nwide = theirs.drafting:Theirs\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("theirs")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", ["theirs.drafting:Theirs", "wide"])
def test_a_class_of_another_package(name: str) -> None:
    drafter, k = build_drafter(name)
    assert type(drafter).__name__ == "Theirs" and isinstance(drafter, Suffix) and k is None
    drafter, k = build_drafter(f"{name}:width=3,num_draft_tokens=4")
    assert vars(drafter)["width"] == 3 and k == 4
    assert isinstance(build_drafter(f"hybrid:sources=prompt-lookup+{name}")[0], Hybrid)
    with pytest.raises(DrafterError, match="has no option 'height'"):
        build_drafter(f"{name}:height=3")


def test_installed_ones_are_listed() -> None:
    assert installed_drafters()["wide"] == "theirs.drafting:Theirs"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("theirs.nothing:Theirs", "theirs.nothing cannot be imported: ModuleNotFoundError"),
        ("theirs.broken:Theirs", "theirs.broken cannot be imported"),
        ("theirs.drafting:Other", "no class Other that derives"),
        ("theirs.drafting:Missing", "no class Missing"),
        ("theirs.drafting", "neither a known name"),
    ],
)
def test_what_is_wrong_is_said(spec: str, words: str) -> None:
    with pytest.raises(DrafterError, match=words):
        build_drafter(spec)


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("a.b:C", "a.b:C"),
        ("hybrid:sources=suffix+a:C", "a:C"),
        ("hybrid:sources=suffix+ a.b:C:width=3", "a.b:C"),
        ("a.b:C:width=3", "a.b:C"),
        ("staged:model=x,drafter=a.b:C", "a.b:C"),
        ("suffix:min_match=3", None),
        ("draft-tree:model=/a/b,width=3", None),
        ("owner/name", None),
        ("wide", None),
    ],
)
def test_which_texts_name_a_module(text: str, module: str | None) -> None:
    assert named_module(text) == module


def test_tables_own_options_are_no_classes() -> None:
    assert isinstance(build_drafter("suffix:min_match=2")[0], Suffix)
