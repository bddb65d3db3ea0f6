"""Weights that other programs have quantized: what a configuration says of them, and the tensors of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.kernels.block_weight import BlockType, BlockWeight
from forerun.kernels.quantize import QuantizedFormat, QuantizedWeight
from forerun.models.fused.experts import apart, part_of
from forerun.models.fused.spec import DecoderSpec
from forerun.models.loading import published_layouts as layouts
from forerun.models.loading.published_layouts import Layout, Parts, Settings
from forerun.models.loading.weights import TensorSlice
from forerun.utils.foreign_errors import REMEDY, as_load_errors
from forerun.utils.json_file import Fields

METHODS: Mapping[str, tuple[Layout, ...]] = {
    "gptq": (layouts.GPTQ,),
    "awq": (layouts.AWQ,),
    "compressed-tensors": (layouts.PACKED, layouts.INT8, layouts.FLOAT8, layouts.NVFP4_PACKED, layouts.MXFP4),
    "bitsandbytes": (layouts.BNB_INT8, layouts.BNB_4_BITS),
    "mxfp4": (layouts.MXFP4_EXPERTS,),
    "fp8": (layouts.FLOAT8_BLOCKS, layouts.FLOAT8),
    "fbgemm_fp8": (layouts.FLOAT8,),
    "modelopt": (layouts.NVFP4, layouts.FLOAT8),
    "quark": (layouts.INT8, layouts.FLOAT8),
    "torchao": (layouts.TORCHAO_INT8, layouts.TORCHAO_FLOAT8),
    "hqq": (layouts.HQQ,),
}
"""By `quant_method`, the layouts that weights may have."""
COMPUTED = tuple(dict.fromkeys(each.name for of in METHODS.values() for each in of if each.integers or each.blocks))
"""Names of layouts whose integers are computed with as they are."""
_OF_AUTO_ROUND = {"auto_gptq": "gptq", "auto_awq": "awq", "llm_compressor": "compressed-tensors"}
_KEYS = ("quantization_config", "compression_config", "quantization")
_PLACES = ("", "text_config")
_OF_ACTIVATIONS = tuple(f"{kind}_{what}" for kind in ("input", "output") for what in ("scale", "zero_point"))
_OF_ACTIVATIONS += ("input_global_scale", "input_scale_ub", "activation_scale", "k_scale", "v_scale", "q_scale")
"""Last parts of names of tensors for activations, keys and values of 8 bits, which are not brought to these here."""
_CODES = ("I32", "I8", "U8", "U32", "F8_E4M3", "F8_E5M2")
_OTHERS = "Take another publication of the model: GGUF, AWQ, GPTQ, compressed-tensors, FP8 and float weights are read."


@dataclass(frozen=True, slots=True)
class Method:
    """How a configuration says that the weights are quantized.

    Attributes:
        name: a key of METHODS.
        place: the file, for messages.
    """

    name: str
    settings: Settings
    place: str

    @classmethod
    def of(cls, fields: Fields) -> Method | None:
        """Return the method of a config.json, in which it may stand beside the text model's fields or among them; None
        for weights that are not quantized, or by forerun.

        Raises:
            UnsupportedModelError: there is no way to compute them on a CPU.
            ModelLoadError: the description is damaged.
        """
        for place in _PLACES:
            part = fields.fields(place, None) if place else fields
            for key in _KEYS if part is not None else ():
                stored = part.fields(key, None) if part is not None else None
                if stored is not None and stored.string("quant_method", "") != "forerun":
                    return cls(_name(stored, key), _settings(stored), fields.place)
        return None


def _name(stored: Fields, key: str) -> str:
    """Return the key of METHODS that a description names."""
    values = stored.values
    name = stored.string("quant_method", "").lower() or _unnamed(values, key)
    if name.endswith("auto-round"):
        packing = stored.string("packing_format", "auto_gptq").rpartition(":")[2]
        name = next((found for part, found in _OF_AUTO_ROUND.items() if part in packing), f"{name}, {packing[:40]}")
    form, sparsity = str(values.get("format", "")), stored.fields("sparsity_config", None)
    rotated = values.get("transform_config") or (sparsity is not None and sparsity.string("format", "dense") != "dense")
    if name not in METHODS or rotated or "marlin" in form or "sparse" in form:
        what = f"{name[:60]}{' with transforms, or sparse' if name in METHODS else ''}"
        raise UnsupportedModelError(
            f"{stored.place}: the weights are quantized by {what}, for which there is no way to compute on a CPU. "
            f"{_OTHERS}"
        )
    return name


def _unnamed(values: Mapping[str, Any], key: str) -> str:
    if "load_in_8bit" in values or "load_in_4bit" in values:
        return "bitsandbytes"
    return "MLX" if {"bits", "group_size"} <= values.keys() else f"a program that {key} does not name"


def _settings(stored: Fields) -> Settings:
    groups = stored.fields("config_groups", None)
    parts = [] if groups is None else [groups.fields(key).fields("weights", None) for key in groups.values]
    weights = [part for part in parts if part is not None] or [stored]
    blocks = [
        found
        for part in weights
        for key in ("weight_block_size", "block_structure")
        if (found := part.list_of(key, int, None)) is not None
    ]
    if any(len(block) != 2 or min(block) < 1 for block in blocks):
        raise stored.wrong("weight_block_size", "two numbers from 1 on")
    sizes = {part.integer(key, 0, low=-1) for part in weights for key in ("group_size", "q_group_size") if key in part}
    group = max(0, *sizes) if len(sizes) == 1 and "dynamic" not in stored else 0
    bits = [part.integer("num_bits", 8, low=1, high=8) for part in weights if part.values.get("type") == "int"]
    lacks_one = stored.string("checkpoint_format", "gptq") != "gptq_v2"
    return Settings(lacks_one, group, (blocks[0][0], blocks[0][1]) if blocks else (0, 0), max(bits, default=8))


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The quantized weights of some files.

    Attributes:
        method: how they are quantized. place: the folder, for messages.
        found: by the parameter's name, its layout and its tensors, not read yet.
    """

    method: Method
    place: str
    found: Mapping[str, tuple[Layout, Parts]]

    @classmethod
    def sort(
        cls, slices: Mapping[str, TensorSlice], place: str, method: Method
    ) -> tuple[PublishedWeights, dict[str, TensorSlice]]:
        """Separate the quantized weights from the other tensors.

        Raises:
            ModelLoadError: there are none, or integers have no scales beside them.
        """
        found: dict[str, tuple[Layout, Parts]] = {}
        used = {key for key in slices if key.rpartition(".")[2] in _OF_ACTIVATIONS}
        for layout in METHODS[method.name]:
            for key, codes in slices.items():
                base = key.removesuffix(layout.codes)
                names = {each: base + each for each in (*layout.needed, *layout.others) if base + each in slices}
                if (
                    key.endswith(layout.codes)
                    and codes.get_dtype() in layout.dtypes
                    and {*layout.needed} <= names.keys()
                ):
                    parts = {"": codes} | {each: slices[name] for each, name in names.items()}
                    found.setdefault(base + layout.leaf, (layout, parts))
                    used |= {key, *names.values()}
        remaining = {key: each for key, each in slices.items() if key not in used}
        check_codes(remaining, place, f"is no whole weight of {method.name}, as {method.place} says")
        if not found:
            raise ModelLoadError(
                f"{place}: {method.place} says that weights are quantized by {method.name}, and no tensor is. {REMEDY}"
            )
        return cls(method, place, found), remaining

    def form(self, name: str) -> QuantizedFormat | BlockType | None:
        """Return the format of what `read` returns; its numbers are not read."""
        if name not in self.found:
            return None
        layout, parts = self.found[name]
        with self._about(name):
            return layout.form(parts, self.method.settings)

    def read(self, name: str, index: EllipsisType | int = ...) -> QuantizedWeight | BlockWeight | None:
        """Return the integers of a weight, or those of an expert, as they are; None where there are only numbers.

        Raises:
            ModelLoadError: a scale is NaN or infinite, or parts contradict each other.
        """
        layout, parts = self.found[name]
        with self._about(name):
            return layout.weight(parts, self.method.settings, index)

    def matrices(self, spec: DecoderSpec | None) -> Callable[[str], QuantizedWeight | BlockWeight | None]:
        """Return a function that returns `read` by the name of a fused decoder's parameter, those of experts apart, or
        of Transformers'; None where there is none."""
        parts, last = self._by_parameter(spec), dict[tuple[str, object], QuantizedWeight | BlockWeight | None]()

        def matrix(name: str) -> QuantizedWeight | BlockWeight | None:
            stored, index, role = parts.get(name, ("", ..., ""))
            if stored and (stored, index) not in last:  # several layers may be made of one
                last.clear()
                last[stored, index] = self.read(stored, index)
            weight = last[stored, index] if stored else None
            if weight is None or not role:
                return weight
            assert spec is not None
            assert spec.experts is not None
            return weight.rows(part_of(spec.experts, torch.arange(weight.shape[0]), role))

        return matrix

    def forms(self, spec: DecoderSpec | None) -> Callable[[str], QuantizedFormat | BlockType | None]:
        """Return a function that returns the formats of `matrices`; no codes are read."""
        parts = self._by_parameter(spec)
        return lambda name: self.form(parts[name][0]) if name in parts else None

    def _by_parameter(self, spec: DecoderSpec | None) -> dict[str, tuple[str, EllipsisType | int, str]]:
        """Return by the names of parameters the names here, and of an expert's part which it is, and its role."""
        named: dict[str, tuple[str, EllipsisType | int, str]] = {
            name if spec is None else spec.parameter(name): (name, ..., "") for name in self.found
        }
        return named if spec is None else apart(spec, named, lambda whole, index, role: (whole[0], index, role))

    def slices(self, dtype: torch.dtype) -> Iterator[tuple[str, TensorSlice]]:
        """Yield the weights by name, dequantized when they are read."""
        for name in self.found:
            yield name, _Numbers(self, name, dtype)

    def counts(self) -> Counter[str]:
        """Return how many weights of each layout there are; those in groups that no kernel has are named apart."""
        return Counter(
            layout.name if layout.name not in COMPUTED or self.form(name) else f"{layout.name} in other groups"
            for name, (layout, _) in self.found.items()
        )

    @contextmanager
    def _about(self, name: str) -> Iterator[None]:
        """Name the weight in the errors of the block."""
        with as_load_errors(f"{self.place}: the {self.found[name][0].name} weight {name} cannot be read", REMEDY):
            yield


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A quantized weight in the form of a safetensors slice."""

    weights: PublishedWeights
    name: str
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        layout, parts = self.weights.found[self.name]
        with self.weights._about(self.name):
            return layout.shape(parts)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: EllipsisType | int) -> Tensor:
        layout, parts = self.weights.found[self.name]
        with self.weights._about(self.name):
            numbers = layout.dequantized(parts, self.weights.method.settings, index)
            if not numbers.isfinite().all():
                raise ValueError("it holds NaN or infinity")
            return numbers.to(self.dtype)


def check_codes(slices: Mapping[str, TensorSlice], place: str, why: str) -> None:
    """Raise ModelLoadError for a tensor of codes, which means something only with scales."""
    for name, each in slices.items():
        if each.get_dtype() in _CODES:
            raise ModelLoadError(
                f"{place}: tensor {name} is stored as {each.get_dtype()}, as quantized weights are, and {why}. {REMEDY}"
            )
