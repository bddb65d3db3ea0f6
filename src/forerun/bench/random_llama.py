"""A random Llama, large enough that its weights do not fit the processor's caches: the default model of timings."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch

RANDOM_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""Its configuration: 197 M parameters, small enough to measure in a minute."""


class RandomLlama:
    """A temporary folder with a random Llama in bfloat16, for as long as the block lasts.

    Args:
        context: positions that it must be able to compute.
    """

    def __init__(self, context: int = 0) -> None:
        self._context = max(context, int(RANDOM_LLAMA["max_position_embeddings"]))

    def __enter__(self) -> str:
        from transformers import LlamaConfig, LlamaForCausalLM

        self._folder = TemporaryDirectory(prefix="forerun-bench-")
        settings: dict[str, Any] = {**RANDOM_LLAMA, "max_position_embeddings": self._context}
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
        model.save_pretrained(self._folder.name)
        return self._folder.name

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()
