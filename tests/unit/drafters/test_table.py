"""Drafters by name, place and object."""

from pathlib import Path
from typing import Any

import pytest

from doubles import FakeModel, Scripted
from forerun.drafters import DRAFTERS, Binding, PromptLookup, make_drafter
from forerun.errors import DrafterError, ModelLoadError


def make(spec: Any) -> Any:
    return make_drafter(spec, Binding(FakeModel()))


def test_the_table() -> None:
    assert {"draft-model", "prompt-lookup"} <= DRAFTERS.keys()
    assert all(row.description and row.kind in ("model", "target", "lookup") for row in DRAFTERS.values())


def test_names_and_objects() -> None:
    assert make(None) is None
    assert isinstance(make("prompt-lookup"), PromptLookup)
    plan = Scripted(lambda *_: [])
    assert make(plan) is plan


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("promt-lookup", DrafterError, "'promt-lookup', which is neither a known name"),
        ("draft-model", DrafterError, "belongs to the bundled target, not to fake"),
        (3, DrafterError, "start, draft, commit and stop"),
        (object(), DrafterError, "start, draft, commit and stop"),
        (Path("no/such/folder"), ModelLoadError, "no/such/folder"),
        ("./no/such/folder", ModelLoadError, "no/such/folder"),
    ],
)
def test_what_cannot_be_a_drafter(spec: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        make(spec)
