"""Layers made of a model's weights while these stream, each kept as the plan says (`models/weight_plan.py`): a float
weight exists only while it is quantized or packed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ModelLoadError
from forerun.kernels.block_weight import BlockWeight
from forerun.kernels.cpu.linear import Form, NativeLinear
from forerun.kernels.quantize import QuantizedFormat, QuantizedWeight, quantize_int4, quantize_int8
from forerun.kernels.torch.linear import QuantizedEmbedding
from forerun.models.fused.experts import apart
from forerun.models.linear import Linear, LinearPart, make_quantized_linear
from forerun.models.loading.fused_modules import by_parameter
from forerun.models.loading.weights import TensorSlice
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.weight_plan import WeightPlan
from forerun.utils.machine import return_freed_memory

METHOD, LAYOUT = "forerun", 1
"""`quant_method` and `format` in the quantization_config of folders with quantized weights (`quantized_tensors.py`)."""


def streamed(names: Collection[str], config: Any, spec: DecoderSpec) -> frozenset[str]:
    """Return the names, in the files, of a fused decoder's tensors that are quantized as they are read.

    Where the files have a tied embedding as the output layer too, Transformers compares them.
    """
    matrices = spec.matrices()
    outer = {spec.embedding_weight, spec.head_weight}
    found = {name: {*apart(spec, {spec.parameter(name): None}, lambda *part: None)} for name in names}
    found = {name: parameters for name, parameters in found.items() if parameters <= matrices}
    if config.tie_word_embeddings and outer <= set[str]().union(*found.values()):
        return frozenset(name for name, parameters in found.items() if not parameters & outer)
    return frozenset(found)


def stored_numbers(slices: Mapping[str, TensorSlice], config: Any, spec: DecoderSpec) -> dict[str, TensorSlice]:
    """Return the tensors, by parameter, of a fused decoder that are quantized from the numbers in the files, whatever
    dtype the model is read in. If the files have a tied embedding as the output layer alone, that tensor is used."""
    matrices = spec.matrices()
    found = {parameter: each for parameter, each in by_parameter(spec, slices).items() if parameter in matrices}
    if config.tie_word_embeddings and spec.head_weight in found:
        found.setdefault(spec.embedding_weight, found[spec.head_weight])
    return found


def matrices(model: Any, spec: DecoderSpec | None) -> dict[str, nn.Module]:
    """Return the modules of a Transformers model, by path, whose weights are quantized: the linear layers; of the fused
    decoder's models also the embedding, which stands for an output layer that is tied to it.

    spec: of these; None: of all others.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    kept = None if spec is None else spec.matrices()
    return {
        path: module
        for path, module in model.named_modules()
        if (isinstance(module, (nn.Linear, Conv1D)) if kept is None else f"{path}.weight" in kept)
        if not (is_tied and module is head)
    }


def outer_modules(model: Any, spec: DecoderSpec | None) -> list[nn.Module]:
    """Return the modules of a Transformers model that are always quantized to 8 bits: its embeddings and its output
    layer. spec: as of `matrices`."""
    table = "" if spec is None else spec.per_layer_table
    inner = [model.get_submodule(table.removesuffix(".weight"))] if table else []
    return [model.get_output_embeddings(), model.get_input_embeddings(), *inner]


