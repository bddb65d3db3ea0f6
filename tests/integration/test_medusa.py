"""Medusa heads over a real model: the text of plain decoding in every company, memory that is reused, distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from families import VOCAB
from forerun import LLM, Hybrid, Medusa, MedusaTree, SamplingParams, Suffix
from forerun.drafters import Drafter
from forerun.kernels.page_layout import PAGE
from forerun.models import Model, load_model
from gtest import SIGNIFICANCE, TARGET, p_value
from heads import MarkovTarget
from medusa_heads import aligned_hydra, aligned_medusa, random_medusa

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
REQUESTS = [
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.3),
    replace(GREEDY, temperature=0.9, seed=3),
    replace(GREEDY, temperature=1.2, seed=4, top_k=30, presence_penalty=0.4),
    replace(GREEDY, temperature=1.0, seed=5, n=3),
]
MAKE: dict[str, Any] = {
    "chain": Medusa,
    "tree": MedusaTree,
    "dynamic tree": lambda head: MedusaTree(head, shape="dynamic"),
    "behind suffix": lambda head: Hybrid([Suffix(), Medusa(head)]),
    "merged": lambda head: Hybrid([Suffix(), MedusaTree(head)], "merge"),
}


class Rig:
    """A target, prompts, and what plain decoding says."""

    def __init__(self, target: Model) -> None:
        self.target = target
        generator = torch.Generator().manual_seed(3)
        once = [torch.randint(0, VOCAB, (20 + 17 * i,), generator=generator).tolist() for i in range(len(REQUESTS))]
        self.prompts = [prompt * 2 for prompt in once]
        self.expected = self.answers(None)

    def answers(self, drafter: Drafter | None, **options: Any) -> list[Any]:
        llm = LLM(self.target, drafter, **{"num_draft_tokens": 5, "seed": 1, **options})
        results: Any = llm.generate(self.prompts, REQUESTS)
        stats = [choice.stats for result in results for choice in result.choices]
        self.drafted = sum(each.num_draft_tokens for each in stats)
        return [[choice.token_ids for choice in result.choices] for result in results]


@pytest.fixture(scope="module")
def rig(family_folder: Callable[[str], Any]) -> Rig:
    return Rig(load_model(family_folder("llama"), "float64"))


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("sequential", [False, True])
def test_tokens_are_those_of_plain_decoding(rig: Rig, kind: str, sequential: bool) -> None:
    head = random_medusa(rig.target, draft_vocab_size=60, sequential=sequential)
    for options in ({"prefill_chunk": 23}, {"max_batch": 1}, {"num_draft_tokens": "auto"}):
        assert rig.answers(MAKE[kind](head), **options) == rig.expected, options
        assert rig.drafted > 0 or options.get("num_draft_tokens") == "auto"


def test_models_of_the_general_path_have_heads_too(family_folder: Callable[[str], Any]) -> None:
    other = Rig(load_model(family_folder("gemma2"), "float64"))
    assert other.answers(MedusaTree(random_medusa(other.target))) == other.expected
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
    pick = Medusa._pick

    def picked(self: Any, *rest: Any) -> Any:
        probs, tokens = pick(self, *rest)
        return (1 + probs) / (1 + probs).sum(-1, keepdim=True), tokens

    monkeypatch.setattr(Medusa, "_pick", picked)
    assert draws("chain", 4_000) < 1e-6
