"""A random Llama, large enough that its weights do not fit the processor's caches: the default model of timings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def random_llama(context: int = 0) -> Iterator[str]:
    """A temporary folder with a random Llama in bfloat16, for as long as the block lasts.

    Args:
        context: positions that it must be able to compute.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    positions = max(context, int(RANDOM_LLAMA["max_position_embeddings"]))
    settings: dict[str, Any] = {**RANDOM_LLAMA, "max_position_embeddings": positions}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    with TemporaryDirectory(prefix="forerun-bench-") as folder:
        model.save_pretrained(folder)
        yield folder
