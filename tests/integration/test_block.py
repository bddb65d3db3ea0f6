"""Block heads over a real model: the text of plain decoding in every company, memory that is reused, distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from blocks import FULL, fitted_block, markov_block, random_block
from families import VOCAB
from forerun import LLM, Block, Hybrid, Suffix
from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.models.heads.config import StoredHead
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import Model, load_model
from forerun.types import Draft
from gtest import SIGNIFICANCE, TARGET, p_value
from head_rig import GREEDY, Rig, cases
from heads import MarkovTarget
from pool_integrity import check_integrity


def head_for(target: Model) -> StoredHead:
    return random_block(target, **FULL)


@pytest.fixture(scope="module")
def rig(family_folder: Callable[[str], Any]) -> Rig:
    return Rig(load_model(family_folder("llama"), "float64"), head_for)


MAKE: dict[str, Any] = {
    "alone": Block,
    "behind suffix": lambda head: Hybrid([Suffix(), Block(head)]),
    "merged": lambda head: Hybrid([Suffix(), Block(head)], "merge"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "options"), cases(MAKE))
def test_tokens_are_those_of_plain_decoding(rig: Rig, kind: str, options: dict[str, Any]) -> None:
    assert rig.answers(MAKE[kind](rig.head), **options) == rig.expected
    assert rig.drafted > 0


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_models_of_the_general_path_have_heads_too(family: str, family_folder: Callable[[str], Any]) -> None:
    other = Rig(load_model(family_folder(family), "float64"), head_for)
    assert other.answers(Block(other.head)) == other.expected
    assert other.drafted > 0


class Watched(Block):
    """Keeps how many rows its sequences have taken over, and what it drafted first of all."""

    def __init__(self, head: StoredHead) -> None:
        super().__init__(head)
        self.taken: list[int] = []
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
    block = Watched(random_block(target, seed=2))
    llm = LLM(target, block, num_draft_tokens=4)
    for _ in range(2):
        llm.generate(prompt, GREEDY)
    assert block.taken == [0, 3 * PAGE]
    assert block.first[0] == block.first[1] != []
    results: Any = llm.generate([prompt, prompt[: PAGE + 5]], replace(GREEDY, temperature=1.0, n=2))
    assert [result.stats.num_cached_tokens for result in results] == [3 * PAGE, PAGE]
    for pool in (target.pool, *block.pools):
        check_integrity(pool)


def test_a_prompt_of_which_the_head_lacks_rows_is_drafted_for(family_folder: Callable[[str], Any]) -> None:
    """The target's pages of a request without a head are taken over: nobody tells their states."""
    target = load_model(family_folder("llama"), "bfloat16")
    prompt = torch.randint(0, VOCAB, (3 * PAGE + 9,), generator=torch.Generator().manual_seed(1)).tolist()
    plain: Any = LLM(target, None).generate(prompt, GREEDY)
    block = Watched(fitted_block(target, [prompt, plain.token_ids]))
    result: Any = LLM(target, block, num_draft_tokens=4).generate(prompt, GREEDY)
    assert result.token_ids == plain.token_ids
    assert result.stats.num_cached_tokens == 3 * PAGE and block.taken == [0]
    assert result.stats.num_accepted_tokens > 0


def test_choices_share_the_rows_of_their_prompt(family_folder: Callable[[str], Any]) -> None:
    target = load_model(family_folder("llama"), "bfloat16")
    prompt = torch.randint(0, VOCAB, (PAGE + 40,), generator=torch.Generator().manual_seed(1)).tolist()
    block = Watched(random_block(target, seed=2))
    block.drafting_model._prefill_policy._overall_share = 1.0  # others draft
    params = replace(GREEDY, temperature=1.0, seed=7, n=3)
    plain: Any = LLM(target, None, prefix_reuse="off").generate(prompt, params)
    result: Any = LLM(target, block, num_draft_tokens=4).generate(prompt, params)
    assert [choice.token_ids for choice in result.choices] == [choice.token_ids for choice in plain.choices]
    assert block.taken[0] == 0 and min(block.taken[1:]) > PAGE


def draws(num_samples: int, acceptance: str | None = None, confidence: bool = False) -> float:
    target = MarkovTarget(TARGET)
    head = markov_block(target, noise=0.5)
    return p_value(Block(head), num_samples, acceptance=acceptance, target=target)


def test_the_distribution_is_the_targets() -> None:
    assert draws(2_000) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [None, "token"])
def test_many_samples(acceptance: str | None) -> None:
    assert draws(60_000, acceptance) > SIGNIFICANCE


def test_laws_without_the_tokens_that_were_drawn_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the Markov bias were not part of what is told: each token's distribution is that after the last committed
    token."""
    pick = ChainGrowth._pick

    def picked(self: Any, picking: Any, chains: Any, logits: Any) -> Any:
        probs, tokens = pick(self, picking, chains, logits)
        self.told = probs if all(len(chain.tree) == 0 for chain in chains) else self.told[: len(probs)]
        return self.told, tokens

    monkeypatch.setattr(ChainGrowth, "_pick", picked)
    assert draws(2_000) < 1e-6
