"""Our heads in vLLM: the same greedy tokens as ours, and about our acceptance. Run by hand, with two paths:

    FORERUN_VLLM_PYTHON=ENV/bin/python FORERUN_VLLM_HEADS=HEAD:HEAD make test-all ARGS=tests/integration/test_vllm.py

The heads are trained ones of the bundled target that the form can say. docs/vllm.md has what it gave.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config import BUNDLED_MODELS
from forerun.drafters.models.head_files.folder import load_head
from forerun.export.vllm import export_vllm
from forerun.utils.workloads import load_workload
from vllm_peer import MISSING, PYTHON, assert_same_up_to_a_near_tie, theirs

HEADS = os.environ.get("FORERUN_VLLM_HEADS", "")
MAX_TOKENS, NUM_DRAFT_TOKENS, NUM_PROMPTS = 64, 3, 6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason=MISSING),
    pytest.mark.skipif(not HEADS, reason="no heads are given: FORERUN_VLLM_HEADS=FOLDER:FOLDER, of forerun train"),
]


def prompts(llm: LLM) -> list[list[int]]:
    cases = load_workload("code", NUM_PROMPTS)
    return [llm.encode(case.prompt)[:200] for case in cases]


@pytest.mark.parametrize("head", HEADS.split(":"))
def test_a_head_of_ours_in_vllm(head: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    exported = export_vllm(Path(head), tmp_path / "out", "bundled", dtype="float32", num_draft_tokens=NUM_DRAFT_TOKENS)
    drafter = load_head(Path(head)).config.kind.lower().split("-")[0]
    llm = LLM("bundled", drafter=f"{drafter}:model={head}", num_draft_tokens=NUM_DRAFT_TOKENS, dtype="float32")
    ids = prompts(llm)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    answers = [llm.generate(each, params).choices[0] for each in ids]
    found = theirs(BUNDLED_MODELS["bundled"], ids, exported.speculative, max_tokens=MAX_TOKENS)
    tokens, counters = found["token_ids"], found["counters"]
    for prompt, answer, other in zip(ids, answers, tokens, strict=True):
        assert_same_up_to_a_near_tie(llm, prompt, list(answer.token_ids), other)
    ours = sum(each.stats.num_accepted_tokens for each in answers) / sum(
        each.stats.reached_per_position[0] for each in answers
    )
    accepted, drafts = (counters[f"vllm:spec_decode_num_{what}"] for what in ("accepted_tokens", "drafts"))
    same = sum(list(answer.token_ids) == other for answer, other in zip(answers, tokens, strict=True))
    print(
        f"\n{head}: {same} of {len(ids)} answers the same to the last token, the others up to a near-tie; accepted "
        f"tokens a draft: ours {ours:.3f}, vLLM {accepted / drafts:.3f} ({accepted} in {drafts}), by position "
        f"{counters['vllm:spec_decode_num_accepted_tokens_per_pos']}"
    )
    assert accepted / drafts >= 0.9 * ours > 0
