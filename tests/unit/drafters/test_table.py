"""Drafters by name, place and object."""

from pathlib import Path
from typing import Any

import pytest

from doubles import FakeModel, Scripted
from forerun import LLM
from forerun.drafters import DRAFTERS, Binding, PromptLookup, build_drafter, make_drafter
from forerun.errors import ConfigError, DrafterError, ModelLoadError


def make(spec: Any) -> Any:
    return make_drafter(spec, Binding(FakeModel()))[0]


def test_the_table() -> None:
    assert {"draft-model", "prompt-lookup"} <= DRAFTERS.keys()
    assert all(row.description and row.kind in ("model", "head", "target", "lookup") for row in DRAFTERS.values())


def test_names_and_objects() -> None:
    assert isinstance(make("prompt-lookup"), PromptLookup)
    plan = Scripted(lambda *_: [])
    assert make(plan) is plan


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("promt-lookup", DrafterError, "'promt-lookup', which is neither a known name"),
        ("draft-model", DrafterError, "belongs to the bundled target, not to fake"),
        (3, DrafterError, "derives from forerun.Drafter"),
        (object(), DrafterError, "derives from forerun.Drafter"),
        (None, DrafterError, "must be one of"),
        ("suffix:num_draft_tokens=many", DrafterError, "'many', but must be a whole number or auto"),
        (Path("no/such/folder"), ModelLoadError, "no/such/folder"),
        ("./no/such/folder", ModelLoadError, "no/such/folder"),
        ("nowhere.gguf", ModelLoadError, "model file nowhere.gguf does not exist"),
        ("smollm2", ModelLoadError, "forerun fetch smollm2"),
    ],
)
def test_what_cannot_be_a_drafter(spec: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        make(spec)


@pytest.mark.parametrize("k", [0, 5, 128, "auto"])
@pytest.mark.parametrize("name", ["suffix", "recycling", "lookahead"])
def test_every_drafters_text_may_name_k(name: str, k: int | str) -> None:
    drafter, written = build_drafter(f"{name}:num_draft_tokens={k}")
    assert type(drafter) is type(build_drafter(name)[0])
    assert written == k
    target: Any = FakeModel()
    assert LLM(target, f"{name}:num_draft_tokens={k}").num_draft_tokens == k
    assert LLM(target, f"{name}:num_draft_tokens={k}", num_draft_tokens=7).num_draft_tokens == 7


def test_a_k_out_of_range_is_refused() -> None:
    target: Any = FakeModel()
    with pytest.raises(ConfigError, match="num_draft_tokens is 129"):
        LLM(target, "recycling:num_draft_tokens=129")
