"""Tiny models that GGUF files are written of, and what they and the files compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import gguf_experts
import gguf_latents
import gguf_recurrent
from families import VOCAB, tiny_model
from forerun import LLM, SamplingParams
from forerun.drafters import Drafter
from forerun.models import Rows, load_model

TEXT = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
# llama.cpp has no output layer beside the embedding for these
_TIED = {"tie_word_embeddings": True}
_FOUR = {"num_hidden_layers": 4}
_SIZES: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma", "gemma2", "cohere"), _TIED),
    "cohere2": {**_TIED, **_FOUR},
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": None},
    "smollm3": {**_FOUR, "no_rope_layers": None},
    "mistral": {},
    **gguf_recurrent.SIZES,
    **gguf_experts.SIZES,
    **gguf_latents.SIZES,
}


def tiny(family: str, **options: Any) -> PreTrainedModel:
    model = tiny_model(family, **{**_SIZES.get(family, {}), **options})
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # others take no float64
    return model


def ours(path: Path, dtype: str = "float32", **options: Any) -> torch.Tensor:
    model = load_model(path, dtype, **options)
    assert model.kind == "fused"
    return model.forward([Rows(model.new_cache(), TEXT)]).logits


@torch.inference_mode()
def theirs(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([TEXT])).logits[0]
    return logits.to(model.dtype)  # Mamba 2's are float32


def answers(path: Path, drafter: Drafter | None) -> list[Any]:
    """Two greedy answers of a file's model, as tokens."""
    prompts, params = [TEXT[:12] * 3, TEXT[12:30]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    results: Any = LLM(load_model(path), drafter, num_draft_tokens=4).generate(prompts, params)
    return [each.token_ids for each in results]
