"""Requests that heads draft for, and what plain decoding says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from families import VOCAB
from forerun import LLM, SamplingParams
from forerun.drafters import Drafter
from forerun.drafters.models.heads.config import StoredHead
from forerun.models import Model
from forerun.speculation import CostModel

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
REQUESTS = [
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.3),
    replace(GREEDY, temperature=0.9, seed=3),
    replace(GREEDY, temperature=1.2, seed=4, top_k=30, presence_penalty=0.4),
    replace(GREEDY, temperature=1.0, seed=5, n=3),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "in chunks": {"prefill_chunk": 23},
    "alone": {"max_batch": 1},
    "automatic": {"num_draft_tokens": "auto"},
}


def cases(kinds: Iterable[str]) -> list[Any]:
    """Each kind with each of the options. By default the first kind has all of them, and every other one."""
    found = []
    for number, kind in enumerate(kinds):
        for place, option in enumerate(OPTIONS):
            marks = [pytest.mark.slow] if number and (number + place) % len(OPTIONS) else []
            found.append(pytest.param(kind, OPTIONS[option], marks=marks, id=f"{kind}-{option}"))
    return found


class Rig:
    """A target, prompts, a head, and what plain decoding says.

    Args:
        head_for: makes the head.
    """

    def __init__(self, target: Model, head_for: Callable[[Model], StoredHead]) -> None:
        self.target = target
        generator = torch.Generator().manual_seed(3)
        once = [torch.randint(0, VOCAB, (20 + 17 * i,), generator=generator).tolist() for i in range(len(REQUESTS))]
        self.prompts = [prompt * 2 for prompt in once]
        self.head = head_for(target)
        self.expected = self.answers(None)

    def answers(self, drafter: Drafter | None, **options: Any) -> list[Any]:
        llm = LLM(self.target, drafter, **{"num_draft_tokens": 5, "seed": 1, **options})
        with pytest.MonkeyPatch.context() as patch:  # by the clock, drafts for so small a target may not pay
            patch.setattr(CostModel, "draft", lambda _, batch, places: np.zeros(places + 1))
            patch.setattr(CostModel, "follow", lambda _, lag: 0.0)
            results: Any = llm.generate(self.prompts, REQUESTS)
        stats = [choice.stats for result in results for choice in result.choices]
        self.drafted = sum(each.num_draft_tokens for each in stats)
        return [[choice.token_ids for choice in result.choices] for result in results]
