"""Which types of tensors are read, and how many bytes they take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.errors import ModelLoadError, UnsupportedModelError

READ_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")


def tensor_bytes(number: int, shape: Sequence[int], what: str, place: str, remedy: str) -> tuple[str, int]:
    """A type's name, and the bytes that a tensor of it takes.

    Args:
        number: of the type, as the file writes it.
        shape: rows first; a row is packed in blocks.
        what: the tensor, and the file it is in, for messages.

    Raises:
        UnsupportedModelError: it is not one of READ_TYPES.
        ModelLoadError: rows are not whole blocks, or there is no such type.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelLoadError(f"{place}: {what} is of type {number}, which is none. {remedy}") from None
    if kind.name not in READ_TYPES:
        raise UnsupportedModelError(
            f"{place}: {what} is stored as {kind.name}, which forerun does not read. Take a file of the model whose "
            f"tensors are {', '.join(READ_TYPES)}."
        )
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise ModelLoadError(
            f"{place}: {what} has rows of {shape[-1]:,} numbers, and {kind.name} packs {block_size} together. {remedy}"
        )
    return kind.name, math.prod(shape) // block_size * block_bytes
