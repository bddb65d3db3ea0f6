"""Weights that other programs have quantized in safetensors files: the tensors of each layout, the integers that they
hold, the numbers that these stand for, and what a configuration says of them.

A weight is integers, a whole zero and a scale for each group of inputs: number = scale * (integer - zero). The layouts
of GPTQ are those of AutoGPTQ and GPTQModel, of AWQ that of AutoAWQ's "gemm", the others those of compressed-tensors,
bitsandbytes, torchao, HQQ, NVIDIA's Model Optimizer and GPT-OSS. Those without integers or whole zeros are numbers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.config import QUANTISATIONS
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.kernels.block_weight import BLOCK_TYPES, BlockType, BlockWeight
from forerun.kernels.cpu import native
from forerun.kernels.quantize import GROUP, MADE_FORMS, QuantizedFormat, QuantizedWeight
from forerun.models.fused.experts import apart, part_of
from forerun.models.loading.configuration import with_text_config
from forerun.models.loading.weights import Dequantized, TensorSlice
from forerun.models.spec.decoder import DecoderSpec
from forerun.utils.foreign_errors import REMEDY, as_load_errors
from forerun.utils.json_file import Fields

Parts = Mapping[str, TensorSlice]
"""A weight's tensors by the end of their names; "": the codes."""
Index = EllipsisType | int
"""All of a parameter, or that of an expert."""
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The half of a word's bytes, from the lowest on, in which each output of eight has its code."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Settings(NamedTuple):
    """What a configuration says of a quantization.

    Attributes:
        method: a key of METHODS. place: the file, for messages.
        zeros_lack_one: GPTQ's first format, whose zeros are one less than they stand for.
        group: inputs that share a scale, if all weights have the same; 0: nothing is said.
        block: outputs and inputs that share a scale of FP8; 0: nothing is said.
        bits: of integers that lie in bytes.
    """

    method: str
    place: str
    zeros_lack_one: bool = False
    group: int = 0
    block: tuple[int, int] = (0, 0)
    bits: int = 8


class Stored(NamedTuple):
    """A weight that is not read yet.

    Attributes:
        shape: of the parameter.
        numbers: returns it in float32. Raises ValueError where its tensors contradict each other.
        form: of `weight`.
        weight: returns the integers as they are; None where no kernel has their form.
    """

    shape: list[int]
    numbers: Callable[[Index], Tensor]
    form: QuantizedFormat | BlockType | None = None
    weight: Callable[[Index], QuantizedWeight | BlockWeight] | None = None


class WeightLayout(NamedTuple):
    """How a weight lies in tensors.

    Attributes:
        name: for messages.
        codes: the end of the name of the tensor of codes. dtypes: of the codes.
        needed: ends in place of it of the tensors beside it. others: of those that may be there.
        leaf: the parameter's end in place of it.
        read: the weight of its tensors. Raises ValueError where they contradict each other.
    """

    name: str
    codes: str
    dtypes: tuple[str, ...]
    needed: tuple[str, ...]
    read: Callable[[Parts, Settings], Stored]
    others: tuple[str, ...] = ()
    leaf: str = ""


