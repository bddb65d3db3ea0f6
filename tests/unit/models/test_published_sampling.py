"""Sampling that publishers recommend: which row of the table fits which file."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from forerun import SamplingParams
from forerun.models.published_sampling import FAMILIES, LLAMA_CPP, published_sampling

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
THINKING = {"temperature": 0.6, "top_p": 0.95}


@pytest.mark.parametrize(
    ("name", "billions", "expected"),
    [
        ("Qwen2.5-Coder Qwen2.5 Coder 0.5B Instruct AWQ Instruct-AWQ qwen2", 0.5, QWEN | {"repetition_penalty": 1.1}),
        ("Qwen2.5-Coder Qwen2.5 Coder 1.5B Instruct GGUF qwen2 x.gguf", 1.54, QWEN | {"repetition_penalty": 1.1}),
        ("qwen2.5-7b-instruct-q4_k_m.gguf qwen2", 7.6, QWEN | {"repetition_penalty": 1.05}),
        ("Qwen3 8B qwen3 Qwen3-8B-Q4_K_M.gguf", 8.2, THINKING | {"top_k": 20}),
        ("Qwen3 30B A3B Instruct 2507 qwen3moe", 30, QWEN),
        ("Qwen3 Coder 30B A3B Instruct qwen3moe", 30, QWEN | {"repetition_penalty": 1.05}),
        ("Llama-3.2 Llama 3.2 1B Instruct llama", 1.2, {"temperature": 0.6, "top_p": 0.9}),
        ("Meta Llama 3.1 8B Instruct llama", 8, {"temperature": 0.6, "top_p": 0.9}),
        ("gemma-3 Gemma 3 270m gemma3", 0.27, {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
        ("Mistral Small 24B Instruct 2501 llama", 24, {"temperature": 0.15}),
        ("Mistral Nemo Instruct 2407 llama", 12, {"temperature": 0.3}),
        ("SmolLM2 1.7B Instruct llama", 1.7, {"temperature": 0.2, "top_p": 0.9}),
        ("SmolLM3 3B smollm3", 3, THINKING),
        ("DeepSeek R1 Distill Qwen 1.5B qwen2", 1.5, THINKING),
        ("Phi 4 Reasoning Plus phi3", 14, {"temperature": 0.8, "top_p": 0.95, "top_k": 50}),
        *(
            (name, 7, LLAMA_CPP.options)
            for name in (
                "Qwen2.5 Coder 1.5B qwen2",  # not made for chats
                "Qwen3 8B Base qwen3",
                "Qwen3.5 4B qwen35",
                "CodeLlama 34B llama",
                "gemma-2 Gemma 2 2b It gemma2",
                "Mistral 7B Instruct v0.3 llama",
                "Phi 4 Mini Instruct phi3",
                "",
            )
        ),
    ],
)
def test_the_row_of_a_name(name: str, billions: float, expected: dict[str, float]) -> None:
    assert published_sampling(name, int(billions * 1e9)).options == expected


def test_every_row_can_be_sampled_with_and_has_a_source() -> None:
    names = {each.name for each in fields(SamplingParams)}
    for row in FAMILIES:
        assert row.options.keys() <= names and SamplingParams(**row.options) and row.source
        assert re.compile(row.name)
