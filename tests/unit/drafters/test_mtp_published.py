"""MTP layers in the layouts of their publishers: against Transformers' modules, and through the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forerun import LLM, Mtp
from forerun.drafters.build import automatic_drafter
from forerun.drafters.models.mtp.checkpoint_format import read_mtp
from forerun.models import load_model
from head_rig import GREEDY
from heads import logits_of, states_of, tokens
from mtp_layers import DEEPSEEK, MIMO, QWEN, QWEN_STACKED, Layout, expected_logits, with_mtp

DRAFTED = [5, 9, 2]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}


class Publication(NamedTuple):
    family: str
    layout: Layout
    options: dict[str, Any]
    extras: str


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
PUBLISHED = {
    "Qwen3-Next": Publication(
        "qwen3_next",
        QWEN,
        {**EXPERTS, "shared_expert_intermediate_size": 48},
        "normed output, norms of queries and keys, gated attention, experts",
    ),
    "Qwen3.5 MoE": Publication("qwen3_5_moe_text", QWEN_STACKED, {"mtp_num_hidden_layers": 1}, "experts"),
    "MiMo": Publication("qwen2", MIMO, {"num_hidden_layers": 2}, "normed output"),
    "GLM 4.5 MoE": Publication("glm4_moe", DEEPSEEK, {}, "norms of queries and keys, experts"),
    "GLM 4.7 Flash": Publication("glm4_moe_lite", DEEPSEEK, {}, "latent attention, experts"),
    "DeepSeek V3": Publication("deepseek_v3", DEEPSEEK, {"rope_parameters": YARN}, "latent attention, experts"),
}


BY_DEFAULT = ("Qwen3-Next", "MiMo", "DeepSeek V3")


@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.slow), "float32"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in PUBLISHED]
)
def test_a_layer_is_that_of_its_publisher_and_drafts(name: str, dtype: str, tmp_path: Path) -> None:
    family, layout, options, extras = PUBLISHED[name]
    folder = with_mtp(tmp_path, family, layout=layout, **(options or {"num_hidden_layers": 2}))
    target = load_model(folder, dtype)
    head, text = read_mtp(target, str(folder)), tokens(17, 1)
    assert extras in ", ".join(head.config.extras())
    states = states_of(target, head, text[:-1])[:, 0].double()
    expected = expected_logits(folder, text, DRAFTED, states, family, layout)
    found = logits_of(target, head, text, DRAFTED).double()
    assert (found - expected).abs().max() < (1e-5 if dtype == "float64" else 2e-4)
    for params in (GREEDY, replace(GREEDY, temperature=0.9, seed=4)):
        prompts = [text, text[:5]]
        plain: Any = LLM(target, None).generate(prompts, params)
        drafted: Any = LLM(target, Mtp(), num_draft_tokens=3).generate(prompts, params)
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
        assert all(each.stats.num_draft_tokens > 0 for each in drafted)
    assert automatic_drafter(str(folder)) == "hybrid:sources=suffix+mtp"
