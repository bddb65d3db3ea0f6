r"""forerun's look-ups and draft models inside vLLM, beside its own methods. Run by hand, with two paths:

    FORERUN_VLLM_PYTHON=ENV/bin/python FORERUN_VLLM_MODEL=FOLDER \
      make test-all ARGS='-s tests/integration/test_vllm_bridge.py'

The folder is a chat model's, which vLLM serves in float32. FORERUN_VLLM_MORE may name further folders of packages for
that Python, such as one with arctic-inference, without which vLLM has no suffix decoding. docs/scaling.md has what it
gave.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config import BUNDLED_MODELS
from forerun.drafters.models.head_files.folder import save_head
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.export.vllm import export_vllm, export_vllm_draft
from forerun.models import load_model, load_tokenizer
from forerun.utils.workloads import categories_in_turn, load_workload
from heads import fitted_head
from vllm_peer import MISSING, PYTHON, assert_same_up_to_a_near_tie, theirs

MODEL, MORE = os.environ.get("FORERUN_VLLM_MODEL", ""), os.environ.get("FORERUN_VLLM_MORE", "")
K, NUM_PROMPTS, MAX_TOKENS = 6, int(os.environ.get("FORERUN_VLLM_PROMPTS", "8")), 96
NUM_ASKED = 4
"""Prompts of two ranks; a head is fitted to others."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason=MISSING)]
needs_model = pytest.mark.skipif(
    not MODEL, reason="no chat model is given: forerun export hf smollm2 FOLDER, and FORERUN_VLLM_MODEL=FOLDER"
)


def custom(drafter: str) -> dict[str, Any]:
    """vLLM's configuration of one of forerun's drafters."""
    return {
        "speculative": {
            "method": "custom_class",
            "model": "forerun.integrations.vllm.Proposer",
            "num_speculative_tokens": K,
        },
        "additional": {"forerun": {"drafter": drafter}},
    }


def methods() -> Iterator[tuple[str, dict[str, Any]]]:
    yield (
        "vLLM, ngram",
        {
            "speculative": {
                "method": "ngram",
                "num_speculative_tokens": K,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
            }
        },
    )
    if MORE:
        yield "vLLM, suffix", {"speculative": {"method": "suffix", "num_speculative_tokens": K}}
    for drafter in ("prompt-lookup", "suffix", "hybrid:sources=suffix+prompt-lookup"):
        yield f"forerun, {drafter}", custom(drafter)


def line(name: str, found: dict[str, Any], same: int) -> str:
    tokens = sum(map(len, found["token_ids"]))
    text = f"| {name} | {tokens / found['forwards']:.3f} | {tokens / found['seconds']:.1f} | {same} |"
    for seconds in (found["propose"], found["propose_cpu"]):
        micro = [1e6 * each for each in seconds]
        text += f" {median(micro):.0f}, {quantiles(micro, n=100)[98]:.0f} |" if micro else " |"
    return text


@needs_model
def test_look_ups_in_vllm() -> None:
    torch.set_num_threads(1)
    llm = LLM(MODEL, drafter=None, dtype="float32")
    cases = categories_in_turn(load_workload("questions"))[:NUM_PROMPTS]
    prompts = [llm.encode(case.opening)[-700:] for case in cases]
    plain = theirs(Path(MODEL), prompts, None, max_tokens=MAX_TOKENS)
    print("\n| method | tokens a forward | tokens/s | texts as plain | propose, us: median, p99 | of these computing |")
    print("|---|---|---|---|---|---|")
    print(line("vLLM, plain", plain, NUM_PROMPTS), flush=True)
    rates = {}
    for name, asked in methods():
        found = theirs(Path(MODEL), prompts, max_tokens=MAX_TOKENS, **asked)
        for prompt, ours, other in zip(prompts, plain["token_ids"], found["token_ids"], strict=True):
            assert_same_up_to_a_near_tie(llm, prompt, ours, other)
        same = sum(a == b for a, b in zip(plain["token_ids"], found["token_ids"], strict=True))
        rates[name] = sum(map(len, found["token_ids"])) / found["forwards"]
        print(line(name, found, same), flush=True)
    best = max(rate for name, rate in rates.items() if name.startswith("vLLM"))
    assert rates["forerun, suffix"] >= best


def test_the_bundled_pair_in_vllm(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    exported = export_vllm_draft("bundled-draft", tmp_path / "draft", "bundled", dtype="float32", num_draft_tokens=K)
    llm = LLM("bundled", drafter="bundled-draft", num_draft_tokens=K, dtype="float32")
    cases = load_workload("code", NUM_PROMPTS)
    prompts = [llm.encode(case.prompt)[:200] for case in cases]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    answers = [llm.generate(each, params).choices[0] for each in prompts]
    found = theirs(BUNDLED_MODELS["bundled"], prompts, exported.speculative, max_tokens=MAX_TOKENS)
    for prompt, answer, other in zip(prompts, answers, found["token_ids"], strict=True):
        assert_same_up_to_a_near_tie(llm, prompt, list(answer.token_ids), other)
    ours = sum(each.stats.num_accepted_tokens for each in answers) / sum(
        each.stats.num_draft_tokens for each in answers
    )
    accepted, drafted = (found["counters"][f"vllm:spec_decode_num_{each}_tokens"] for each in ("accepted", "draft"))
    print(f"\nacceptance rate at K = {K}: forerun {ours:.3f}, vLLM {accepted / drafted:.3f}; {line('vLLM', found, 0)}")
    assert accepted / drafted >= 0.9 * ours > 0


def exported(kind: str, folder: Path) -> dict[str, Any]:
    """vLLM's configuration of a draft of the bundled target whose heads two ranks can share."""
    if kind == "draft model":  # the bundled draft has five heads, so the target drafts for itself
        return export_vllm_draft("bundled", folder / "out", "bundled", dtype="float32", num_draft_tokens=3).speculative
    model = load_model("bundled", "float32")
    tokenizer = load_tokenizer("bundled")
    texts = [tokenizer(case.prompt)["input_ids"][:150] for case in load_workload("code", 16)[NUM_ASKED:]]
    head = fitted_head(model, texts, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=64)
    save_head(folder / "head", head.config, head.tensors, fingerprint=target_fingerprint(model))
    return export_vllm(folder / "head", folder / "out", "bundled", dtype="float32", num_draft_tokens=3).speculative


@pytest.mark.parametrize("kind", ["draft model", "head"])
def test_two_ranks_of_vllm(kind: str, tmp_path: Path) -> None:
    """The tokens of one rank, up to near-ties: two ranks add in another order."""
    torch.set_num_threads(1)
    speculative = exported(kind, tmp_path)
    llm = LLM("bundled", drafter=None, dtype="float32")
    prompts = [llm.encode(case.prompt)[:200] for case in load_workload("code", NUM_ASKED)]
    one, two = (
        theirs(BUNDLED_MODELS["bundled"], prompts, speculative, max_tokens=MAX_TOKENS, tensor_parallel_size=count)
        for count in (1, 2)
    )
    for prompt, ours, other in zip(prompts, one["token_ids"], two["token_ids"], strict=True):
        assert_same_up_to_a_near_tie(llm, prompt, ours, other)
    drafted, accepted = (two["counters"][f"vllm:spec_decode_num_{each}_tokens"] for each in ("draft", "accepted"))
    same = sum(a == b for a, b in zip(one["token_ids"], two["token_ids"], strict=True))
    print(f"\n{kind}, two ranks: {same} of {len(prompts)} texts as of one, {accepted} of {drafted} tokens accepted")
    assert accepted > drafted / 30 > 0
