"""How many bytes the weights of a model will take, by the shapes of its tensors and what they will be kept in.

The shapes are those of an empty model of the configuration, which loading compares with the headers of the files.
Transformers' tensors are replaced one by one by the layers that compute (`linear.py`, the decoders): while that goes
on, one of them is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forerun.kernels.native.library import Library
from forerun.kernels.native_linear import linear_nbytes
from forerun.kernels.quantised_weight import CodeForm
from forerun.kernels.row_invariant_linear import can_pack
from forerun.models.quantising import Quantisation, form_kept

_FLOAT32 = 4
_PRODUCT = 8
"""Bytes a number that `QuantisedLinear`, which multiplies in float64, keeps beside the codes."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What weights are kept in.

    Attributes:
        dtype: of everything that is not in codes.
        device: where they lie.
        is_llama: the decoder is that of the Llama family.
        library: the native kernels, where they compute.
        quantise: what matrices are brought to; None: nothing.
        stored: by name, the form in which the files have a weight in codes, or None.
        has_adapter: an adapter is merged before anything else.
        is_triton: the Triton kernels compute it.
    """

    dtype: torch.dtype
    device: torch.device
    is_llama: bool
    library: Library | None
    quantise: Quantisation | None
    stored: Callable[[str], CodeForm | None]
    has_adapter: bool
    is_triton: bool = False

    @property
    def is_native(self) -> bool:
        """Whether all layers are computed by the native kernels."""
        return self.is_llama and self.library is not None

    def linear(self, name: str, shape: torch.Size, *, is_outer: bool) -> int:
        """Bytes of a linear layer's weight. shape: outputs, inputs. is_outer: of the output layer or the embedding."""
        if self.quantise is None:
            if self.is_native and self.library is not None:
                return linear_nbytes(self.library, shape[0], shape[1], self.dtype)
            return shape.numel() * self.dtype.itemsize
        form = self._form(name, is_outer=is_outer)
        if self.library is not None:
            return linear_nbytes(self.library, shape[0], shape[1], form)
        if self.is_triton:
            return _codes_nbytes(form, shape, is_packed=True)
        return _codes_nbytes(form, shape) + _PRODUCT * shape.numel()

    def embedding(self, name: str, shape: torch.Size) -> int:
        """Bytes of the embedding."""
        if self.is_native:
            return self.linear(name, shape, is_outer=True)
        if self.is_llama and self.quantise is not None:
            return _codes_nbytes(self._form(name, is_outer=True), shape)
        return shape.numel() * self.dtype.itemsize

    def tied_head(self, name: str, shape: torch.Size) -> int:
        """Bytes of an output layer beside the embedding whose weight it shares."""
        if self.is_native:
            return 0
        if self.is_triton:
            return 0 if self.quantise is None else self.linear(name, shape, is_outer=True)
        if self.quantise is not None:
            return _PRODUCT * shape.numel() if self.is_llama else self.linear(name, shape, is_outer=True)
        return shape.numel() * self.dtype.itemsize if can_pack(self.dtype, self.device) else 0

    def other(self, parameter: Tensor) -> int:
        """Bytes of a norm, a bias or whatever else; the Llama decoders keep them in float32 at least."""
        return parameter.numel() * max(parameter.element_size(), _FLOAT32 if self.is_llama else 0)

    def read(self, parameter: Tensor, *, is_matrix: bool) -> int:
        """Bytes of a parameter as Transformers reads it. is_matrix: it will be codes, if any are."""
        size = parameter.element_size()
        if self.has_adapter or (is_matrix and self.quantise is not None):
            size = max(size, _FLOAT32)
        return size * parameter.numel()

    def _form(self, name: str, *, is_outer: bool) -> CodeForm:
        assert self.quantise is not None
        stored = None if self.has_adapter else self.stored(name)
        return form_kept(stored, self.quantise, is_outer=is_outer)


def weight_nbytes(model: Any, keeping: Keeping, num_outputs: int | None = None) -> tuple[int, int]:
    """Bytes that a model's weights take when it is loaded, and at most while it is.

    Args:
        model: of Transformers, as `empty_model` makes it.
        num_outputs: tokens that the output layer is kept for, in rows beside the embedding's; None for all.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_streamed = keeping.is_llama and keeping.quantise is not None and not keeping.has_adapter
    kept = read = largest = 0
    for name, module, parameter in _parameters(model):
        is_embedding = module is embedding and parameter.dim() == 2
        is_matrix = _is_linear(module) and parameter.dim() == 2
        if is_embedding:
            kept += keeping.embedding(name, parameter.shape)
            if head is not None and head.weight is parameter:
                kept += _tied_head(keeping, name, parameter.shape, num_outputs)
        elif is_matrix:
            shape = _outputs_first(module, parameter)
            if module is head and num_outputs is not None:
                shape = torch.Size((num_outputs, shape[1]))
            kept += keeping.linear(name, shape, is_outer=module is head)
        else:
            kept += keeping.other(parameter)
        is_coded = is_matrix or (is_embedding and keeping.is_llama)
        size = keeping.read(parameter, is_matrix=is_coded)
        largest = max(largest, size)
        read += 0 if is_streamed and is_coded else size
    return kept, max(kept, read if not is_streamed else kept + read) + largest


def _tied_head(keeping: Keeping, name: str, shape: torch.Size, num_outputs: int | None) -> int:
    if num_outputs is None:
        return keeping.tied_head(name, shape)
    return keeping.linear(name, torch.Size((num_outputs, shape[1])), is_outer=True)


def _parameters(model: Any) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Each parameter once, with its name and the first module that has it."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}" if path else name, module, parameter


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def _outputs_first(module: nn.Module, weight: Tensor) -> torch.Size:
    return weight.shape if type(module) is nn.Linear else weight.shape[::-1]


def _codes_nbytes(form: CodeForm, shape: torch.Size, *, is_packed: bool = False) -> int:
    """Bytes of a `QuantisedWeight`. is_packed: two codes of 4 bits lie in a byte."""
    if form.group is None:
        return shape.numel() + _FLOAT32 * shape[0]
    groups = -(-shape[1] // form.group) * shape[0]
    codes = groups * form.group // 2 if is_packed and form.bits == 4 else shape.numel()
    return codes + 2 * groups * (2 if form.has_minimum else 1)
