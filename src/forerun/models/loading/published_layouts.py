"""How other programs keep quantized weights in safetensors files: the tensors of each layout, the integers that they
hold, and the numbers that these stand for.

A weight is integers, a whole zero and a scale for each group of inputs: number = scale * (integer - zero). The layouts
of GPTQ are those of AutoGPTQ and GPTQModel, of AWQ that of AutoAWQ's "gemm", the others those of compressed-tensors,
bitsandbytes, torchao, HQQ, NVIDIA's Model Optimizer and GPT-OSS. Those without integers or whole zeros are numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forerun.kernels.block_weight import BLOCK_TYPES, BlockType, BlockWeight
from forerun.kernels.quantize import GROUP, QuantizedFormat, QuantizedWeight
from forerun.models.loading.weights import TensorSlice

Parts = Mapping[str, TensorSlice]
"""A weight's tensors by the end of their names; "": the codes."""
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of eight whose code lies in each half of a word's bytes, from the lowest on."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Settings(NamedTuple):
    """What the configuration says of a quantization, where tensors do not.

    Attributes:
        zeros_lack_one: GPTQ's first format, whose zeros are one less than they stand for.
        group: inputs that share a scale, if all weights have the same; 0: nothing is said.
        block: outputs and inputs that share a scale of FP8; 0: nothing is said.
        bits: of integers that lie in bytes.
    """

    zeros_lack_one: bool = False
    group: int = 0
    block: tuple[int, int] = (0, 0)
    bits: int = 8