def _fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields of bits of words, the lowest first. [..., n] -> [..., n * bits of a word / bits] uint8.

    By NumPy: torch's threads would wait for each other, on a busy machine many times as long as the work takes.
    """
    fields = words.contiguous().view(torch.uint8).numpy()
    for half in (4, 2):
        if half >= bits:
            spread = fields.astype(np.uint16)
            spread |= spread << (8 - half)
            spread &= (1 << half) - 1 << 8 | (1 << half) - 1
            fields = spread.view(np.uint8)
    return torch.from_numpy(fields)


def codes_of(words: Tensor, bits: int = 4, *, of_outputs: bool = False) -> Tensor:
    """Return codes [out, in] uint8, the lowest of a word first: of inputs, [in * bits / 32, out] words; or, in AWQ's
    order, of outputs, [in, out / 8] words. The native library does it where there is one."""
    library = native() if bits == 4 else None
    (rows, columns) = words.shape
    if library is None and of_outputs:
        return _fields(words, bits).view(rows, columns, 8)[..., _AWQ_ORDER].flatten(1).T.contiguous()
    if library is None:
        return _fields(words.T, bits)
    codes = torch.from_numpy(np.empty((8 * columns, rows) if of_outputs else (columns, 8 * rows), np.uint8))
    places = words.data_ptr(), rows, columns, *words.stride(), of_outputs, codes.data_ptr(), torch.get_num_threads()
    library.unpack_words(*places)
    return codes


def _integers(
    settings: Settings,
    bits: int,
    shape: tuple[int, int],
    groups: int,
    scale: TensorSlice,
    read: Callable[[], tuple[Tensor, Tensor, Tensor | None]],
    *,
    has_zeros: bool = True,
    place: TensorSlice | None = None,
) -> Stored:
    """Return a weight of integers, which are kept unless groups are scattered or not whole groups of 32 inputs, or have
    scales in float32.

    read: returns [out, in] codes, and [out, groups] scales and zeros; None: the middle. place: the group of each input.
    """
    width = shape[1]
    group = shape[1] // groups
    in_order = torch.arange(width) // group
    of = in_order if place is None else place[...].long()
    is_whole = width % groups == 0 and (groups == 1 or settings.group in (0, group)) and of.shape == (width,)
    if bits not in (2, 4, 8) or not is_whole or not 0 <= int(of.min()) <= int(of.max()) < groups:
        raise ValueError(
            f"{groups} groups of {settings.group or group} integers of {bits} bits do not fit rows of {width}, whose "
            f"inputs are in groups {int(of.min())} to {int(of.max())}"
        )

    def checked() -> tuple[Tensor, Tensor, Tensor]:
        codes, scales, zeros = read()
        zeros = torch.full(scales.shape, 1 << bits - 1) if zeros is None else zeros
        if (codes.shape, scales.shape, zeros.shape) != (shape, (shape[0], groups), (shape[0], groups)):
            raise ValueError(f"{list(codes.shape)} codes, {list(scales.shape)} scales and {list(zeros.shape)} zeros")
        if not scales.isfinite().all():
            raise ValueError("a scale is NaN or infinite")
        return codes.contiguous(), scales.float().contiguous(), zeros.to(torch.uint8)

    def numbers(index: Index) -> Tensor:
        codes, scales, zeros = checked()
        return (codes.float() - zeros[:, of]).mul_(scales[:, of])

    def weight(index: Index) -> QuantizedWeight:
        codes, scales, zeros = checked()
        zero = zeros if form.zero is None else form.zero
        activation_bits = QUANTISATIONS[f"int{form.bits}"][1]
        return QuantizedWeight(form.bits, codes, zero, scales, None, form.group, activation_bits)

    form = QuantizedFormat(max(4, bits), None, -(-group // GROUP) * GROUP, False)
    if groups > 1 and (group % GROUP or scale.get_dtype() == "F32" or not of.equal(in_order)):
        return Stored(list(shape), numbers)
    form = MADE_FORMS[8] if groups == 1 and bits == 8 and not has_zeros else form
    return Stored(list(shape), numbers, form, weight)


def _gptq(parts: Parts, settings: Settings) -> Stored:
    groups, out = parts[".scales"].get_shape()
    (rows, _) = parts[""].get_shape()
    (_, packed) = parts[".qzeros"].get_shape()
    bits = 32 * packed // out
    # added to whole words, as it was taken off: a zero of 0 has borrowed from the next
    lacking = sum(1 << shift for shift in range(0, 32, bits)) if settings.zeros_lack_one else 0

    def read() -> tuple[Tensor, Tensor, Tensor]:
        zeros = _fields(parts[".qzeros"][...] + lacking, bits)
        return codes_of(parts[""][...], bits), parts[".scales"][...].T, zeros.T

    place = parts.get(".g_idx")
    width = 32 * rows // bits
    return _integers(settings, bits, (out, width), groups, parts[".scales"], read, place=place)


def _awq(parts: Parts, settings: Settings) -> Stored:
    (groups, out) = parts[".scales"].get_shape()
    (width, _) = parts[""].get_shape()

    def read() -> tuple[Tensor, Tensor, Tensor]:
        codes, zeros = (codes_of(parts[key][...], of_outputs=True) for key in ("", ".qzeros"))
        return codes, parts[".scales"][...].T, zeros

    return _integers(settings, 4, (out, width), groups, parts[".scales"], read)


def _packed(parts: Parts, settings: Settings) -> Stored:
    """Of compressed-tensors: words along the inputs, of zeros along the outputs."""
    out, width = parts["_shape"][...].tolist()
    bits = 32 // -(-width // parts[""].get_shape()[1])
    zero = parts.get("_zero_point")

    def read() -> tuple[Tensor, Tensor, Tensor | None]:
        zeros = None if zero is None else _fields(zero[...].T, bits)[:, :out].T
        return codes_of(parts[""][...].T, bits)[:, :width], parts["_scale"][...], zeros

    shape = (out, width)
    groups = parts["_scale"].get_shape()[1]
    place = parts.get("_g_idx")
    return _integers(settings, bits, shape, groups, parts["_scale"], read, has_zeros=zero is not None, place=place)


def _bytes(parts: Parts, settings: Settings, scale_part: str, zero_part: str, factor: float = 1.0) -> Stored:
    """Of signed integers that lie in bytes, with a scale for each output, or for groups.

    factor: of the scales.
    """
    (out, width) = parts[""].get_shape()
    zero = parts.get(zero_part)
    scale = parts[scale_part]
    groups = scale.get_shape()[1] if len(scale.get_shape()) == 2 else 1
    most = 1 << settings.bits - 1

    def read() -> tuple[Tensor, Tensor, Tensor | None]:
        codes = parts[""][...]
        if not -most <= int(codes.min()) <= int(codes.max()) < most:
            raise ValueError(f"a code has more than {settings.bits} bits")
        zeros = None if zero is None else zero[...].view(torch.uint8).view(-1, groups).expand(out, groups) ^ 128
        return codes.view(torch.uint8) ^ 128, (scale[...].float() * factor).view(-1, groups).expand(out, groups), zeros

    return _integers(settings, 8, (out, width), groups, scale, read, has_zeros=zero is not None)


def _mxfp4(parts: Parts, settings: Settings, scale_part: str) -> Stored:
    """Of E2M1, two in a byte, and exponents for 32 inputs; with a dimension more, of all experts,
    whose parameter is [experts, in, out]."""
    *count, out, groups = parts[scale_part].get_shape()

    def weight(index: Index) -> BlockWeight:
        """Return GGUF's blocks: the first half of the inputs in low halves of bytes."""
        exponents = parts[scale_part][index]
        codes = _fields(parts[""][index].reshape(*exponents.shape, 16), 4)
        blocks = torch.cat([exponents[..., None], codes[..., :16] | codes[..., 16:] << 4], -1)
        return BlockWeight("MXFP4", (out, 32 * groups), blocks.flatten(1).numpy())

    def numbers(index: Index) -> Tensor:
        if count and index is ...:
            return torch.stack([numbers(each) for each in range(count[0])])
        found = weight(index).quantized().dequantize(torch.float32)
        return found.T if count else found

    return Stored([*count, 32 * groups, out] if count else [out, 32 * groups], numbers, BLOCK_TYPES["MXFP4"], weight)


