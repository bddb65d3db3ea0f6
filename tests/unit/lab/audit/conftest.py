"""A small world to audit: a fake model with letters for tokens, and a draft model that is near it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from doubles import FakeModel, PieceTokenizer
from forerun import LLM, DraftModel
from forerun.lab.audit.engine_layer import Audited

VOCAB = 11
PROMPTS = [[1, 2, 3, 4, 5], [7, 3, 9, 2], [5, 5, 8, 0, 1, 6]]


@dataclass
class World:
    """A target with a drafter."""

    target: Any
    audited: Audited


def make_world(drafter: Any = None, **options: Any) -> World:
    target: Any = FakeModel(VOCAB, scale=2.0)
    near: Any = FakeModel(VOCAB)
    near.table = target.table + torch.randn(target.table.shape, generator=torch.Generator().manual_seed(5))
    tokenizer = PieceTokenizer([bytes([ord("a") + index]) for index in range(VOCAB)])
    llm = LLM(target, drafter or DraftModel(near), tokenizer=tokenizer, seed=1, **options)
    return World(target, Audited(llm.target, llm.drafter, tokenizer, options.get("acceptance")))


@pytest.fixture
def world() -> World:
    return make_world()
