"""Heads over a real model: the text of plain decoding in every company, memory that is reused, and distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from families import VOCAB
from forerun import LLM, Eagle, EagleTree, Hybrid, Suffix
from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.models.heads.config import StoredHead
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import Model, load_model
from forerun.types import Draft
from gtest import SIGNIFICANCE, TARGET, p_value
from head_rig import GREEDY, Rig, cases
from heads import MarkovTarget, fitted_head, noisy_head, random_head
from pool_integrity import check_integrity


def head_for(target: Model) -> StoredHead:
    return random_head(target, draft_vocab_size=60, norm_before_fc=True, sliding_window=40)


@pytest.fixture(scope="module")
def rig(family_folder: Callable[[str], Any]) -> Rig:
    return Rig(load_model(family_folder("llama"), "float64"), head_for)


MAKE: dict[str, Any] = {
    "chain": Eagle,
    "tree": EagleTree,
    "static tree": lambda head: EagleTree(head, shape="static"),
    "behind suffix": lambda head: Hybrid([Suffix(), Eagle(head)]),
    "merged": lambda head: Hybrid([Suffix(), EagleTree(head)], "merge"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "options"), cases(MAKE))
def test_tokens_are_those_of_plain_decoding(rig: Rig, kind: str, options: dict[str, Any]) -> None:
    assert rig.answers(MAKE[kind](rig.head), **options) == rig.expected
    assert rig.drafted > 0


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_models_of_the_general_path_have_heads_too(family: str, family_folder: Callable[[str], Any]) -> None:
    other = Rig(load_model(family_folder(family), "float64"), head_for)
    assert other.answers(EagleTree(other.head)) == other.expected
    assert other.drafted > 0


class Watched(Eagle):
    """Keeps how many rows its sequences have taken over, and what it drafted first of all."""

    def __init__(self, head: StoredHead) -> None:
        super().__init__(head)
        self.taken: list[int] = []
        self.fed = 0
        self.first: list[list[int]] = []

    def start(self, sequence: Any) -> None:
        super().start(sequence)
        self.taken.append(self.drafting_model.states[sequence].cache.length)

    def draft(self, sequences: Any, num_draft_tokens: Any, min_acceptance_prob: float = 0.0) -> list[Draft]:
        drafts = super().draft(sequences, num_draft_tokens, min_acceptance_prob)
        for sequence, draft in zip(sequences, drafts, strict=True):
            if sequence.num_output == 1:
                self.first.append(draft.ids)
        return drafts


def test_a_prompt_that_is_taken_over_costs_the_head_nothing(family_folder: Callable[[str], Any]) -> None:
    """The second request adopts the target's pages and the head's, and drafts what the first one did."""
    target = load_model(family_folder("llama"), "bfloat16")
    prompt = torch.randint(0, VOCAB, (3 * PAGE + 9,), generator=torch.Generator().manual_seed(1)).tolist()
    head = random_head(target, seed=2)
    eagle = Watched(head)
    llm = LLM(target, eagle, num_draft_tokens=4)
    for _ in range(2):
        llm.generate(prompt, GREEDY)
    assert eagle.taken == [0, 3 * PAGE]
    assert eagle.first[0] == eagle.first[1] != []
    llm.generate([prompt[0] + 1, *prompt[1:]], GREEDY)
    assert eagle.taken[2] == 0  # no row holds the first token, but the first state depends on it
    results: Any = llm.generate([prompt, prompt[: PAGE + 5]], replace(GREEDY, temperature=1.0, n=2))
    assert [result.stats.num_cached_tokens for result in results] == [3 * PAGE, PAGE]
    for pool in (target.pool, *eagle.pools):
        check_integrity(pool)


def test_a_prompt_of_which_the_head_lacks_rows_is_drafted_for(family_folder: Callable[[str], Any]) -> None:
    """The target's pages of a request without a head are taken over: nobody tells their states."""
    target = load_model(family_folder("llama"), "bfloat16")
    prompt = torch.randint(0, VOCAB, (3 * PAGE + 9,), generator=torch.Generator().manual_seed(1)).tolist()
    params = replace(GREEDY, max_tokens=20)
    plain: Any = LLM(target, None).generate(prompt, params)
    head = fitted_head(target, [prompt, plain.token_ids])
    eagle = Watched(head)
    result: Any = LLM(target, eagle, num_draft_tokens=4).generate(prompt, params)
    assert result.token_ids == plain.token_ids
    assert result.stats.num_cached_tokens == 3 * PAGE and eagle.taken == [0]
    assert result.stats.num_accepted_tokens > 0
    again: Any = LLM(target, Eagle(head), num_draft_tokens=4).generate(prompt, params)
    assert again.stats.num_accepted_tokens == result.stats.num_accepted_tokens  # the head has no attention


def test_choices_share_the_rows_of_their_prompt(family_folder: Callable[[str], Any]) -> None:
    target = load_model(family_folder("llama"), "bfloat16")
    prompt = torch.randint(0, VOCAB, (PAGE + 40,), generator=torch.Generator().manual_seed(1)).tolist()
    eagle = Watched(random_head(target, seed=2))
    eagle.drafting_model._prefill_policy._overall_share = 1.0  # others draft
    llm = LLM(target, eagle, num_draft_tokens=4)
    params = replace(GREEDY, temperature=1.0, seed=7, n=3)
    plain: Any = LLM(target, None, prefix_reuse="off").generate(prompt, params)
    result: Any = llm.generate(prompt, params)
    assert [choice.token_ids for choice in result.choices] == [choice.token_ids for choice in plain.choices]
    assert eagle.taken[0] == 0 and min(eagle.taken[1:]) > PAGE


def draws(method: str, num_samples: int) -> float:
    make, acceptance = DRAWN[method]
    target = MarkovTarget(TARGET)
    return p_value(make(noisy_head(target)), num_samples, acceptance=acceptance, target=target)


DRAWN: dict[str, Any] = {
    "chain": (Eagle, None),
    "tree": (EagleTree, None),
    "hybrid": (lambda head: Hybrid([Suffix(), Eagle(head)]), None),
    "chain, token by token": (Eagle, "token"),
    "tree, multi-step": (EagleTree, "multi-step"),
}


@pytest.mark.parametrize("method", ["chain", "tree"])
def test_the_distribution_is_the_targets(method: str) -> None:
    assert draws(method, 1_000) > SIGNIFICANCE


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
    assert draws("chain", 1_000) < 1e-6