def _float8(parts: Parts, settings: Settings, scale_part: str) -> Stored:
    """Of FP8 with a scale for each tensor, output or block; scales in bytes are exponents."""
    shape = parts[""].get_shape()

    def numbers(index: Index) -> Tensor:
        scale = parts[scale_part][index].float()
        are_exponents = parts[scale_part].get_dtype() == "U8"
        codes = parts[""][index]
        table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).float()  # torch converts codes one by one
        found = torch.from_numpy(np.take(table.numpy(), codes.view(torch.uint8).numpy()))
        return _scaled(found, torch.exp2(scale - 127) if are_exponents else scale, settings.block)

    return Stored(shape, numbers)


def _scaled(numbers: Tensor, scale: Tensor, blocks: tuple[int, int] = (0, 0)) -> Tensor:
    """Multiply [..., out, in] numbers by scales in place: [], [out], or [..., rows, columns] of blocks."""
    if scale.dim() < 2:
        return numbers.mul_(scale[:, None] if scale.numel() > 1 else scale.reshape(()))
    for axis, given in enumerate(blocks, -2):
        size = numbers.shape[axis]
        count = scale.shape[axis]
        block = given or size // count
        if count not in (1, size, -(-size // block)):
            raise ValueError(f"{count} scales of blocks of {block} do not fit {size} numbers")
        if count not in (1, size) and axis == -1:
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    height = blocks[0] or numbers.shape[-2] // scale.shape[-2]
    if scale.shape[-2] in (1, numbers.shape[-2]):
        return numbers.mul_(scale)
    for row in range(scale.shape[-2]):  # all scales, spread over their blocks, would be as large as the numbers
        numbers[..., row * height : (row + 1) * height, :].mul_(scale[..., row : row + 1, :])
    return numbers


def _nvfp4(parts: Parts, settings: Settings, global_part: str, *, divides: bool) -> Stored:
    """Of E2M1 with FP8 scales of 16 inputs, and one of the tensor, by which `divides`."""
    *outer, half = parts[""].get_shape()

    def numbers(index: Index) -> Tensor:
        whole = parts[global_part][index].float().reshape(())
        scale = parts["_scale"][index].float() * (1 / whole if divides else whole)
        found = torch.tensor(_E2M1)[_fields(parts[""][index], 4).int()]
        return _scaled(found, scale)

    return Stored([*outer, 2 * half], numbers)


def _nf4(parts: Parts, settings: Settings) -> Stored:
    """Of bitsandbytes' 4 bits: places in a table, the first in the high half of a byte, of blocks with a scale each,
    which may be quantized itself."""
    (part,) = (parts[key] for key in parts if key.startswith(".quant_state."))
    state = json.loads(bytes(part[...].tolist()))

    def numbers(index: Index) -> Tensor:
        scale = parts[".absmax"][...]
        packed = parts[""][...].flatten()
        if ".nested_absmax" in parts:
            wide = parts[".nested_absmax"][...].repeat_interleave(state["nested_blocksize"])[: len(scale)]
            scale = parts[".nested_quant_map"][...][scale.int()] * wide + state["nested_offset"]
        found = parts[".quant_map"][...].float()[torch.stack([packed >> 4, packed & 15], 1).flatten().int()]
        return found.mul_(scale.float().repeat_interleave(state["blocksize"])[: len(found)]).view(state["shape"])

    return Stored(list(state["shape"]), numbers)


def _hqq(parts: Parts, settings: Settings) -> Stored:
    """Of HQQ: groups are rows, or columns, packed by equal parts of the rows, the first highest."""
    bits = int(parts[".nbits"][...])
    shape = parts[".shape"][...].tolist()

    def numbers(index: Index) -> Tensor:
        packed = parts[""][...]
        codes = torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(8 - bits, -1, -bits)])
        return ((codes.float() - parts[".zero"][...].float()) * parts[".scale"][...].float()).view(shape)

    return Stored(shape, numbers)


