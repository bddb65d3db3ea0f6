"""Every family of the fused decoder beside Transformers, in any batch, quantized, with drafters and adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel

from families import DESCRIBED, VOCAB, tiny_model
from forerun import LLM, Medusa, SamplingParams, Suffix
from forerun.drafters import Drafter
from forerun.drafters.early_exit import EarlyExit
from forerun.export.quantized import export_quantized
from forerun.models import Model, Rows, load_model
from medusa_heads import random_medusa

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
FEW = ("int8", "int4")

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 128}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in DESCRIBED),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    ("qwen3", {"rope_parameters": YARN}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("gemma3_text", {"head_dim": 32, "num_key_value_heads": 1}),
    ("starcoder2", {"sliding_window": 24, "hidden_act": "gelu"}),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
]


DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    "suffix": lambda target: Suffix(),
    "early exit": lambda target: EarlyExit(1),
    "head": lambda target: Medusa(random_medusa(target, draft_vocab_size=60)),
}


def names(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *variant[1]])


@pytest.fixture(params=VARIANTS, ids=map(names, VARIANTS))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    family, options = request.param
    model = tiny_model(family, **options)
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def in_parts(model: Model, text: list[int], sizes: list[int]) -> torch.Tensor:
    cache, logits, done = model.new_cache(), [], 0
    for size in sizes:
        logits.append(model.forward([Rows(cache, text[done : done + size])]).logits)
        cache.commit(range(size))
        done += size
    return torch.cat(logits)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 2e-5), ("float32", 1e-4)])
def test_logits_are_those_of_transformers(dtype: str, tolerance: float, made: tuple[PreTrainedModel, Path]) -> None:
    reference, folder = made
    model = load_model(folder, dtype)
    assert model.kind == "fused"
    text = tokens(70)
    with torch.inference_mode():
        expected = reference.to(getattr(torch, dtype))(torch.tensor([text])).logits[0]
    torch.testing.assert_close(in_parts(model, text, [50, 1, 4, 15]), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("dtype", "quantize"), [("float32", None), ("bfloat16", None), *((None, q) for q in FEW)])
def test_bits_are_the_same_in_any_batch(dtype: str | None, quantize: Any, made: tuple[PreTrainedModel, Path]) -> None:
    model = load_model(made[1], dtype or "bfloat16", quantize=quantize)
    assert model.kind == "fused" and model.exactness.exact
    text, other = tokens(290), tokens(61, 1)
    one_by_one = in_parts(model, text, [240, *[1] * 50])
    assert torch.equal(in_parts(model, text, [17, 223, 4, 9, 2, 17, 6, 8, 4])[240:], one_by_one[240:])
    beside = model.forward([Rows(model.new_cache(), other), Rows(model.new_cache(), text)]).logits
    assert torch.equal(beside[61 + 240 :], one_by_one[240:])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("quantize", [None, *FEW])
def test_speculation_says_what_plain_decoding_says(
    quantize: Any, drafter: str, made: tuple[PreTrainedModel, Path]
) -> None:
    target = load_model(made[1], "bfloat16", quantize=quantize)
    prompts = [tokens(20) * 2, tokens(9, 1), tokens(30, 2) * 2]
    params = [replace(GREEDY, logprobs=1), replace(GREEDY, temperature=0.9, seed=3, logprobs=1), GREEDY]

    def answers(drafter: Drafter | None) -> list[Any]:
        results: Any = LLM(target, drafter, num_draft_tokens=4).generate(prompts, params)
        return [(each.token_ids, each.logprobs) for each in results]

    assert answers(DRAFTERS[drafter](target)) == answers(None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("quantize", FEW)
def test_a_quantized_folder_computes_what_quantizing_at_load_does(
    quantize: Any, made: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    export_quantized(made[1], tmp_path / "out", quantize)
    ours, text = load_model(tmp_path / "out"), tokens(30)
    assert ours.kind == "fused"
    assert torch.equal(in_parts(ours, text, [30]), in_parts(load_model(made[1], quantize=quantize), text, [30]))


@pytest.mark.sampled(4)
def test_an_adapter_is_merged(made: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    reference, folder = made
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    wrapped = peft.get_peft_model(reference.to(torch.float32), config)
    wrapped.save_pretrained(tmp_path / "adapter")
    model, text = load_model(folder, "float32", adapter=tmp_path / "adapter"), tokens(30)
    with torch.inference_mode():
        expected = wrapped(torch.tensor([text])).logits[0]
    assert model.kind == "fused"
    torch.testing.assert_close(in_parts(model, text, [30]), expected, atol=2e-3, rtol=2e-3)
