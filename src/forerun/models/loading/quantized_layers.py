"""Layers with quantized weights: of a GGUF file's blocks (`StoredMaker`), or of 8 or 4 bits (`QuantizedMaker`), made
while the weights stream: a float weight exists only while it is quantized.

The second maker uses weights that are stored quantized as stored if they have the requested number of bits. All others
are converted to float32 and quantized: at 8 bits with a scale per output channel, at 4 in groups of 32 with scale and
minimum. With 4 bits, embedding and output layer are kept at 8 bits, unless the files have them at 4.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forerun.config import QUANTISATIONS, UNQUANTIZED
from forerun.errors import ConfigError, ModelLoadError
from forerun.kernels.block_weight import BlockWeight
from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kernels.quantize import MADE_FORMS, QuantizedFormat, QuantizedWeight, quantize_int4, quantize_int8
from forerun.kernels.torch.quantized_linear import QuantizedEmbedding
from forerun.kernels.triton.availability import is_triton_selected
from forerun.models.fused.experts import apart
from forerun.models.linear import Linear, Part, make_quantized_linear
from forerun.models.loading.fused_modules import by_parameter
from forerun.models.loading.weights import TensorSlice
from forerun.models.spec.decoder import DecoderSpec
from forerun.utils.glibc import return_freed_memory

Quantization = str
"""A name of QUANTISATIONS, or UNQUANTIZED."""
METHOD, LAYOUT = "forerun", 1
"""`quant_method` and `format` in the quantization_config of folders with quantized weights (`quantized_tensors.py`)."""


def check_quantization(quantize: str | None, dtype: str | None) -> Quantization | None:
    """Return the quantization of this name; None where the files decide.

    Raises:
        ConfigError: there is none of this name, or activations are to be float64.
    """
    if quantize is None or quantize == UNQUANTIZED:
        return quantize
    if quantize not in QUANTISATIONS:
        names = ", ".join((*QUANTISATIONS, UNQUANTIZED))
        raise ConfigError(f"quantize is {quantize!r}, but must be one of {names}, or left out.")
    if quantize.endswith("-a8") and is_triton_selected():
        raise ConfigError(f"quantize is {quantize!r}, but the Triton kernels take activations of 16 bits. Give 'int8'.")
    if dtype == "float64":
        raise ConfigError(
            f"quantize is {quantize!r} and dtype 'float64', but quantized products are computed in float32. Give dtype "
            "'float32' or 'bfloat16', or leave quantize out."
        )
    return quantize


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

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
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


def keeps_stored(stored: int, requested: int, *, is_outer: bool) -> bool:
    """Return whether quantized values of so many bits are served as stored.

    Args:
        requested: bits. is_outer: of the embedding or the output layer, which are always quantized to 8 bits.
    """
    return stored == requested or (is_outer and stored == 8)


def form_kept(stored: QuantizedFormat | None, quantize: Quantization, *, is_outer: bool) -> QuantizedFormat:
    """Return the format in which `QuantizedMaker` keeps a weight that the files have in this format, or in none."""
    if stored is not None and keeps_stored(stored.bits, QUANTISATIONS[quantize][0], is_outer=is_outer):
        return stored
    return MADE_FORMS[8 if is_outer else QUANTISATIONS[quantize][0]]


class StoredMaker:
    """Makes native layers of weights as the files have them (`Maker`): GGUF's blocks and the integers of other programs
    as they lie, each layer of its own type, other tensors as numbers.

    Args:
        place: the file, for messages.
        blocks: returns the matrix of a name from the files, or None where numbers are to be used.
        numbers: tensors by name, which are read here in place of what the model holds.
        dtype: of the numbers.
        read: called with the name of each such matrix once it is packed.
    """

    def __init__(
        self,
        place: str,
        library: Library,
        blocks: Callable[[str], BlockWeight | QuantizedWeight | None],
        numbers: Mapping[str, TensorSlice],
        dtype: torch.dtype,
        read: Callable[[str], None],
    ) -> None:
        self._place, self._library, self._blocks, self._read = place, library, blocks, read
        self._numbers, self.dtype = numbers, dtype

    def linear(self, parts: Sequence[Part], bias: Tensor | None = None, *, is_head: bool = False) -> Linear:
        """Make one layer of the parts (`Maker.linear`): numbers, if these differ in form.

        Raises:
            ModelLoadError: a scale is NaN or infinite.
        """
        weights = [self._weight(part) for part in parts]
        blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
        values = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        if len({None if isinstance(weight, Tensor) else weight.form for weight in weights}) > 1 or not (
            blocks or values
        ):
            numbers = [each if isinstance(each, Tensor) else each.dequantize(self.dtype) for each in weights]
            joined: BlockWeight | QuantizedWeight | Tensor = numbers[0] if len(numbers) == 1 else torch.cat(numbers)
        else:
            joined = BlockWeight.cat(blocks) if blocks else QuantizedWeight.cat(values)
        try:
            linear = NativeLinear(self._library, joined, bias)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._place}: tensor {parts[0].name}: {error}") from None
        for part, weight in zip(parts, weights, strict=True):
            if not isinstance(weight, Tensor):
                self._read(part.name)
        return linear

    def _weight(self, part: Part) -> BlockWeight | QuantizedWeight | Tensor:
        weight = self._blocks(part.name)
        if weight is not None:
            return weight if part.rows is None else weight.rows(part.rows)
        numbers: Tensor = self._numbers[part.name][...].to(self.dtype)
        numbers = numbers.T if part.is_transposed else numbers
        return numbers if part.rows is None else numbers[part.rows]

    def embedding(self, part: Part) -> Tensor:
        """Return the rows as numbers (`Maker.embedding`); the native decoder makes a layer of them."""
        return self._numbers[part.name][...].to(self.dtype)


class QuantizedMaker:
    """Makes layers of quantized weights (`Maker`).

    Args:
        quantize: the requested quantization.
        stored: returns the quantized weight of a name from the files, or None; None: none is to be used.
        numbers: tensors by name in the files, which are read here and quantized in place of what the model holds.
        dtype: of everything that is not quantized, and of the embedding's rows.
    """

    def __init__(
        self,
        quantize: Quantization,
        stored: Callable[[str], QuantizedWeight | None] | None,
        numbers: Mapping[str, TensorSlice],
        dtype: torch.dtype,
    ) -> None:
        self._bits, activation_bits = QUANTISATIONS[quantize]
        self._activation_bits = 16 if is_triton_selected() else activation_bits
        self._stored, self._slices, self.dtype = stored, numbers, dtype
        self._kept: tuple[str, QuantizedWeight] | None = None

    def linear(self, parts: Sequence[Part], bias: Tensor | None = None, *, is_head: bool = False) -> Linear:
        """Make one layer whose outputs are those of the parts, concatenated (`Maker.linear`)."""
        return make_quantized_linear([self.weight(part, is_outer=is_head) for part in parts], bias)

    def embedding(self, part: Part) -> QuantizedEmbedding:
        """Make the embedding (`Maker.embedding`). A tied output layer gets the same quantized values."""
        weight = self.weight(part, is_outer=True)
        self._kept = part.name, weight
        return QuantizedEmbedding(weight, self.dtype)

    def weight(self, part: Part, *, is_outer: bool = False) -> QuantizedWeight:
        """Return the quantized weight of one parameter, rows in the part's order. is_outer: of the embedding or the
        output layer.

        Raises:
            ModelLoadError: it holds NaN or infinity.
        """
        if self._kept is not None and self._kept[0] == part.name:
            return self._kept[1] if part.rows is None else self._kept[1].rows(part.rows)
        weight = None if self._stored is None else self._stored(part.name)
        if weight is None or not keeps_stored(weight.bits, self._bits, is_outer=is_outer):
            numbers = self._numbers(part) if weight is None else weight.dequantize(torch.float32)
            weight = (quantize_int8 if is_outer or self._bits == 8 else quantize_int4)(numbers, part.name)
        # of activations at 8 bits, matrices kept at more bits than asked for do not lose
        activation_bits = self._activation_bits if weight.bits == self._bits else 16
        weight = replace(weight.to(part.weight.device), activation_bits=activation_bits)
        return_freed_memory()  # several times as much as the weight, which would add up
        if part.rows is None:
            return weight
        self._kept = part.name, weight  # other rows of it may be another layer's
        return weight.rows(part.rows)

    def _numbers(self, part: Part) -> Tensor:
        if part.name not in self._slices:
            return part.weight
        numbers: Tensor = self._slices[part.name][...]
        return numbers.T if part.is_transposed else numbers