@dataclass(frozen=True, slots=True)
class Integers:
    """The integers of a weight, not unpacked yet. Each method raises ValueError where they contradict each other.

    Attributes:
        bits: of an integer as it is kept.
        shape: outputs and inputs. groups: of inputs.
        codes: returns [out, in] uint8.
        scale: returns [out, groups], in float32 `has_wide_scales`. zero: returns [out, groups] uint8; None: the middle.
        place: returns [in], the group of each input; None: in order.
        group: inputs of a group, by the configuration; 0: nothing is said.
    """

    bits: int
    shape: tuple[int, int]
    groups: int
    codes: Callable[[], Tensor]
    scale: Callable[[], Tensor]
    zero: Callable[[], Tensor] | None
    has_wide_scales: bool
    place: Callable[[], Tensor] | None = None
    group: int = 0

    def form(self) -> QuantizedFormat | None:
        """Return the format of `weight`; None where no kernel has one: groups that are scattered or not whole groups of
        32, and groups with scales in float32."""
        width = self.shape[1]
        group = width // self.groups
        if self.bits not in (2, 4, 8) or width % self.groups or (self.groups > 1 and self.group not in (0, group)):
            raise ValueError(
                f"{self.groups} groups of {self.group or group} inputs with {self.bits} bits, rows of {width}"
            )
        if self.groups == 1 and self.bits == 8 and self.zero is None:
            return QuantizedFormat(8, 128, None, False)
        if self.groups > 1 and (group % GROUP or self.has_wide_scales or self._is_scattered()):
            return None
        return QuantizedFormat(max(4, self.bits), None, -(-group // GROUP) * GROUP, False)

    def weight(self) -> QuantizedWeight | None:
        """Return the integers as they are; None where there is no form."""
        if (form := self.form()) is None:
            return None
        codes, zeros, scale = self._read()
        return QuantizedWeight(form.bits, codes, zeros if form.zero is None else form.zero, scale, None, form.group)

    def numbers(self) -> Tensor:
        """Return the numbers, [out, in] float32."""
        self.form()
        place = (
            torch.arange(self.shape[1]) // (self.shape[1] // self.groups) if self.place is None else self.place().long()
        )
        codes, zeros, scale = self._read()
        return (codes.float() - zeros[:, place]).mul_(scale[:, place])

    def _read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, zeros and scales."""
        codes, scale = self.codes().contiguous(), self.scale().float().contiguous()
        zeros = torch.full(scale.shape, 1 << self.bits - 1) if self.zero is None else self.zero()
        by_group = (self.shape[0], self.groups)
        if (codes.shape, scale.shape, zeros.shape) != (self.shape, by_group, by_group):
            raise ValueError(f"{list(codes.shape)} codes, {list(scale.shape)} scales and {list(zeros.shape)} zeros")
        if not scale.isfinite().all():
            raise ValueError("a scale is NaN or infinite")
        return codes, zeros.to(torch.uint8), scale

    def _is_scattered(self) -> bool:
        """Return whether the inputs of a group lie apart."""
        if self.place is None:
            return False
        place, width = self.place().long(), self.shape[1]
        if place.shape != (width,) or int(place.min()) < 0 or int(place.max()) >= self.groups:
            raise ValueError(f"the group of an input is none of 0..{self.groups - 1}")
        return not torch.equal(place, torch.arange(width) // (width // self.groups))


@dataclass(frozen=True, slots=True)
class Layout:
    """How a weight lies in tensors.

    Attributes:
        name: for messages.
        codes: the end of the name of the tensor of codes, behind that of the weight without its last part.
        dtypes: of the codes.
        needed: ends of the names of the tensors beside it. others: of those that may be there.
        leaf: the weight's last part.
        shape: of the parameter.
        integers: of its parts; None: it has none that are computed with.
        blocks: its parts as GGUF's blocks of this type; None: they are none.
        numbers: of its parts, float32.
    """

    name: str
    codes: str
    dtypes: tuple[str, ...]
    needed: tuple[str, ...]
    others: tuple[str, ...] = ()
    leaf: str = ""
    shape: Callable[[Parts], list[int]] = lambda parts: parts[""].get_shape()
    integers: Callable[[Parts, Settings], Integers] | None = None
    blocks: Callable[[Parts, EllipsisType | int], BlockWeight] | None = None
    numbers: Callable[[Parts, Settings, EllipsisType | int], Tensor] | None = None

    def form(self, parts: Parts, settings: Settings) -> QuantizedFormat | BlockType | None:
        """Return the format of `weight`; None where the weight is numbers."""
        if self.blocks is not None:
            return BLOCK_TYPES["MXFP4"]
        return None if self.integers is None else self.integers(parts, settings).form()

    def weight(
        self, parts: Parts, settings: Settings, index: EllipsisType | int = ...
    ) -> QuantizedWeight | BlockWeight | None:
        """Return the integers of a weight as they are, or those of an expert; None where the weight is numbers."""
        if self.blocks is not None:
            return self.blocks(parts, index)
        return None if self.integers is None else self.integers(parts, settings).weight()

    def dequantized(self, parts: Parts, settings: Settings, index: EllipsisType | int = ...) -> Tensor:
        """Return the numbers of a weight, or those of an expert, in float32."""
        if self.integers is not None:
            return self.integers(parts, settings).numbers()
        assert self.numbers is not None
        return self.numbers(parts, settings, index)


def _fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields of bits of words, the lowest first. [..., n] -> [..., n * bits of a word / bits] uint8."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    return torch.stack([packed >> shift & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def _gptq(parts: Parts, settings: Settings) -> Integers:
    groups, out = parts[".scales"].get_shape()
    (rows, _), (_, packed) = parts[""].get_shape(), parts[".qzeros"].get_shape()
    bits = 32 * packed // out
    mask, lacking = (1 << bits) - 1, int(settings.zeros_lack_one)
    place = parts.get(".g_idx")
    return Integers(
        bits,
        (out, 32 * rows // max(1, bits)),
        groups,
        lambda: _fields(parts[""][...].T, bits),
        lambda: parts[".scales"][...].T,
        lambda: ((_fields(parts[".qzeros"][...], bits) + lacking) & mask).T,
        parts[".scales"].get_dtype() == "F32",
        None if place is None else lambda: place[...],
        settings.group,
    )


def _awq(parts: Parts, settings: Settings) -> Integers:
    (groups, out), (count, _) = parts[".scales"].get_shape(), parts[""].get_shape()

    def unpacked(words: Tensor) -> Tensor:
        """Return [out, n] codes of [n, out / 8] words."""
        packed = words.T.contiguous().view(torch.uint8).view(words.shape[1], words.shape[0], 4)
        codes = torch.empty(words.shape[1], 8, words.shape[0], dtype=torch.uint8)
        for place, output in enumerate(_AWQ_ORDER):
            codes[:, output] = packed[..., place // 2] >> 4 * (place % 2) & 15
        return codes.flatten(0, 1)

    return Integers(
        4,
        (out, count),
        groups,
        lambda: unpacked(parts[""][...]),
        lambda: parts[".scales"][...].T,
        lambda: unpacked(parts[".qzeros"][...]),
        parts[".scales"].get_dtype() == "F32",
        group=settings.group,
    )


def _packed_shape(parts: Parts) -> list[int]:
    found: list[int] = parts["_shape"][...].tolist()
    return found


def _packed(parts: Parts, settings: Settings) -> Integers:
    """Of compressed-tensors, packed: zeros along the outputs."""
    out, count = _packed_shape(parts)
    bits = 32 // -(-count // parts[""].get_shape()[1])
    zero, place, scale = parts.get("_zero_point"), parts.get("_g_idx"), parts["_scale"]
    return Integers(
        bits,
        (out, count),
        scale.get_shape()[1],
        lambda: _fields(parts[""][...], bits)[:, :count].contiguous(),
        lambda: scale[...],
        None if zero is None else lambda: _fields(zero[...].T, bits)[:, :out].T,
        scale.get_dtype() == "F32",
        None if place is None else lambda: place[...],
        settings.group,
    )


def _bytes(scale_part: str, zero_part: str | None, factor: float = 1.0) -> Callable[[Parts, Settings], Integers]:
    """Return the reader of signed integers that lie in bytes, with a scale for each output, or for groups.

    factor: of the scales.
    """

    def read(parts: Parts, settings: Settings) -> Integers:
        out, count = parts[""].get_shape()
        zero, scale = parts[zero_part] if zero_part in parts else None, parts[scale_part]
        groups = scale.get_shape()[1] if len(scale.get_shape()) == 2 else 1

        def codes() -> Tensor:
            values, most = parts[""][...], 1 << settings.bits - 1
            if most < 128 and not -most <= int(values.min()) <= int(values.max()) < most:
                raise ValueError(f"a code has more than {settings.bits} bits")
            return values.view(torch.uint8) ^ 128

        return Integers(
            8,
            (out, count),
            groups,
            codes,
            lambda: (scale[...].float() * factor).view(-1, groups).expand(out, groups),
            None if zero is None else lambda: zero[...].view(torch.uint8).view(-1, groups).expand(out, groups) ^ 128,
            scale.get_dtype() == "F32",
            group=settings.group,
        )

    return read


def _doubled(part: str) -> Callable[[Parts], list[int]]:
    """Return a function of the shape of codes, two in a byte."""

    def shape(parts: Parts) -> list[int]:
        *outer, last = parts[part].get_shape()
        return [*outer, 2 * last]

    return shape


def _mxfp4(parts: Parts, index: EllipsisType | int) -> BlockWeight:
    """Return GGUF's blocks of a matrix: these have the first half of the inputs in low halves of bytes."""
    scales = parts.get("_scales", parts.get("_scale"))
    assert scales is not None
    exponents = scales[index]
    pairs = parts[""][index].reshape(*exponents.shape, 16)
    codes = _fields(pairs, 4)
    blocks = torch.cat([exponents[..., None], codes[..., :16] | codes[..., 16:] << 4], -1)
    return BlockWeight("MXFP4", (exponents.shape[0], 32 * exponents.shape[1]), blocks.flatten(1).numpy())


def _mxfp4_numbers(parts: Parts, settings: Settings, index: EllipsisType | int) -> Tensor:
    if index is ... and len(parts[""].get_shape()) == 4:
        return torch.stack([_mxfp4_numbers(parts, settings, each) for each in range(parts[""].get_shape()[0])])
    numbers = _mxfp4(parts, index).quantized().dequantize(torch.float32)
    return numbers.T if len(parts[""].get_shape()) == 4 else numbers


def _experts_shape(parts: Parts) -> list[int]:
    count, out, groups, _ = parts[""].get_shape()
    return [count, 32 * groups, out]


def _float8(scale_part: str) -> Callable[[Parts, Settings, EllipsisType | int], Tensor]:
    """Return the reader of FP8 with a scale for each tensor, output or block."""

    def read(parts: Parts, settings: Settings, index: EllipsisType | int) -> Tensor:
        return (
            parts[""][index]
            .float()
            .mul_(_spread(_scales(parts[scale_part][index]), parts[""].get_shape()[-2:], settings))
        )

    return read


def _scales(scale: Tensor) -> Tensor:
    """Return scales in float32; bytes are exponents."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def _spread(scale: Tensor, shape: list[int], settings: Settings) -> Tensor:
    """Repeat scales for all that share them: [...], [out] or [..., rows, columns] -> what a matrix is multiplied by."""
    if scale.dim() < 2:
        return scale[:, None] if scale.numel() > 1 else scale.reshape(())
    for axis, (size, block) in enumerate(zip(shape, settings.block, strict=True), -2):
        count = scale.shape[axis]
        if count in (1, size):
            continue
        block = block or size // count
        if -(-size // block) != count:
            raise ValueError(f"{count} scales of blocks of {block} do not fit {size} numbers")
        scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    return scale


def _nvfp4(global_part: str, *, divides: bool) -> Callable[[Parts, Settings, EllipsisType | int], Tensor]:
    """Return the reader of E2M1, with FP8 scales of 16 inputs and one of the tensor."""

    def read(parts: Parts, settings: Settings, index: EllipsisType | int) -> Tensor:
        whole = parts[global_part][index].float().reshape(())
        scale = parts["_scale"][index].float() * (1 / whole if divides else whole)
        codes = _fields(parts[""][index], 4)
        numbers = torch.tensor(_E2M1)[codes.int()]
        return numbers.mul_(_spread(scale, list(numbers.shape), Settings()))

    return read


def _nf4_state(parts: Parts) -> dict[str, Any]:
    (part,) = (parts[key] for key in parts if key.startswith(".quant_state."))
    state: dict[str, Any] = json.loads(bytes(part[...].tolist()))
    return state


def _nf4(parts: Parts, settings: Settings, index: EllipsisType | int) -> Tensor:
    """Return the numbers of bitsandbytes' 4 bits: places in a table, the first in the high half of a byte, of blocks
    with a scale each, which may be quantized itself."""
    state, scale = _nf4_state(parts), parts[".absmax"][...]
    if ".nested_absmax" in parts:
        wide = parts[".nested_absmax"][...].repeat_interleave(state["nested_blocksize"])[: len(scale)]
        scale = parts[".nested_quant_map"][...][scale.int()] * wide + state["nested_offset"]
    packed = parts[""][...].flatten()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten().int()
    numbers = parts[".quant_map"][...].float()[codes]
    return numbers.mul_(scale.float().repeat_interleave(state["blocksize"])[: len(numbers)]).view(state["shape"])


def _hqq(parts: Parts, settings: Settings, index: EllipsisType | int) -> Tensor:
    """Return the numbers of HQQ: groups are rows, or columns, packed by equal parts of the rows, the first highest."""
    bits = int(parts[".nbits"][...])
    if bits not in (1, 2, 4, 8) or any(
        bool(parts[key][...]) for key in (".quant_scale", ".quant_zero") if key in parts
    ):
        raise ValueError(f"{bits} bits, or scales that are quantized themselves, are not read")
    packed, mask = parts[""][...], (1 << bits) - 1
    codes = torch.cat([packed >> shift & mask for shift in range(8 - bits, -1, -bits)])
    return ((codes.float() - parts[".zero"][...].float()) * parts[".scale"][...].float()).view(
        parts[".shape"][...].tolist()
    )


_HQQ_OTHERS = (
    *(".packing", ".unpack_view_dtype", ".view_as_float", ".quant_scale", ".quant_zero", ".compute_dtype"),
    *(".offload_meta", ".encoded_state_dict", ".stores_quant_config", ".channel_wise", ".optimize", ".round_zero"),
    *(".group_size", ".axis"),
)
_OF_4_BITS = (".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")


def _of(read: Callable[[Parts, Settings], Integers]) -> Callable[[Parts], list[int]]:
    return lambda parts: list(read(parts, Settings()).shape)


GPTQ = Layout("GPTQ", ".qweight", ("I32",), (".qzeros", ".scales"), (".g_idx",), ".weight", _of(_gptq), _gptq)
AWQ = Layout("AWQ", ".qweight", ("I32",), (".qzeros", ".scales"), (), ".weight", _of(_awq), _awq)
PACKED = Layout(
    "packed integers", "_packed", ("I32",), ("_scale", "_shape"), ("_zero_point", "_g_idx"), "", _packed_shape, _packed
)
INT8 = Layout("int8", "", ("I8",), ("_scale",), ("_zero_point",), integers=_bytes("_scale", "_zero_point"))
BNB_INT8 = Layout(
    "LLM.int8()", ".weight", ("I8",), (".SCB",), (".weight_format",), ".weight", integers=_bytes(".SCB", None, 1 / 127)
)
TORCHAO_INT8 = Layout(
    "torchao's int8",
    "._weight_qdata",
    ("I8",),
    ("._weight_scale",),
    ("._weight_zero_point", "._weight_act_pre_scale"),
    ".weight",
    integers=_bytes("._weight_scale", "._weight_zero_point"),
)
MXFP4_EXPERTS = Layout("MXFP4", "_blocks", ("U8",), ("_scales",), (), "", _experts_shape, None, _mxfp4, _mxfp4_numbers)
MXFP4 = Layout("MXFP4", "_packed", ("U8",), ("_scale",), (), "", _doubled(""), None, _mxfp4, _mxfp4_numbers)
FLOAT8_BLOCKS = Layout("FP8", "", _FLOAT8, ("_scale_inv",), numbers=_float8("_scale_inv"))
FLOAT8 = Layout("FP8", "", _FLOAT8, ("_scale",), numbers=_float8("_scale"))
TORCHAO_FLOAT8 = Layout(
    "torchao's FP8", "._weight_qdata", _FLOAT8, ("._weight_scale",), (), ".weight", numbers=_float8("._weight_scale")
)
NVFP4 = Layout(
    "NVFP4", "", ("U8",), ("_scale", "_scale_2"), (), "", _doubled(""), numbers=_nvfp4("_scale_2", divides=False)
)
NVFP4_PACKED = Layout(
    "NVFP4",
    "_packed",
    ("U8",),
    ("_scale", "_global_scale"),
    (),
    "",
    _doubled(""),
    numbers=_nvfp4("_global_scale", divides=True),
)
BNB_4_BITS = Layout(
    "NF4 or FP4",
    "",
    ("U8",),
    (".absmax", ".quant_map"),
    _OF_4_BITS,
    "",
    lambda parts: list(_nf4_state(parts)["shape"]),
    numbers=_nf4,
)
HQQ = Layout(
    "HQQ",
    ".W_q",
    ("U8",),
    (".scale", ".zero", ".shape", ".nbits"),
    _HQQ_OTHERS,
    ".weight",
    lambda parts: parts[".shape"][...].tolist(),
    numbers=_hqq,
)
