"""Which drafters are tried for a target, and why others are not."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.drafters.registry import DRAFTERS
from forerun.lab.tune.arms import ArmFailedError, TuningArm
from forerun.lab.tune.candidates import candidates, first_arms, further_arms, hybrids
from forerun.lab.tune.public_drafts import PUBLIC_DRAFTS, public_drafts


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


def test_named_drafters_are_tried_beside_the_default_alone() -> None:
    texts, refused = candidates("owner/model", ["recycling", "eagle:model=x"], None, bind)
    assert texts == ["suffix", "recycling"] and list(refused) == ["eagle:model=x"]


def test_hybrids_are_of_the_best_copier_and_the_best_model() -> None:
    assert hybrids(["draft-model", "suffix", "prompt-lookup"]) == [
        "hybrid:sources=suffix+draft-model",
        "hybrid:sources=suffix+draft-model,mode=merge",
    ]
    assert hybrids(["a/draft", "prompt-lookup"])[0] == "hybrid:sources=prompt-lookup+a/draft"
    assert hybrids(["suffix", "recycling"]) == []


def test_further_arms_are_those_of_the_best_drafters() -> None:
    ranked = [TuningArm("draft-model", 4), TuningArm("recycling", 16), TuningArm("suffix"), TuningArm("lookahead")]
    arms = further_arms(ranked)
    assert {arm.num_draft_tokens for arm in arms if arm.drafter == "recycling"} == {8, 32}
    assert {arm.num_draft_tokens for arm in arms if arm.drafter == "suffix"} == {2, 8}
    assert {"hybrid:sources=suffix+draft-model", "draft-model:quantize=int8"} <= {arm.drafter for arm in arms}
    assert not any(arm.drafter == "lookahead" for arm in arms)


def test_in_a_hurry_only_what_belongs_to_the_target_is_tried() -> None:
    texts, refused = candidates("bundled", [], None, lambda text: None, quick=True)  # type: ignore[arg-type, return-value]
    assert texts[:2] == ["draft-model", "suffix"] and len(texts) == 5 and not refused


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
