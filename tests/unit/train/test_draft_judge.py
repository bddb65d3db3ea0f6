"""Held-out acceptance of a draft is what a slow simulation of speculation finds along the target's own text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.models import load_model, load_tokenizer, load_transformers_model
from forerun.train.data.packed import PackedDocument, pack
from forerun.train.draft.judge import HeldOutRows
from forerun.train.draft.samples import Labels, mask_unproposed, restrict
from forerun.utils import workloads

K = 3


@pytest.mark.parametrize("is_cut", [False, True])
def test_acceptance_is_that_of_greedy_chains(is_cut: bool, tmp_path: Path) -> None:
    target = load_model("bundled", "float32")
    llm = LLM(target, None, tokenizer=load_tokenizer("bundled"))
    prompts = [case.prompt[:60] for case in workloads.load_workload("code")][:3]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    documents = [PackedDocument([5, 6, 7], [True] * 3)]
    for result in results:
        wanted = [False] * len(result.prompt_token_ids) + [True] * len(result.token_ids)
        documents.append(PackedDocument([*result.prompt_token_ids, *result.token_ids], wanted, held_out=True))
    rows = pack(documents, tmp_path / "rows", window=127, vocab_size=target.vocab_size, made_from={})

    draft = load_transformers_model("bundled-draft", "float32").requires_grad_(False)
    vocabulary = torch.arange(0, target.vocab_size, 2).sort().values if is_cut else None
    if vocabulary is not None:
        restrict(draft, vocabulary)
    labels = Labels(target, rows.held_out(), tmp_path / "labels", 8, vocabulary, "held-out")
    labels.write(lambda *_: None, len(labels))
    judge = HeldOutRows(labels, K)
    found, drawn = judge.acceptance(draft)
    steps, accepted = 0, [0] * K
    with mask_unproposed(draft):
        for result in results:
            answer = result.token_ids
            at = 0
            while at + K < len(answer):
                text = [*result.prompt_token_ids, *answer[:at]]
                run = 0
                while run < K:
                    proposed = int(draft(torch.tensor([text]), use_cache=False).logits[0, -1].argmax())
                    if proposed != answer[at + run]:
                        break
                    accepted[run] += 1
                    text.append(proposed)
                    run += 1
                steps += 1
                at += run + 1
    assert found.mean_acceptance_length == pytest.approx(1 + sum(accepted) / steps)
    assert found.rate == pytest.approx(sum(accepted) / (steps * K)) and found.tokens == 3 * 24
    assert judge.length(draft) == found.mean_acceptance_length > 1
    assert found.per_position[0] == pytest.approx(accepted[0] / steps)
    assert (found.temperature, drawn.temperature) == (0.0, 1.0) and 0 < drawn.rate < 1
