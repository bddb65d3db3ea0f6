"""The real chat model, where it is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.drafters.registry import DRAFTERS
from forerun.models import load_model

CHAT = [{"role": "user", "content": "Write the numbers from one to ten, then write them again."}]
GREEDY = SamplingParams(max_tokens=16, temperature=0)


def test_it_is_exact_and_stops_where_its_template_says(smollm2_file: Path) -> None:
    llm = LLM(smollm2_file, drafter="suffix")
    assert llm.exact and llm.target.num_parameters == 134_515_008
    assert llm.target.context_length == 8192 and llm.target.vocab_size == 49152
    assert llm.tokenizer.convert_tokens_to_ids("<|im_end|>") in llm.target.eos_token_ids
    model = llm.target
    assert model.packed_weights["model.layers.0.self_attn.q_proj.weight"].type_name == "Q4_1"


@pytest.mark.slow
def test_every_drafter_that_runs_on_it_gives_plain_decodings_tokens(smollm2_file: Path) -> None:
    target = load_model(smollm2_file)
    plain = LLM(smollm2_file, None)
    expected = plain.generate(CHAT, GREEDY).choices[0].token_ids
    specs = ["suffix", "prompt-lookup", "lookahead", "recycling", "early-exit", f"draft-model:model={smollm2_file}"]
    specs += [f"draft-tree:model={smollm2_file}", f"staged:model={smollm2_file}", "hybrid:sources=suffix+recycling"]
    assert {spec.partition(":")[0] for spec in specs} <= set(DRAFTERS)
    for spec in specs:
        llm = LLM(target, spec, tokenizer=plain.tokenizer, num_draft_tokens=4)
        assert llm.generate(CHAT, GREEDY).choices[0].token_ids == expected, spec
