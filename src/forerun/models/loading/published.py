"""Weights that other programs have quantized: what a configuration says of them, and the tensors of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.kernels.block_weight import BlockType, BlockWeight
from forerun.kernels.quantize import QuantizedFormat, QuantizedWeight
from forerun.models.fused.experts import apart, part_of
from forerun.models.loading.configuration import with_text_config
from forerun.models.loading.published_layouts import COMPUTED, METHODS, Index, Settings, Stored
from forerun.models.loading.quantized_tensors import Dequantized
from forerun.models.loading.weights import TensorSlice
from forerun.models.spec.decoder import DecoderSpec
from forerun.utils.foreign_errors import REMEDY, as_load_errors
from forerun.utils.json_file import Fields

_OF_AUTO_ROUND = {"auto_gptq": "gptq", "auto_awq": "awq", "llm_compressor": "compressed-tensors"}
_KEYS = ("quantization_config", "compression_config", "quantization")
"""The last is MLX's, and may be another program's word for something else."""
_OF_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale", "input_scale_ub"),
    *("activation_scale", "k_scale", "v_scale", "q_scale"),
)
"""Last parts of names of tensors for activations, keys and values of 8 bits, which are not brought to these here."""
_CODES = ("I32", "I8", "U8", "U32", "F8_E4M3", "F8_E5M2")
_UNREAD = re.compile("marlin|sparse|gemv|bitblas|qqq|exl3|vptq|gptq_p|llm-awq|paroquant")
"""Formats of a method whose tensors are others, for kernels of GPUs."""
_OTHERS = f"Take another publication of the model: GGUF files, floats, and {', '.join(METHODS)} are read."


def settings_of(fields: Fields) -> Settings | None:
    """Return what a config.json says, beside the text model's fields or among them; None for weights that are not
    quantized, or by forerun.

    Raises:
        UnsupportedModelError: there is no way to compute them on a CPU.
        ModelLoadError: the description is damaged.
    """
    found = [
        each
        for part in with_text_config(fields)
        for key in _KEYS
        if key != _KEYS[-1] or isinstance(part.values.get(key), dict)
        if (each := part.fields(key, None)) is not None
    ]
    stored = next((each for each in found if each.values.get("quant_method") != "forerun"), None)
    return None if stored is None else _settings(stored, _name(stored), fields.place)


def _name(stored: Fields) -> str:
    """Return the key of METHODS that a description names."""
    values = stored.values
    sparsity = stored.fields("sparsity_config", None)
    is_mlx = {"bits", "group_size"} <= values.keys()
    is_bnb = any(f"load_in_{n}bit" in values for n in (4, 8))
    name = stored.string(
        "quant_method", "bitsandbytes" if is_bnb else "MLX" if is_mlx else "a program that is not named"
    )
    if name.endswith("auto-round"):
        packing = stored.string("packing_format", "auto_gptq").rpartition(":")[2]
        name = next((found for part, found in _OF_AUTO_ROUND.items() if part in packing), f"{name}, {packing[:40]}")
    unread = [
        *(
            form[:40]
            for each in ("format", "checkpoint_format", "version")
            if _UNREAD.search(form := str(values.get(each)))
        ),
        *(["sparse"] if sparsity is not None and sparsity.string("format", "dense") != "dense" else []),
        *(["with transforms"] if values.get("transform_config") else []),
        *([f"{bits} bits"] if (bits := stored.integer("bits", 4)) not in (2, 4, 8) else []),
    ]
    if name not in METHODS or unread:
        raise UnsupportedModelError(
            f"{stored.place}: the weights are quantized by {', '.join([name[:60], *unread])}, for which there is no "
            f"way to compute on a CPU. {_OTHERS}"
        )
    return name


def _settings(stored: Fields, name: str, place: str) -> Settings:
    groups = stored.fields("config_groups", None)
    parts = [] if groups is None else [groups.fields(key).fields("weights", None) for key in groups.values]
    weights = [part for part in parts if part is not None] or [stored]
    blocks = [part.list_of(key, int, None) for part in weights for key in ("weight_block_size", "block_structure")]
    block = next((found for found in blocks if found is not None), [0, 0])
    sizes = {part.integer(key, 0, low=-1) for part in weights for key in ("group_size", "q_group_size") if key in part}
    group = max(0, *sizes) if len(sizes) == 1 and "dynamic" not in stored else 0
    bits = [part.integer("num_bits", 8, low=1, high=8) for part in weights if part.values.get("type") == "int"]
    zeros_lack_one = stored.string("checkpoint_format", "gptq") != "gptq_v2"
    return Settings(name, place, zeros_lack_one, group, (block[0], block[-1]), max(bits, default=8))


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The quantized weights of some files.

    Attributes:
        settings: how they are quantized. place: the folder, for messages.
        found: by the parameter's name, the name of its layout, and the weight.
    """

    settings: Settings
    place: str
    found: dict[str, tuple[str, Stored]]

    @classmethod
    def sort(
        cls, slices: Mapping[str, TensorSlice], place: str, settings: Settings
    ) -> tuple[PublishedWeights, dict[str, TensorSlice]]:
        """Separate the quantized weights from the other tensors.

        Raises:
            ModelLoadError: there are none, integers have no scales beside them, or their shapes contradict each other.
        """
        weights = cls(settings, place, {})
        used = {key for key in slices if key.rpartition(".")[2] in _OF_ACTIVATIONS}
        for layout in METHODS[settings.method]:
            for key, codes in slices.items():
                base = key.removesuffix(layout.codes)
                names = {each: base + each for each in (*layout.needed, *layout.others) if base + each in slices}
                is_whole = key.endswith(layout.codes) and {*layout.needed} <= names.keys()
                if key not in used and is_whole and codes.get_dtype() in layout.dtypes:
                    with weights.about(base + layout.leaf, layout.name):
                        parts = {"": codes} | {each: slices[name] for each, name in names.items()}
                        weights.found[base + layout.leaf] = layout.name, layout.read(parts, settings)
                    used |= {key, *names.values()}
        remaining = {key: each for key, each in slices.items() if key not in used}
        check_codes(remaining, place, f"is no whole weight of {settings.method}, as {settings.place} says")
        if not weights.found:
            raise ModelLoadError(
                f"{place}: {settings.place} says that weights are quantized by {settings.method}, and none is. {REMEDY}"
            )
        return weights, remaining

    def slices(self, dtype: torch.dtype) -> Iterator[tuple[str, TensorSlice]]:
        """Yield the weights by name, dequantized when they are read."""
        for name, (_, weight) in self.found.items():
            yield name, Dequantized(weight.shape, partial(self._numbers, name, dtype))

    def _numbers(self, name: str, dtype: torch.dtype, index: Index) -> Tensor:
        layout, weight = self.found[name]
        with self.about(name, layout):
            numbers = weight.numbers(index)
            if not torch.stack(numbers.aminmax()).isfinite().all():
                raise ValueError("it holds NaN or infinity")
            return numbers.to(dtype)

    def matrices(self, spec: DecoderSpec) -> Callable[[str], QuantizedWeight | BlockWeight | None]:
        """Return a function that returns the integers of a weight by the name of a fused decoder's parameter, those of
        experts apart; None where there are none. It raises ModelLoadError if a scale is NaN or infinite."""
        parts = self._by_parameter(spec)
        experts = spec.experts

        held: dict[tuple[str, Index], QuantizedWeight | BlockWeight | None] = {}  # several layers may be made of one

        def read(stored: str, index: Index) -> QuantizedWeight | BlockWeight | None:
            if (stored, index) not in held:
                held.clear()  # before the next is read, as both are large
                layout, weight = self.found[stored]
                with self.about(stored, layout):
                    held[stored, index] = None if weight.weight is None else weight.weight(index)
            return held[stored, index]

        def matrix(name: str) -> QuantizedWeight | BlockWeight | None:
            stored, index, role = parts.get(name, ("", ..., ""))
            found = read(stored, index) if stored else None
            if found is None or experts is None or not role:
                return found
            return found.rows(part_of(experts, torch.arange(found.shape[0]), role))

        return matrix

    def forms(self, spec: DecoderSpec) -> Callable[[str], QuantizedFormat | BlockType | None]:
        """Return a function that returns the formats of `matrices`; no codes are read."""
        parts = self._by_parameter(spec)
        return lambda name: self.found[parts[name][0]][1].form if name in parts else None

    def _by_parameter(self, spec: DecoderSpec) -> dict[str, tuple[str, Index, str]]:
        """Return by the names of parameters the names here, and of an expert's part which it is, and its role."""
        named: dict[str, tuple[str, Index, str]] = {spec.parameter(name): (name, ..., "") for name in self.found}
        return apart(spec, named, lambda whole, index, role: (whole[0], index, role))

    def counts(self) -> Counter[str]:
        """Return how many weights of each layout there are; those in groups that no kernel has are named apart."""
        return Counter(
            layout if layout not in COMPUTED or weight.form else f"{layout} in other groups"
            for layout, weight in self.found.values()
        )

    def about(self, name: str, layout: str) -> AbstractContextManager[None]:
        """Name the weight in the errors of a block."""
        return as_load_errors(f"{self.place}: the {layout} weight {name} cannot be read", REMEDY)


def check_codes(slices: Mapping[str, TensorSlice], place: str, why: str) -> None:
    """Raise ModelLoadError for a tensor of codes, which means something only with scales."""
    for name, each in slices.items():
        if each.get_dtype() in _CODES:
            raise ModelLoadError(
                f"{place}: tensor {name} is stored as {each.get_dtype()}, as quantized weights are, and {why}. {REMEDY}"
            )
