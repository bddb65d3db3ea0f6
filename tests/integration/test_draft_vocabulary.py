"""What a draft model proposes of a part of its vocabulary leaves the target's text and distribution as they are."""

from __future__ import annotations

from typing import Any

import pytest

from changed_folder import changed
from forerun import LLM, SamplingParams
from forerun.config import BUNDLED_MODELS
from forerun.drafters.models import draft_vocabulary
from forerun.kernels.cpu import native
from forerun.lab.audit.distributions import ContinuationCells, TargetDistributions
from forerun.lab.audit.statistics import g_test
from forerun.models.loading.configuration import OUTPUT_TOKENS
from forerun.utils.workloads import load_workload
from gtest import SIGNIFICANCE

pytestmark = pytest.mark.skipif(native() is None, reason="only the native kernels compute a part of the outputs")

DRAFTERS = [f"{name}:draft_vocab=1000" for name in ("draft-model", "draft-tree", "staged", "eagle", "early-exit")]
DRAFTERS += [f"{name}:model=trained" for name in ("draft-model", "draft-tree")]
PROMPTS = [case.prompt for case in load_workload("code", 3)] + ["Süßölgefäße für 5 €: 日本"]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 4},
    "penalized": {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {4000: 2.0}},
}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("bundled", None)


@pytest.fixture(autouse=True)
def trained(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a draft model that was trained to propose some tokens, beside which few of requests are held."""
    monkeypatch.setattr(draft_vocabulary, "_MIN_HELD", 256)
    folder = tmp_path_factory.mktemp("models") / "trained"
    return str(changed(BUNDLED_MODELS["bundled-draft"], folder, **{OUTPUT_TOKENS: list(range(40, 540))}))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_the_targets(drafter: str, options: str, plain: LLM, trained: str) -> None:
    drafter = drafter.replace("trained", trained)
    params = SamplingParams(max_tokens=40, ignore_eos=True, **OPTIONS[options])
    results = LLM(plain.target, drafter, num_draft_tokens=3, tokenizer=plain.tokenizer).generate(PROMPTS, params)
    assert [each.token_ids for each in results] == [each.token_ids for each in plain.generate(PROMPTS, params)]
    assert sum(each.stats.num_accepted_tokens for each in results) > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_distribution_is_the_targets(drafter: str, plain: LLM, trained: str) -> None:
    """The prompt's most probable continuations are in part outside of what is proposed."""
    drafter = drafter.replace("trained", trained)
    prompt = plain.encode("The ")
    params = SamplingParams(max_tokens=3, temperature=1.0, ignore_eos=True)
    distributions = TargetDistributions(plain.target, prompt)
    cells = ContinuationCells(distributions, params, 40, lambda: False)
    distributions.close()
    llm = LLM(plain.target, drafter, num_draft_tokens=2, tokenizer=plain.tokenizer, max_batch=64, seed=3)
    answers = [each.token_ids for each in llm.generate([prompt] * 2000, params)]
    proposed = llm.drafter.drafting_model.columns.names(list(range(llm.drafter.drafting_model.columns.num_columns)))
    assert sum(answer[0] not in proposed for answer in answers) / len(answers) > 0.02
    assert g_test(cells.counts(answers), cells.probabilities).p_value > SIGNIFICANCE
