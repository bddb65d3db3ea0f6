"""The bundled target by the Triton kernels on a GPU: every drafter gives the tokens and log-probabilities of plain
decoding, bit for bit, in batches of any size and whatever the weights are kept in."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config import BUNDLED_TARGET, KERNELS_VARIABLE
from forerun.drafters import DRAFTERS
from forerun.models import Model, load_model, load_tokenizer
from forerun.utils import workloads
from heads import text_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_PROMPTS = int(os.environ.get("FORERUN_GPU_PROMPTS", "4"))
"""Few, so that all formats and drafters are tried within minutes; set it to 100 for all that is promised."""
NUM_TOKENS = 32
SEEDS = (None, 7)
FORMATS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
}
Bits = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=FORMATS)
def target(request: pytest.FixtureRequest) -> Model:
    with pytest.MonkeyPatch.context() as patch:  # until it is loaded: heads are fitted on the CPU, by other kernels
        patch.setenv(KERNELS_VARIABLE, "triton")
        return load_model("bundled", device="cuda", **FORMATS[request.param])


@pytest.fixture(scope="module")
def plain(target: Model, prompts: list[list[int]]) -> dict[int | None, Bits]:
    """Return the output of plain decoding, one prompt at a time, by seed."""
    llm = LLM(target, None, max_batch=1)
    return {seed: bits(llm, prompts, [params_of(seed)] * len(prompts)) for seed in SEEDS}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer("bundled")
    return [tokenizer(case.prompt)["input_ids"][-250:] for case in workloads.load_workload("code", NUM_PROMPTS)]


def params_of(seed: int | None) -> SamplingParams:
    """Return sampling parameters, greedy without a seed."""
    temperature = 0.0 if seed is None else 1.0
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)


def bits(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Bits:
    generations = llm.generate(prompts, params)
    return [(list(each.token_ids), [entry.logprob for entry in each.logprobs or ()]) for each in generations]


def has_to_be_fitted(drafter: str) -> bool:
    """Return whether a head is not shipped: training takes a minute on the CPU, and comes last."""
    return DRAFTERS[drafter].kind == "head" and not DRAFTERS[drafter].serves(BUNDLED_TARGET)


def test_it_is_exact(target: Model) -> None:
    assert target.kernels == "triton"
    assert target.exactness.exact, target.exactness.reason


@pytest.mark.parametrize("seed", SEEDS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", sorted(DRAFTERS, key=has_to_be_fitted))
def test_a_drafter_changes_no_bit(
    target: Model,
    plain: dict[int | None, Bits],
    prompts: list[list[int]],
    drafter: str,
    seed: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = text_of(drafter)
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    params, expected = params_of(seed), plain[seed]
    every = [params] * len(prompts)
    for batch in (1, 4, 16):
        llm = LLM(target, name, max_batch=batch, num_draft_tokens=5, tokenizer=load_tokenizer("bundled"))
        assert llm.drafter is not None
        if llm.drafter.traits.reads_prediction:
            every = [replace(params, prediction=tokens) for tokens, _ in expected]
        assert bits(llm, prompts, every) == expected, (drafter, batch)
