"""The heads that come with forerun: found without options, small, and right now and then."""

from __future__ import annotations

import pytest

from forerun import LLM, SamplingParams
from forerun.config import SHIPPED_HEADS
from forerun.models import load_model, load_tokenizer
from forerun.utils import workloads

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def test_their_weights_are_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED_HEADS.glob("*/*/model.safetensors")) < 8 * 2**20


@pytest.mark.parametrize("name", ["eagle", "eagle-tree", "block", "medusa", "medusa-tree"])
def test_the_bundled_targets_draft(name: str) -> None:
    target, tokenizer = load_model("bundled"), load_tokenizer("bundled")
    prompts = [case.prompt for case in workloads.load_workload("code", 2)]
    plain = LLM(target, None, tokenizer=tokenizer).generate(prompts, GREEDY)
    drafted = LLM(target, name, num_draft_tokens=3, tokenizer=tokenizer).generate(prompts, GREEDY)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert sum(each.stats.num_accepted_tokens for each in drafted) >= 8
