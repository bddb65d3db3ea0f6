"""How the weights of a model are kept, decided before they are read: the loader, draft heads and the memory plan follow
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from forerun.config import DTYPES, QUANTISATIONS, UNQUANTIZED
from forerun.errors import ConfigError
from forerun.kernels.block_weight import BlockType
from forerun.kernels.cpu import is_triton_selected, native_for
from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.linear import Form, linear_nbytes
from forerun.kernels.quantize import MADE_FORMS, QuantizedFormat
from forerun.kernels.torch.linear import can_pack
from forerun.models.loading.source import ModelSource, Quantization
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import EXPERT, SHARED
from forerun.models.spec.recurrence import IN_PROJ

Stored = QuantizedFormat | BlockType | None
"""How the files have a matrix; None: as numbers."""
_TOGETHER = (("query", "key", "value"), ("gate", "up"), IN_PROJ, SHARED[:2], EXPERT[:2])
"""Roles that are one product; in native decoders those of IN_PROJ alone."""
_NATIVE_TYPES = (torch.bfloat16, torch.float32)
_FLOAT32 = 4
_PRODUCT = 8
"""Bytes a number that `QuantizedLinear`, which multiplies in float64, keeps beside the quantized values."""


def check_dtype(dtype: str) -> None:
    """Raise ConfigError if there is no such number format. float16 is taken for bfloat16 (`served_dtype`)."""
    if dtype not in (*DTYPES, "float16"):
        remedy = "auto is that of the weights, float32 for float16."
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}: {remedy}")


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


def served_dtype(source: ModelSource, dtype: str, *, is_quantized: bool) -> torch.dtype:
    """Return the dtype of a name: bfloat16 for float16, which nothing is computed in. "auto" is the weights' own, and
    float32, which holds all of it, for float16 and for dequantized weights.

    is_quantized: weights are quantized, and the result is for everything else: float32 if "auto" finds float64, in
        which quantized values are not multiplied.
    """
    if dtype == "float16":
        dtype = "bfloat16"
    elif dtype == "auto":
        stored = source.stored_dtype() or "float32"
        dtype = "float32" if stored == "float16" else stored
    found: torch.dtype = getattr(torch, dtype)
    return torch.float32 if is_quantized and found == torch.float64 else found


def library_for(device: torch.device, dtype: torch.dtype) -> Library | None:
    """Return the native library if it computes models of this kind: bfloat16 and float32, their weights quantized or
    not, on the CPU. For float64 it is not even searched for."""
    return native_for(device) if dtype in _NATIVE_TYPES else None


@dataclass(frozen=True, slots=True)
class PlannedProduct:
    """The matrix of one product of a model, or those of all experts of a layer for it.

    Attributes:
        matrices: of each matrix, the parameters whose outputs it has, one after another. One parameter may have the
            outputs of several products.
        outputs: of each of these parameters. inputs: of the product.
        stored: how the files have each parameter. kept: how it is kept.
        nbytes: of all matrices, as they are kept.
        is_expert: they are of experts.
    """

    matrices: tuple[tuple[str, ...], ...]
    outputs: tuple[int, ...]
    inputs: int
    stored: tuple[Stored, ...]
    kept: tuple[Form, ...]
    nbytes: int
    is_expert: bool = False


def roles_of_products(roles: Sequence[str], *, is_native: bool) -> list[list[str]]:
    """Return the linear layers of a layer by product: those whose outputs one product has, in order."""
    together = (IN_PROJ,) if is_native else _TOGETHER
    groups = (next((group for group in together if role in group), (role,)) for role in roles)
    return [[role for role in group if role in roles] for group in dict.fromkeys(groups)]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How the weights of a model are kept.

    Attributes:
        dtype: of everything that is not quantized.
        device: where they lie.
        is_fused: the fused decoder computes it.
        library: the native kernels, where they compute.
        quantize: what matrices are brought to; None: they are kept as they are stored.
        stored: by name, how the files have a matrix that may be kept so.
        file_type: the name of the files' formats, if matrices are kept in these (`ModelSource.file_type`).
        is_streamed: the fused decoder's matrices are read one by one, as they are packed.
        has_adapter: an adapter is merged before anything else.
        is_triton: the Triton kernels compute it.
    """

    dtype: torch.dtype
    device: torch.device
    is_fused: bool
    library: Library | None
    quantize: Quantization | None = None
    stored: Callable[[str], Stored] = lambda name: None
    file_type: str | None = None
    is_streamed: bool = False
    has_adapter: bool = False
    is_triton: bool = False

    @classmethod
    def of(
        cls,
        source: ModelSource,
        spec: DecoderSpec | None,
        dtype: str,
        device: torch.device,
        quantize: Quantization | None = None,
        *,
        is_fused: bool,
        has_adapter: bool = False,
    ) -> WeightPlan:
        """Plan the weights of a source, which is not read but for its headers.

        Args:
            spec: of its configuration, if the fused decoder can compute it. dtype: a checked name.
            quantize: what the user requests; None: as the files are.

        Raises:
            ConfigError: as `check_quantization`, of the files' quantization.
        """
        quantize = quantize or check_quantization(source.quantization(), dtype)
        bits = None if quantize == UNQUANTIZED else quantize
        number_format = served_dtype(source, dtype, is_quantized=bits is not None)
        library = library_for(device, number_format)
        stored: Callable[[str], Stored] = _as_numbers
        file_type = None
        is_streamed = is_fused and not has_adapter and (bits is not None or library is not None)
        if bits is not None and not has_adapter:  # with an adapter, the numbers are others
            stored = source.quantized_format(spec)
        elif bits is None and is_streamed:
            is_streamed = bool(source.block_types())
            file_type = None if quantize == UNQUANTIZED else source.file_type()
            stored = _as_numbers if file_type is None or spec is None else source.block_form(spec)
        is_triton = is_fused and is_triton_selected()
        return cls(
            *(number_format, device, is_fused, library, bits, stored, file_type),
            is_streamed=is_streamed,
            has_adapter=has_adapter,
            is_triton=is_triton,
        )

    @classmethod
    def of_head(
        cls,
        dtype: torch.dtype,
        device: torch.device,
        library: Library | None,
        target_form: str | None,
        *,
        is_quantized: bool,
    ) -> WeightPlan:
        """Plan the weights of a draft head.

        Where the target's are quantized, a head's are too: at 4 bits where the target has 4, by which drafts lose next
        to nothing and half is read.

        Args:
            dtype, device: of the target. library: the native one, where it computes the target.
            target_form: of the target's weights (`LanguageModel.quantize`).
            is_quantized: the files have the head's matrices at 8 bits.
        """
        quantize = None
        if target_form is not None:
            quantize = "int4-a16" if "4" in target_form else "int8"
        stored = _at_8_bits if is_quantized else _as_numbers
        return cls(dtype, device, True, library, quantize, stored)

    @property
    def target_rows(self) -> Stored:
        """Return how a head takes rows of its target's output layer: at 8 bits where its own matrices are, and native
        kernels compute."""
        return None if self.library is None else self.stored("")

    @property
    def is_native(self) -> bool:
        """Return whether all layers are computed by the native kernels."""
        return self.is_fused and self.library is not None

    @property
    def number_format(self) -> str | None:
        """Return the form of the weights (`LanguageModel.quantize`); None where they are numbers."""
        return self.quantize or self.file_type

    @property
    def multiplies_floats(self) -> bool:
        """Return whether the native library, if it computes a model, multiplies its float weights: in the fused decoder
        and in float32 always, elsewhere unless oneDNN has products of bfloat16 here."""
        is_float32 = self.dtype == torch.float32
        return self.library is not None and (self.is_fused or is_float32 or not can_pack(self.dtype, self.device))

    def forms(self, stored: Sequence[Stored], *, is_outer: bool = False) -> list[Form]:
        """Return how the parts of one product are kept.

        Without `quantize`, they are kept as they are stored, or as numbers if they differ. Else those that are stored
        with the wanted bits are kept so, and the others are made from numbers: at 8 bits with a scale per output, at 4
        in groups of 32 with scale and minimum. Embedding and output layer have 8 bits, unless they are stored at 4.

        Args:
            stored: how the files have each.
            is_outer: it is the output layer or an embedding.
        """
        if self.quantize is None:
            is_one = len({*stored}) == 1
            return [each if is_one and each is not None else self.dtype for each in stored]
        bits = QUANTISATIONS[self.quantize][0]
        kept = {bits, 8} if is_outer else {bits}
        made = MADE_FORMS[8 if is_outer else bits]
        return [made if each is None or each.bits not in kept else each for each in stored]

    def form(self, name: str, *, is_outer: bool = False) -> Form:
        """Return how a matrix that is a product of its own is kept (`forms`)."""
        return self.forms([self.stored(name)], is_outer=is_outer)[0]

    def activation_bits(self, form: QuantizedFormat) -> int:
        """Return the bits of the activations that a quantized weight is multiplied with."""
        bits, activation_bits = QUANTISATIONS[self.quantize or UNQUANTIZED]
        # of activations at 8 bits, matrices kept at more bits than asked for do not lose
        return activation_bits if form.bits == bits and not self.is_triton else 16

    def nbytes(self, form: Form, shape: Sequence[int]) -> int:
        """Return the bytes of a linear layer's weight in a form. shape: outputs, inputs."""
        outputs, inputs = shape
        if isinstance(form, torch.dtype) and not self.multiplies_floats:
            return outputs * inputs * form.itemsize
        if self.library is not None:
            return linear_nbytes(self.library, outputs, inputs, form)
        assert isinstance(form, QuantizedFormat)
        if self.is_triton:
            return _quantized_nbytes(form, outputs, inputs, is_packed=True)
        return _quantized_nbytes(form, outputs, inputs) + _PRODUCT * outputs * inputs

    def product(
        self,
        matrices: Sequence[Sequence[str]],
        outputs: Sequence[int],
        inputs: int,
        *,
        is_outer: bool = False,
        is_expert: bool = False,
    ) -> PlannedProduct:
        """Plan a product. Arguments as its attributes; all matrices are kept as the first.

        is_outer: it is the output layer or an embedding.
        """
        stored = tuple(self.stored(name) for name in matrices[0])
        kept = tuple(self.forms(stored, is_outer=is_outer))
        parts = [(kept[0], sum(outputs))] if len({*kept}) == 1 else zip(kept, outputs, strict=True)
        nbytes = len(matrices) * sum(self.nbytes(form, (count, inputs)) for form, count in parts)
        names = tuple(tuple(each) for each in matrices)
        return PlannedProduct(names, tuple(outputs), inputs, stored, kept, nbytes, is_expert)

    def products(self, model: Any, spec: DecoderSpec | None, num_outputs: int | None = None) -> list[PlannedProduct]:
        """Plan all products of a model.

        Args:
            model: its modules, of any numbers. spec: of a model that the fused decoder computes.
            num_outputs: tokens that the output layer is kept for, in rows beside the embedding's; None for all.
        """
        outer = self._outer_products(model, spec, num_outputs)
        return outer + (self._module_products(model) if spec is None else self._layers_products(spec))

    def _layers_products(self, spec: DecoderSpec) -> list[PlannedProduct]:
        """Plan the products of a fused decoder's layers."""
        found = []
        for index, own in enumerate(spec.layers):
            path = spec.layer_path(index)
            count = 1
            groups = roles_of_products(own.roles, is_native=self.is_native)
            if own.experts is not None:
                groups += roles_of_products(EXPERT, is_native=self.is_native)
                count = own.experts.num_experts
            for roles in groups:
                is_expert = roles[0] in EXPERT
                matrices = [
                    [f"{path}.{own.module(role, expert)}.weight" for role in roles]
                    for expert in range(count if is_expert else 1)
                ]
                sizes = list(map(own.out_features, roles)), own.in_features(roles[0])
                found.append(self.product(matrices, *sizes, is_expert=is_expert))
        return found

    def _module_products(self, model: Any) -> list[PlannedProduct]:
        """Plan the products of Transformers' modules but the output layer: linear layers, each alone."""
        head = model.get_output_embeddings()
        found = []
        for path, module in model.named_modules():
            if module is not head and (shape := linear_shape(module)) is not None:
                found.append(self.product([[f"{path}.weight"]], [shape[0]], shape[1]))
        return found

    def _outer_products(self, model: Any, spec: DecoderSpec | None, num_outputs: int | None) -> list[PlannedProduct]:
        """Plan embedding and output layer, and in a fused decoder the inputs that tokens give layers."""
        head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        named = {module: f"{path}.weight" for path, module in model.named_modules() if module in (head, embedding)}
        found = []
        if spec is not None:
            found.append(self._table(named[embedding], embedding.weight.shape))
            if (inputs := spec.embeddings.per_layer) is not None:
                width = len(spec.layers) * inputs.width
                found.append(self._table(spec.per_layer_table, (inputs.vocab_size, width)))
                found.append(self.product([[f"{spec.base}.{inputs.product}.weight"]], [width], spec.hidden))
        if head is None:
            return found
        is_tied = head.weight is embedding.weight
        outputs, width = head.weight.shape
        name = named[embedding if is_tied and self.is_fused else head]
        product = self.product([[name]], [outputs if num_outputs is None else num_outputs], width, is_outer=True)
        if is_tied and num_outputs is None:
            product = replace(product, nbytes=self._tied_nbytes(product))
        return [*found, product]

    def _table(self, name: str, shape: Sequence[int]) -> PlannedProduct:
        """Plan a table of a fused decoder that gives rows."""
        product = self.product([[name]], [shape[0]], shape[1], is_outer=True)
        (form,) = product.kept
        if self.is_native:
            return product
        if isinstance(form, QuantizedFormat):
            return replace(product, nbytes=_quantized_nbytes(form, *shape))
        return replace(product, nbytes=shape[0] * shape[1] * self.dtype.itemsize)

    def _tied_nbytes(self, head: PlannedProduct) -> int:
        """Return the bytes of an output layer beside the embedding whose weight it shares."""
        if self.is_native:
            return 0
        if self.quantize is None:
            is_packed = self.library is not None or can_pack(self.dtype, self.device)
            return head.nbytes if is_packed and not self.is_triton else 0
        return _PRODUCT * head.outputs[0] * head.inputs if self.is_fused and not self.is_triton else head.nbytes


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return the outputs and inputs of one of Transformers' linear layers; None of another module."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    is_conv = type(module).__name__ == "Conv1D"  # GPT-2's; Transformers' classes are not imported here
    if weight is None or weight.dim() != 2 or not (is_conv or isinstance(module, nn.Linear)):
        return None
    outputs, inputs = weight.shape[::-1] if is_conv else weight.shape
    return outputs, inputs


def _as_numbers(name: str) -> Stored:
    return None


def _at_8_bits(name: str) -> Stored:
    return MADE_FORMS[8]


def _quantized_nbytes(form: QuantizedFormat, outputs: int, inputs: int, *, is_packed: bool = False) -> int:
    """Return the bytes of a `QuantizedWeight`. is_packed: two values of 4 bits share a byte."""
    if form.group is None:
        return outputs * inputs + _FLOAT32 * outputs
    groups = -(-inputs // form.group) * outputs
    values = groups * form.group // 2 if is_packed and form.bits == 4 else outputs * inputs
    return values + 2 * groups * (2 if form.has_minimum else 1)
