"""The bundled target with a head that was damaged, which learns when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from forerun import LLM
from forerun.adaptation import adaptation, pupil
from forerun.adaptation.adaptation import Adaptation
from forerun.config import SHIPPED_HEADS, AdaptOptions
from forerun.drafters.models.head_files.folder import load_head
from forerun.drafters.models.heads.config import StoredHead
from forerun.utils.workloads import load_workload
from learning_drafters import noisy


@pytest.fixture(scope="session")
def damaged() -> StoredHead[Any]:
    head = load_head(SHIPPED_HEADS / "eagle" / "bundled")
    return replace(head, tensors=noisy(dict(head.tensors), 1.5), quantized={})


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [str(each.prompt) for each in load_workload("code", 32)]


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Makes LLMs that learn by `learn` alone."""
    monkeypatch.setattr(Adaptation, "_next", lambda self: adaptation._NOBODY)
    monkeypatch.setattr(pupil, "RATE", 2e-3)
    made = []

    def make(drafter: Any, **options: Any) -> LLM:
        adapt = AdaptOptions(adapt=True, adapt_share=1.0, **options)
        made.append(LLM("bundled", drafter, num_draft_tokens=3, dtype="float32", seed=1, adapt=adapt))
        return made[-1]

    yield make
    for each in made:
        each.close()
