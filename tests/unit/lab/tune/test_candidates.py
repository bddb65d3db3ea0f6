"""Which drafters are tried for a target, and why others are not."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.drafters.registry import DRAFTERS
from forerun.engine.step_times import CostCurve
from forerun.lab.tune.arms import ArmFailedError, Trial, TuningArm
from forerun.lab.tune.candidates import candidates, first_arms, hybrids
from forerun.lab.tune.ledger import Ledger, Round
from forerun.lab.tune.public_drafts import PUBLIC_DRAFTS, public_drafts
from forerun.lab.tune.search import MOST, predicted, promising


def bind(text: str) -> Any:
    if text.startswith("eagle"):
        raise ArmFailedError("forerun ships no head for it")


def test_every_row_of_the_table_is_tried_or_refused_with_a_reason() -> None:
    texts, refused = candidates("owner/model", [], None, bind)
    assert {"suffix", "prompt-lookup", "recycling", "lookahead", "early-exit"} <= set(texts)
    assert refused["draft-model"] == "it needs a draft model: --draft MODEL"
    assert "rest:index" in refused["rest"]
    assert refused["eagle"] == "forerun ships no head for it"
    assert set(DRAFTERS) - {"hybrid"} <= {*texts, *refused}
    assert "client" in refused["prediction"]


def test_a_draft_model_is_given_to_all_that_take_one() -> None:
    texts, _ = candidates("owner/model", [], "a/draft", bind)
    assert {"a/draft", "draft-tree:model=a/draft", "staged:model=a/draft"} <= set(texts)
    arms = first_arms(texts)
    assert [arm.num_draft_tokens for arm in arms if arm.drafter == "a/draft"] == ["auto", 4]
    assert TuningArm("recycling", 16) in arms


def test_named_drafters_are_tried_alone() -> None:
    texts, refused = candidates("bundled", ["suffix", "eagle:model=x"], None, bind)
    assert texts == ["suffix"] and list(refused) == ["eagle:model=x"]


def test_hybrids_are_of_the_best_copier_and_the_best_model() -> None:
    assert hybrids(["draft-model", "suffix", "prompt-lookup"]) == [
        "hybrid:sources=suffix+draft-model",
        "hybrid:sources=suffix+draft-model,mode=merge",
    ]
    assert hybrids(["a/draft", "prompt-lookup"])[0] == "hybrid:sources=prompt-lookup+a/draft"
    assert hybrids(["suffix", "recycling"]) == []


def chain(acceptance: float, k: int = 4, forwards: int = 100, draft: float = 0.05) -> Trial:
    """A trial as chains of K would be in expectation, where a forward takes 1 and a token's draft `draft`."""
    reached = [forwards * acceptance**depth for depth in range(k)]
    accepted = [forwards * acceptance ** (depth + 1) for depth in range(k)]
    tokens = forwards + sum(accepted)
    seconds = forwards * (1 + draft * k)
    counts = tuple(map(round, reached)), tuple(map(round, accepted))
    return Trial(
        seconds, round(tokens), forwards, k * forwards, round(sum(accepted)), *counts, forwards * draft * k, forwards
    )


def test_the_predictor_finds_k_from_one_look() -> None:
    found = predicted(chain(0.9), Trial(100.0, 100), CostCurve([1, 40], [1.0, 1.0]))
    assert found.best is not None and found.best.num_draft_tokens > 8
    assert len(found.by_k) == MOST
    four = found.by_k[3]
    assert four.tokens == pytest.approx(chain(0.9).num_tokens / 100, rel=0.01)
    assert four.speedup == pytest.approx(four.tokens / 1.2, rel=0.01)
    costly = predicted(chain(0.5, draft=0.3), Trial(100.0, 100), CostCurve([1, 40], [1.0, 1.0]))
    assert max(costly.by_k, key=lambda each: each.speedup).num_draft_tokens <= 2


def test_promising_arms_are_those_of_the_best_drafters() -> None:
    round_ = Round(
        (0,), {TuningArm("suffix", 4): chain(0.9), TuningArm("recycling", 16): chain(0.3)}, [Trial(100.0, 100)]
    )
    round_.beside = dict.fromkeys(round_.trials, 1.0)
    arms = promising(CostCurve([1, 40], [1.0, 1.0]), Ledger([round_]))
    assert {arm.num_draft_tokens for arm in arms if arm.drafter == "recycling"} == {8, 32}
    assert max(int(arm.num_draft_tokens) for arm in arms if arm.drafter == "suffix") > 8


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("someone/Qwen2.5-7B-Instruct-GGUF", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("path/to/Meta-Llama-3-70B-Instruct", "yuhuili/EAGLE-LLaMA3-Instruct-70B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
    ],
)
def test_public_drafts_are_found_by_the_targets_name(target: str, draft: str) -> None:
    assert draft in [each.name for each in public_drafts(target)]


def test_public_drafts_say_size_and_licence_and_name_a_drafter() -> None:
    assert public_drafts("bundled") == []
    for each in PUBLIC_DRAFTS:
        assert each.parameters > 0 and each.nbytes > 0 and each.licence
        assert each.text.partition(":")[0] in DRAFTERS and each.name in each.text