_GPTQ = WeightLayout("GPTQ", ".qweight", ("I32",), (".qzeros", ".scales"), _gptq, (".g_idx",), ".weight")
_FLOAT8_OF = WeightLayout("FP8", "", _FLOAT8, ("_scale",), partial(_float8, scale_part="_scale"))
_INT8 = WeightLayout(
    "int8", "", ("I8",), ("_scale",), partial(_bytes, scale_part="_scale", zero_part="_zero_point"), ("_zero_point",)
)
METHODS: Mapping[str, tuple[WeightLayout, ...]] = {
    "gptq": (_GPTQ,),
    "awq": (_GPTQ._replace(name="AWQ", read=_awq),),
    "compressed-tensors": (
        WeightLayout("packed integers", "_packed", ("I32",), ("_scale", "_shape"), _packed, ("_zero_point", "_g_idx")),
        WeightLayout(
            "NVFP4",
            "_packed",
            ("U8",),
            ("_scale", "_global_scale"),
            partial(_nvfp4, global_part="_global_scale", divides=True),
        ),
        WeightLayout("MXFP4", "_packed", ("U8",), ("_scale",), partial(_mxfp4, scale_part="_scale")),
        _INT8,
        _FLOAT8_OF,
    ),
    "bitsandbytes": (
        WeightLayout(
            "LLM.int8()",
            ".weight",
            ("I8",),
            (".SCB",),
            partial(_bytes, scale_part=".SCB", zero_part=".zeros", factor=1 / 127),
            (".weight_format",),
            ".weight",
        ),
        WeightLayout(
            "NF4 or FP4",
            "",
            ("U8",),
            (".absmax", ".quant_map"),
            _nf4,
            (".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
        ),
    ),
    "mxfp4": (WeightLayout("MXFP4", "_blocks", ("U8",), ("_scales",), partial(_mxfp4, scale_part="_scales")),),
    "fp8": (_FLOAT8_OF._replace(needed=("_scale_inv",), read=partial(_float8, scale_part="_scale_inv")), _FLOAT8_OF),
    "fbgemm_fp8": (_FLOAT8_OF,),
    "modelopt": (
        WeightLayout(
            "NVFP4", "", ("U8",), ("_scale", "_scale_2"), partial(_nvfp4, global_part="_scale_2", divides=False)
        ),
        _FLOAT8_OF,
    ),
    "quark": (_INT8, _FLOAT8_OF),
    "torchao": (
        WeightLayout(
            *("torchao's int8", "._weight_qdata", ("I8",), ("._weight_scale",)),
            partial(_bytes, scale_part="._weight_scale", zero_part="._weight_zero_point"),
            ("._weight_zero_point",),
            ".weight",
        ),
        WeightLayout(
            "torchao's FP8",
            "._weight_qdata",
            _FLOAT8,
            ("._weight_scale",),
            partial(_float8, scale_part="._weight_scale"),
            (),
            ".weight",
        ),
    ),
    "hqq": (
        WeightLayout(
            "HQQ",
            ".W_q",
            ("U8",),
            (".scale", ".zero", ".shape", ".nbits"),
            _hqq,
            (
                *(".packing", ".unpack_view_dtype", ".view_as_float", ".quant_scale", ".quant_zero", ".compute_dtype"),
                *(
                    ".offload_meta",
                    ".encoded_state_dict",
                    ".stores_quant_config",
                    ".channel_wise",
                    ".optimize",
                    ".round_zero",
                ),
                *(".group_size", ".axis"),
            ),
            ".weight",
        ),
    ),
}
"""By `quant_method`, the layouts that weights may have."""
COMPUTED = ("GPTQ", "AWQ", "packed integers", "int8", "LLM.int8()", "torchao's int8", "MXFP4")
"""Names of layouts whose integers are computed with as they are."""
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
    unnamed = "MLX" if is_mlx else "a program that is not named"
    name = stored.string("quant_method", "bitsandbytes" if is_bnb else unnamed)
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
