"""Devices and vocabularies in training: where tensors live, sizes of a forward, types of ids."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.train.defaults import AUTO
from forerun.utils.device import bfloat16_features, is_quick_at_bfloat16, resolve_device
from forerun.utils.machine import glibc_function

MICRO_TOKENS = {"cpu": 4_096, "cuda": 131_072, "mps": 4_096}
"""Largest number of tokens in one forward; a larger batch is accumulated."""
_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 30, "mps": 1 << 25}
"""Largest number of logits that one forward of a target holds."""
LOSSES_READ_EVERY = {"cpu": 1, "cuda": 16, "mps": 1}
"""Steps whose losses are read together: reading one waits until the accelerator is done."""
SHAPE_STEP = 64
"""Numbers of rows that vary are padded to multiples of it: a CPU's products are compiled for each shape, and kept."""
_REUSED_BYTES = 32 << 20
"""Tensors up to this size are kept for reuse; glibc allows no more."""
_GLIBC_TRIM = -1
_GLIBC_TOP_PAD = -2
_GLIBC_MMAP = -3
_GLIBC_ARENAS = -8


def reuse_memory() -> None:
    """Have the C library keep freed memory, where it is glibc.

    By default every large tensor is returned to the system and allocated again, and its pages are cleared each time:
    elementwise operations on logits took three times as long.
    """
    mallopt = glibc_function("mallopt")
    if mallopt is None:
        return
    for option, value in (
        (_GLIBC_MMAP, _REUSED_BYTES),
        (_GLIBC_TRIM, 2**31 - 1),
        (_GLIBC_TOP_PAD, 8 * _REUSED_BYTES),
        (_GLIBC_ARENAS, 1),  # those of threads are too small for it
    ):
        mallopt(option, value)


def training_device(name: str | None) -> torch.device:
    """Return the device of this name; None stands for the first CUDA device, or the CPU without one.

    Raises:
        ConfigError: there is no such device.
    """
    return resolve_device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def product_type(name: str, where: torch.device) -> torch.dtype:
    """Return the number format of products of this name; for "auto" what the device is quick at."""
    if name != AUTO:
        return torch.float32 if name == "float32" else torch.bfloat16
    quick = is_quick_at_bfloat16() if where.type == "cpu" else where.type == "cuda"
    return torch.bfloat16 if quick else torch.float32


def why_auto(dtype: torch.dtype, where: torch.device) -> str:
    """Return why "auto" stands for this number format on a device."""
    if where.type != "cpu":
        return f"the device is {where.type}"
    if dtype == torch.bfloat16:
        return f"the processor has {' and '.join(bfloat16_features())}"
    return "the processor has no instructions for bfloat16"


def products_in(dtype: torch.dtype, where: torch.device) -> torch.autocast:
    """Return the block in which products of float32 weights are of this type."""
    return torch.autocast(where.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def device_name(where: torch.device) -> str:
    """Return the device's name, for the card."""
    return torch.cuda.get_device_name(where) if where.type == "cuda" else where.type


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters."""
    return next(model.parameters()).device


def micro_tokens(model: PreTrainedModel, columns: int | None = None) -> int:
    """Return the largest number of tokens in one forward that keeps so many logits of each; None: all."""
    where = device_of(model).type
    return max(1, min(MICRO_TOKENS[where], _LOGITS[where] // (columns or model_vocabulary(model))))


def copy_to_device(tensor: Tensor, where: torch.device) -> Tensor:
    """Copy `tensor` to `where`, without waiting for work that is queued there."""
    if where.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(where)
    return tensor.pin_memory().to(where, non_blocking=True)


def id_type(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return uint16 where every id fits, else uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def columns_of(tokens: Tensor, vocab_size: int) -> Tensor:
    """Return int64 [vocab_size]: each token's index among these, -1 for the others."""
    columns = torch.full((vocab_size,), -1)
    columns[tokens] = torch.arange(len(tokens))
    return columns


def model_vocabulary(model: PreTrainedModel) -> int:
    """Return the number of the model's logits; some models have more than their tokenizer has tokens."""
    return len(model.get_input_embeddings().weight)


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token that ends a text.

    Raises:
        ConfigError: the tokenizer has none.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError(
            f"The tokenizer of {tokenizer.name_or_path} has no end-of-text token, which separates the training texts. "
            "Set eos_token in its tokenizer_config.json."
        )
    return int(end)
