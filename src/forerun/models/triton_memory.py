"""The memory that a model's steps are computed in by the Triton kernels, which is taken when the model is loaded."""

from __future__ import annotations

from typing import Any

import torch

from forerun.kernels.triton.product_cut import Cut
from forerun.kernels.triton.step_arrays import HEAD_ROWS, MAX_ROWS, TILE, Capacity
from forerun.models.configuration import context_length
from forerun.models.llama import head_shape

_FLOAT32, _WORD = 4, 8


def step_nbytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the memory that a step computes in (`triton_layers.TritonStep`) and of the rotations.

    Args:
        config: of Transformers, of the Llama family. dtype: of what is not in codes.
    """
    heads, kv_heads, width = head_shape(config)
    hidden: int = config.hidden_size
    intermediate: int = config.intermediate_size
    vocab: int = config.vocab_size
    reach = context_length(config) + MAX_ROWS
    capacity = Capacity.of(reach, max(1, TILE // (heads // kv_heads)))
    shapes = [((heads + 2 * kv_heads) * width, hidden), (hidden, heads * width), (2 * intermediate, hidden)]
    shapes.append((hidden, intermediate))
    sums: int = max(MAX_ROWS * out * Cut.of(out, size, dtype.itemsize).splits for out, size in shapes)
    sums = max(sums, HEAD_ROWS * vocab * Cut.of(vocab, hidden, dtype.itemsize).splits)
    floats = sums + MAX_ROWS * hidden + HEAD_ROWS * (hidden + vocab)
    floats += capacity.items * kv_heads * TILE * (width + 2)
    narrow = MAX_ROWS * (hidden + 2 * heads * width + intermediate)
    return _FLOAT32 * (floats + reach * width) + dtype.itemsize * narrow + _WORD * capacity.words
