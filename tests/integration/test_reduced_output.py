"""A draft model that proposes a part of the vocabulary leaves the target's text and distribution as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import MarkovModel
from families import VOCAB
from forerun import LLM, SamplingParams
from forerun.drafters import DraftModel, DraftTree
from forerun.models import load_model, load_tokenizer
from forerun.models.loading.configuration import OUTPUT_TOKENS
from gtest import DRAFT, SIGNIFICANCE, p_value

METHODS: dict[str, Callable[[Any], Any]] = {"draft-model": DraftModel, "draft-tree": DraftTree}
PROMPTS = [[7, 30, 2], [50], list(range(1, 31))]


@pytest.mark.parametrize("method", METHODS)
def test_the_distribution_is_the_targets(method: str) -> None:
    table = DRAFT.clone()
    table[:, 2] = -torch.inf
    assert p_value(METHODS[method](MarkovModel(table)), 4_000) > SIGNIFICANCE


@pytest.mark.parametrize("drafter", ["draft-model", "draft-tree"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 5}], ids=["greedy", "seeded"])
def test_in_float64_the_text_is_that_without_a_draft(
    drafter: str, sampling: dict[str, Any], family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The draft is the target itself, but for half of its tokens: what it proposes is right, and it misses the rest."""
    folder = family_folder("llama")
    config = json.loads((shutil.copytree(folder, tmp_path / "draft") / "config.json").read_text())
    proposed = list(range(0, VOCAB, 2))
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | {OUTPUT_TOKENS: proposed}))
    target, params = load_model(folder, "float64"), SamplingParams(max_tokens=24, **sampling)
    wanted = [result.token_ids for result in LLM(target, None).generate(PROMPTS, params)]
    llm = LLM(target, f"{drafter}:model={tmp_path / 'draft'}", num_draft_tokens=4, tokenizer=load_tokenizer(folder))
    results = llm.generate(PROMPTS, params)
    assert [result.token_ids for result in results] == wanted
    accepted = sum(result.stats.num_accepted_tokens for result in results)
    assert 0 < accepted < sum(result.stats.num_draft_tokens for result in results)
    assert {token % 2 for output in wanted for token in output} == {0, 1}
