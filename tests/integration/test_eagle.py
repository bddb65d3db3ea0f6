"""Heads on the bundled target: the text of plain decoding, whatever the head proposes; and what it is fed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forerun import LLM, Eagle, EagleTree, Hybrid, SamplingParams, Suffix, workloads
from forerun.drafters import Drafter
from forerun.heads import StoredHead
from forerun.models import Model, load_model, load_tokenizer
from heads import random_head

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
REQUESTS = [
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.3),
    replace(GREEDY, temperature=0.9, seed=3),
    replace(GREEDY, temperature=1.2, seed=4, top_k=30, presence_penalty=0.4),
    replace(GREEDY, temperature=1.0, seed=5, n=3),
]


class Rig:
    """A target, prompts, a head, and what plain decoding says."""

    def __init__(self, dtype: str) -> None:
        self.target: Model = load_model("bundled", dtype)
        self.tokenizer: Any = load_tokenizer("bundled")
        prompts = [self.tokenizer(case.prompt)["input_ids"] for case in workloads.load("code", len(REQUESTS))]
        self.prompts = [(prompt * 3)[: 60 + 17 * i] for i, prompt in enumerate(prompts)]
        self.head: StoredHead = random_head(self.target, draft_vocab_size=500, norm_before_fc=True, sliding_window=40)
        self.expected = self.answers(None)

    def llm(self, drafter: Drafter | None, **options: Any) -> LLM:
        options = {"num_draft_tokens": 5, "seed": 1, **options}
        return LLM(self.target, drafter, tokenizer=self.tokenizer, **options)

    def answers(self, drafter: Drafter | None, **options: Any) -> list[Any]:
        results: Any = self.llm(drafter, **options).generate(self.prompts, REQUESTS)
        self.drafted = sum(choice.stats.num_draft_tokens for result in results for choice in result.choices)
        return [[choice.token_ids for choice in result.choices] for result in results]


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig("float64")


MAKE: dict[str, Any] = {
    "chain": Eagle,
    "tree": EagleTree,
    "static tree": lambda head: EagleTree(head, shape="static"),
    "behind suffix": lambda head: Hybrid([Suffix(), Eagle(head)]),
    "merged": lambda head: Hybrid([Suffix(), EagleTree(head)], "merge"),
}


@pytest.mark.parametrize("kind", MAKE)
def test_tokens_are_those_of_plain_decoding(rig: Rig, kind: str) -> None:
    for options in ({"prefill_chunk": 23}, {"max_batch": 1}, {"num_draft_tokens": "auto"}):
        assert rig.answers(MAKE[kind](rig.head), **options) == rig.expected, options
        assert rig.drafted > 0