class WeightMaker:
    """Makes a decoder's layers as a plan says (`Maker`), one matrix at a time.

    Args:
        place: the files, for messages.
        stored: returns the weight of a name as the files have it, or None.
        numbers: tensors by name, which are read here in place of what the model holds.
        read: called with the name of each matrix that is kept as the files have it, once it is packed.
    """

    def __init__(
        self,
        plan: WeightPlan,
        place: str = "",
        stored: Callable[[str], BlockWeight | QuantizedWeight | None] | None = None,
        numbers: Mapping[str, TensorSlice] | None = None,
        read: Callable[[str], None] | None = None,
    ) -> None:
        self.plan = plan
        self._place = place
        self._stored = stored
        self._read = read
        self._slices = numbers or {}
        self._kept: tuple[str, QuantizedWeight] | None = None

    def linear(self, parts: Sequence[LinearPart], bias: Tensor | None = None, *, is_head: bool = False) -> Linear:
        """Make one layer whose outputs are those of the parts, concatenated (`Maker.linear`).

        Raises:
            ModelLoadError: a weight holds NaN or infinity, or a scale is NaN or infinite.
        """
        if self.plan.quantize is not None:
            return make_quantized_linear([self.weight(part, is_outer=is_head) for part in parts], bias)
        stored = [self.plan.stored(part.name) for part in parts]
        forms = self.plan.forms(stored, is_outer=is_head)
        weights = [self._as_stored(part, form) for part, form in zip(parts, forms, strict=True)]
        library = self.plan.library
        assert library is not None  # without it, numbers are not read one by one
        try:
            linear = NativeLinear(library, _joined(weights), bias)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._place}: tensor {parts[0].name}: {error}") from None
        for part, form in zip(parts, stored, strict=True):
            if form is not None and self._read is not None:
                self._read(part.name)
        return linear

    def _as_stored(self, part: LinearPart, form: Form) -> BlockWeight | QuantizedWeight | Tensor:
        """Return a weight as the files have it, or as numbers of the plan's dtype."""
        weight = self._from_files(part)
        if weight is None:
            numbers = self._numbers(part).to(self.plan.dtype)
            return numbers if part.rows is None else numbers[part.rows]
        weight = weight if part.rows is None else weight.rows(part.rows)
        return weight.dequantize(form) if isinstance(form, torch.dtype) else weight

    def embedding(self, part: LinearPart) -> Tensor | QuantizedEmbedding:
        """Make the embedding (`Maker.embedding`). A tied output layer gets the same quantized values."""
        if self.plan.quantize is None:  # the native decoder makes a layer of the rows
            return self._numbers(part).to(self.plan.dtype)
        weight = self.weight(part, is_outer=True)
        self._kept = part.name, weight
        return QuantizedEmbedding(weight, self.plan.dtype)

    def weight(self, part: LinearPart, *, is_outer: bool = False) -> QuantizedWeight:
        """Return the quantized weight of one parameter, rows in the part's order. is_outer: of the embedding or the
        output layer.

        Raises:
            ModelLoadError: it holds NaN or infinity.
        """
        if self._kept is not None and self._kept[0] == part.name:
            return self._kept[1] if part.rows is None else self._kept[1].rows(part.rows)
        weight = None
        found = self._from_files(part)
        (form,) = self.plan.forms([None if found is None else found.form], is_outer=is_outer)
        assert isinstance(form, QuantizedFormat)
        if isinstance(found, QuantizedWeight) and found.form == form:
            weight = found
        else:
            numbers = self._numbers(part) if found is None else found.dequantize(torch.float32)
            weight = (quantize_int8 if form.bits == 8 else quantize_int4)(numbers, part.name)
        weight = replace(weight.to(part.weight.device), activation_bits=self.plan.activation_bits(form))
        return_freed_memory()  # several times as much as the weight, which would add up
        if part.rows is None:
            return weight
        self._kept = part.name, weight  # other rows of it may be another layer's
        return weight.rows(part.rows)

    def _from_files(self, part: LinearPart) -> BlockWeight | QuantizedWeight | None:
        return None if self._stored is None else self._stored(part.name)

    def _numbers(self, part: LinearPart) -> Tensor:
        if part.name not in self._slices:
            return part.weight
        numbers: Tensor = self._slices[part.name][...]
        return numbers.T if part.is_transposed else numbers


def _joined(weights: Sequence[BlockWeight | QuantizedWeight | Tensor]) -> BlockWeight | QuantizedWeight | Tensor:
    """Return one weight with the outputs of several of one form."""
    if len(weights) == 1:
        return weights[0]
    blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
    values = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if blocks:
        return BlockWeight.cat(blocks)
    return QuantizedWeight.cat(values) if values else torch.cat([each for each in weights if isinstance(each, Tensor)])
