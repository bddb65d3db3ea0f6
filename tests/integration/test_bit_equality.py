"""Plain and speculative runs on CPU: the same tokens, and the same bits of every committed token's log-probability."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from doubles import adversaries
from families import FAMILIES, VOCAB, make_family
from forerun import LLM, SamplingParams
from forerun.config import QUANTISATIONS
from forerun.kernels.cpu import references
from forerun.models import Model, load_model, load_tokenizer
from forerun.utils import workloads

Bits = list[tuple[list[int], list[float]]]
DTYPES = ["float32", "bfloat16"]


def held_out_prompts(count: int) -> list[str]:
    """The first prompts of the bundled held-out code, which is ordered by a hash of the files' names."""
    return [case.prompt for case in workloads.load_workload("code", count)]


def bits(llm: LLM, prompts: list[str] | list[list[int]], batch: int, num_tokens: int, least: int = 0) -> Bits:
    """Tokens and log-probabilities, with `batch` prompts in company at a time. least: tokens accepted at least."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    results: Bits = []
    drafted = accepted = 0
    for start in range(0, len(prompts), batch):
        for generation in llm.generate(prompts[start : start + batch], params):
            assert generation.logprobs is not None
            drafted += generation.stats.num_draft_tokens
            accepted += generation.stats.num_accepted_tokens
            results.append((generation.token_ids, [entry.logprob for entry in generation.logprobs]))
    print(f"drafted {drafted}, accepted {accepted}")
    assert accepted >= least, f"drafted {drafted}, accepted {accepted}"
    return results


@pytest.fixture(scope="module", params=["reference", *DTYPES, *QUANTISATIONS])
def bundled(request: pytest.FixtureRequest) -> Model:
    if request.param in QUANTISATIONS:
        return load_model("bundled", quantize=request.param)
    if request.param == "reference":
        with references():
            return load_model("bundled", "float32")
    return load_model("bundled", dtype=request.param)


def compare(target: Model, num_prompts: int, num_tokens: int, settings: dict[str, list[tuple[int, int]]]) -> None:
    """settings: drafter -> K and batch of each run."""
    assert target.exactness.exact, target.exactness.reason
    plain = LLM(target, None, tokenizer=load_tokenizer("bundled"))
    prompts = held_out_prompts(num_prompts)
    assert len(prompts) == num_prompts
    prompts = [prompt[-90:] * 2 if i % 2 else prompt for i, prompt in enumerate(prompts)]  # half of them repeat
    expected = bits(plain, prompts, 1, num_tokens)
    for drafter, runs in settings.items():
        for k, batch in runs:
            llm = LLM(target, drafter, num_draft_tokens=k, tokenizer=load_tokenizer("bundled"))
            assert bits(llm, prompts, batch, num_tokens, 5 * num_prompts) == expected, (drafter, k, batch)


@pytest.mark.sampled(2)
def test_bundled_pair(bundled: Model) -> None:
    """Each K alone and in company, shared out between the drafters; the slow test has the whole product."""
    compare(bundled, 2, 24, {"bundled-draft": [(1, 4), (5, 1)], "prompt-lookup": [(1, 1), (5, 4)]})


@pytest.mark.sampled(2)
def test_bundled_target_with_trees(bundled: Model) -> None:
    """Random trees and duplicated siblings, over the borders of tails and, in the longer prompt, of a block."""
    tokenizer = load_tokenizer("bundled")
    long, short = (tokenizer(prompt)["input_ids"] for prompt in held_out_prompts(2))
    prompts = [(long * 9)[:245], short[:57]]
    plain = LLM(bundled, None, tokenizer=tokenizer)
    expected = bits(plain, prompts, 1, 24)
    references = {tuple(prompt): tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)}
    for name in ("duplicated", "tree"):
        for k, batch in ((5, 1), (16, 2)):
            drafter = adversaries(references, bundled.vocab_size)[name]
            llm = LLM(bundled, drafter, num_draft_tokens=k, tokenizer=tokenizer)
            assert bits(llm, prompts, batch, 24, 16) == expected, (name, k, batch)
            assert any(step.verdict is not None and len(step.verdict.path) > 1 for step in drafter.steps)


@pytest.mark.slow
def test_bundled_pair_at_length(bundled: Model) -> None:
    runs = [(k, batch) for k in (1, 3, 5, 8) for batch in (1, 4)]
    compare(bundled, 50, 64, {"bundled-draft": runs, "prompt-lookup": runs})


CHAINS, TREES = [(1, 1), (3, 4), (5, 1), (8, 4)], [(5, 1), (12, 4)]
"""K and batch of the runs of drafters that draft chains, and of those that draft trees."""
QUARTERS = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("quarter", QUARTERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, dtype: str, quarter: int, tmp_path: Path) -> None:
    """Prompts that end just before a block of keys does, so that every run crosses into the next.

    Three quarters of the runs are slow: which ones differs from family to family, from format to format and from
    drafter to drafter, so that by default every family has every K and batch of chains and both drafters of trees.
    """
    target = load_model(make_family(family, tmp_path), dtype=dtype)
    assert target.exactness.exact, target.exactness.reason
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (247, 30, 243, 251)]
    expected = bits(LLM(target, None), prompts, 1, 18)
    references = {tuple(prompt): tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)}
    for number, name in enumerate(("right", "random", "duplicated", "tree")):
        runs = CHAINS if name in ("right", "random") else TREES
        turn = number + 2 * DTYPES.index(dtype) + list(FAMILIES).index(family)
        for k, batch in runs[(turn + quarter) % 4 :: 4]:
            llm = LLM(target, adversaries(references, VOCAB)[name], num_draft_tokens=k)
            least = 0 if name == "random" else 30
            assert bits(llm, prompts, batch, 18, least) == expected, (name, k, batch)
