"""Medusa heads over a real model: the text of plain decoding in every company, memory that is reused, distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from families import VOCAB
from forerun import LLM, Hybrid, Medusa, MedusaTree, Suffix
from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.medusa.config import MedusaConfig
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import Model, load_model
from gtest import SIGNIFICANCE, TARGET, p_value
from head_rig import GREEDY, Rig, cases
from heads import MarkovTarget
from medusa_heads import aligned_hydra, aligned_medusa, random_medusa

MAKE: dict[str, Any] = {
    "chain": Medusa,
    "tree": MedusaTree,
    "dynamic tree": lambda head: MedusaTree(head, shape="dynamic"),
    "behind suffix": lambda head: Hybrid([Suffix(), Medusa(head)]),
    "merged": lambda head: Hybrid([Suffix(), MedusaTree(head)], "merge"),
}


@pytest.fixture(scope="module")
def rig(family_folder: Callable[[str], Any]) -> Rig:
    return Rig(load_model(family_folder("llama"), "float64"), head_for)


def head_for(target: Model, sequential: bool = False) -> StoredHead[MedusaConfig]:
    return random_medusa(target, draft_vocab_size=60, sequential=sequential)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize(("kind", "options"), cases(MAKE))
def test_tokens_are_those_of_plain_decoding(rig: Rig, kind: str, options: dict[str, Any], sequential: bool) -> None:
    assert rig.answers(MAKE[kind](head_for(rig.target, sequential)), **options) == rig.expected
    assert rig.drafted > 0


def test_models_of_the_general_path_have_heads_too(family_folder: Callable[[str], Any]) -> None:
    other = Rig(load_model(family_folder("gemma2"), "float64"), head_for)
    assert other.answers(MedusaTree(other.head)) == other.expected
    assert other.drafted > 0


def test_a_prompt_that_is_taken_over_is_drafted_for_at_once(family_folder: Callable[[str], Any]) -> None:
    """Its last token is computed in any case, and its state is all that is needed."""
    target = load_model(family_folder("llama"), "bfloat16")
    prompt = torch.randint(0, VOCAB, (3 * PAGE + 9,), generator=torch.Generator().manual_seed(1)).tolist()
    llm = LLM(target, Medusa(random_medusa(target, seed=2)), num_draft_tokens=3)
    results: Any = [llm.generate(prompt, GREEDY) for _ in range(2)]
    assert [result.stats.num_cached_tokens for result in results] == [0, 3 * PAGE]
    assert results[0].token_ids == results[1].token_ids == LLM(target, None).generate(prompt, GREEDY).token_ids  # type: ignore[union-attr]
    assert results[0].stats.num_draft_tokens == results[1].stats.num_draft_tokens > 0
    plain: Any = LLM(target, None, prefix_reuse="off").generate(prompt, replace(GREEDY, temperature=1.0, seed=7, n=3))
    several: Any = llm.generate(prompt, replace(GREEDY, temperature=1.0, seed=7, n=3))
    assert [choice.token_ids for choice in several.choices] == [choice.token_ids for choice in plain.choices]


DRAWN: dict[str, Any] = {
    "chain": (lambda target: Medusa(aligned_medusa(target, greedy=False)), None),
    "tree": (lambda target: MedusaTree(aligned_medusa(target, greedy=False)), None),
    "sequential": (lambda target: Medusa(aligned_hydra(target)), None),
    "sequential tree": (lambda target: MedusaTree(aligned_hydra(target)), None),
    "chain, token by token": (lambda target: Medusa(aligned_medusa(target, greedy=False)), "token"),
    "tree, multi-step": (lambda target: MedusaTree(aligned_medusa(target, greedy=False)), "multi-step"),
    "hybrid": (lambda target: Hybrid([Suffix(), Medusa(aligned_medusa(target, greedy=False))]), None),
}


def draws(method: str, num_samples: int) -> float:
    make, acceptance = DRAWN[method]
    target = MarkovTarget(TARGET)
    return p_value(make(target), num_samples, acceptance=acceptance, target=target)


@pytest.mark.parametrize("method", ["chain", "tree", "sequential tree"])
def test_the_distribution_is_the_targets(method: str) -> None:
    assert draws(method, 2_000) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAWN)
def test_many_samples(method: str) -> None:
    assert draws(method, 60_000) > SIGNIFICANCE


def test_another_law_than_the_one_drawn_from_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pick = ChainGrowth._pick

    def picked(self: Any, *rest: Any) -> Any:
        probs, tokens = pick(self, *rest)
        return (1 + probs) / (1 + probs).sum(-1, keepdim=True), tokens

    monkeypatch.setattr(ChainGrowth, "_pick", picked)
    assert draws("chain", 4_000) < 1e-6
