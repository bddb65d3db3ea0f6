"""The tensors of a head, compared with its configuration: names, shapes, number formats, values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from forerun.files.json_file import ErrorType
from forerun.heads.config import HeadConfig

FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Number formats of a head's tensors, and how safetensors files write them."""


class Form(Protocol):
    """What a tensor that is not read yet tells, in the form of safetensors."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class Kept:
    """A tensor in memory in the form of safetensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return FLOATS.get(self._tensor.dtype, str(self._tensor.dtype).removeprefix("torch."))


def unset_tensors(config: HeadConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every trained tensor of a head, filled with NaN: what nobody sets can be neither saved nor loaded."""
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in config.tensors().items()}


def check_forms(config: HeadConfig, found: Mapping[str, Form], place: str, error: ErrorType, remedy: str) -> None:
    """Compare names, shapes and number formats with what the configuration asks for.

    Raises:
        error: names the first tensor that is missing, too many, or of another shape or number format.
    """
    wanted = config.tensors()
    refuse_others(found, wanted, place, error, remedy)
    for name, shape in wanted.items():
        if name not in found:
            raise error(f"{place}: the tensor {name} {list(shape)} is missing. {remedy}")
        check_shape(name, found[name], shape, place, error, remedy)


def refuse_others(found: Collection[str], wanted: Collection[str], place: str, error: ErrorType, remedy: str) -> None:
    """Refuse tensors that a head has no use for: to leave one out would change what it computes."""
    for name in sorted(set(found) - set(wanted)):
        if name.endswith(".bias"):
            raise error(f"{place}: {name} is a bias, and linear layers of heads have none here. {remedy}")
        raise error(f"{place}: the tensor {name[:100]} is none of such a head's. {remedy}")


def check_shape(name: str, found: Form, shape: Sequence[int], place: str, error: ErrorType, remedy: str) -> None:
    """Compare one tensor's shape, and whether it is of floating point numbers."""
    if list(found.get_shape()) != list(shape):
        raise error(
            f"{place}: the tensor {name} has shape {list(found.get_shape())}, and must have {list(shape)}. {remedy}"
        )
    if found.get_dtype() not in FLOATS.values():
        raise error(
            f"{place}: the tensor {name} is stored as {found.get_dtype()}, but must be one of "
            f"{', '.join(FLOATS.values())}. {remedy}"
        )


def check_values(tensors: Mapping[str, Tensor], place: str, error: ErrorType, remedy: str) -> None:
    """Refuse NaN, which new weights begin as, and infinity.

    Raises:
        error: names the first tensor that holds any.
    """
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            raise error(
                f"{place}: the tensor {name} holds {count:,} numbers that are NaN or infinite, as weights that were "
                f"never set are. {remedy}"
            )


def checked_d2t(d2t: Tensor | None, config: HeadConfig, place: str, error: ErrorType, remedy: str) -> Tensor | None:
    """The offsets as int64; None where the head proposes every token, of which offsets of zero say the same.

    Args:
        d2t: [draft_vocab_size] of a whole-number type: the target's id of draft token i is i + d2t[i].

    Raises:
        error: they are missing, of another shape or type, out of the target's vocabulary, or two are of one token.
    """
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if d2t is None:
        if size < vocab_size:
            raise error(
                f"{place}: d2t is missing, which says what the {size:,} output tokens of the head are among the "
                f"target's {vocab_size:,}. {remedy}"
            )
        return None
    if list(d2t.shape) != [size] or d2t.dtype not in (torch.int16, torch.int32, torch.int64):
        raise error(
            f"{place}: d2t is {list(d2t.shape)} of {str(d2t.dtype).removeprefix('torch.')}, but must be [{size}] of "
            f"int32 or int64. {remedy}"
        )
    offsets = d2t.to("cpu", torch.int64)
    # compared before they are added: an offset near the end of int64 would wrap
    low = -torch.arange(size)
    if bool(((offsets < low) | (offsets >= low + vocab_size)).any()):
        raise error(f"{place}: d2t leads to tokens outside of the target's {vocab_size:,}. {remedy}")
    if len(set((torch.arange(size) + offsets).tolist())) < size:
        raise error(f"{place}: d2t gives two output tokens of the head the same token of the target. {remedy}")
    return None if size == vocab_size and not bool(offsets.any()) else offsets
