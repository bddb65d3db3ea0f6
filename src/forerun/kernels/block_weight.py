"""Weights in the blocks of GGUF files: their types, and the integers, scales and minima that the bytes hold.

The layouts are those of ggml-quants.c in llama.cpp. Types named _K and IQ4_XS have two levels of scales: a float16 for
a super-block of 256 inputs, times whole numbers of 6 or 8 bits for its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import ModelLoadError
from forerun.kernels.quantize import QuantizedWeight

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Parts = tuple[Bytes, Floats, Floats | None]
"""Of blocks [..., bytes]: values [..., inputs of a block], scales and minima [..., groups of a block]."""

_PART = 1 << 18
"""Numbers dequantized together."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Doubled, as llama.cpp has them; its scales are halved."""


def _halves(packed: Bytes, run: int) -> Bytes:
    """Return codes of 4 bits: the low halves of each `run` bytes, then the high ones. [..., n] -> [..., 2 n]."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], -2).reshape(*packed.shape[:-1], -1)


def _fields(packed: Bytes, run: int, bits: int) -> Bytes:
    """Return the fields of `bits` of bytes, the lowest of each `run` bytes first. [..., n] -> [..., n * 8 / bits]."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (runs >> shifts & np.uint8((1 << bits) - 1)).reshape(*packed.shape[:-1], -1)


def _float16(blocks: Bytes, first: int) -> Floats:
    """Return the float16 at a byte of each block, [..., 1]."""
    return np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16).astype(np.float32)


def _scales_of_6_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return the scales and minima of eight groups. packed: [..., 12] -> [..., 8] each."""
    scale, minimum, both = np.split(packed, 3, -1)
    return (
        np.concatenate([scale & 63, both & 15 | scale >> 2 & 48], -1),
        np.concatenate([minimum & 63, both >> 4 | minimum >> 2 & 48], -1),
    )


def _q4_0(blocks: Bytes) -> Parts:
    return _halves(blocks[..., 2:], 16), _float16(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _halves(blocks[..., 4:], 16), _float16(blocks, 0), _float16(blocks, 2)


def _fifth_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Parts:
    return _halves(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6]), _float16(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    return _halves(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8]), _float16(blocks, 0), _float16(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[..., 2:] ^ np.uint8(128), _float16(blocks, 0), None


def _q4_k(blocks: Bytes) -> Parts:
    scale, minimum = _scales_of_6_bits(blocks[..., 4:16])
    return _halves(blocks[..., 16:], 32), _float16(blocks, 0) * scale, -(_float16(blocks, 2) * minimum)


def _q5_k(blocks: Bytes) -> Parts:
    scale, minimum = _scales_of_6_bits(blocks[..., 4:16])
    values = _halves(blocks[..., 48:], 32) | _fields(blocks[..., 16:48], 32, 1) << np.uint8(4)
    return values, _float16(blocks, 0) * scale, -(_float16(blocks, 2) * minimum)


def _q6_k(blocks: Bytes) -> Parts:
    values = _halves(blocks[..., :128], 64) | _fields(blocks[..., 128:192], 32, 2) << np.uint8(4)
    return values, _float16(blocks, 208) * blocks[..., 192:208].view(np.int8), None


def _of_table(table: tuple[int, ...], codes: Bytes) -> Bytes:
    """Return the values of codes, about 128."""
    return (np.array(table) + 128).astype(np.uint8)[codes]


def _iq4_nl(blocks: Bytes) -> Parts:
    return _of_table(_IQ4, _halves(blocks[..., 2:], 16)), _float16(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Parts:
    low = _fields(blocks[..., 4:8], 1, 4)
    high = _fields(blocks[..., 2:4], 1, 2)
    scale = (low | high << 4).astype(np.int8) - np.int8(32)
    return _of_table(_IQ4, _halves(blocks[..., 8:], 16)), _float16(blocks, 0) * scale, None


def _mxfp4(blocks: Bytes) -> Parts:
    exponent = blocks[..., :1]
    scale = np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)
    scale = np.where(exponent == 255, np.float32(np.nan), scale)  # the format's only NaN
    return _of_table(_E2M1, _halves(blocks[..., 1:], 16)), scale, None


@dataclass(frozen=True, slots=True)
class BlockType:
    """The properties of a type of blocks, which weights must share to be joined.

    Attributes:
        name: as in the gguf package, such as "Q4_K".
        block_size: inputs of a block. block_bytes: of these.
        bits: of a value as it is stored.
        zero: the value that stands for 0, or for the minimum. Those of look-up tables are 128 + what the table holds.
        group: inputs that share a scale, 32 or 16.
        has_minimum: whether there are minima.
        read: blocks -> their parts.
        layout: the format that they have in memory, if that is one of weights quantized here, which are also multiplied
            with activations of 16 bits. Others have a format of their own name.
    """

    name: str
    block_size: int
    block_bytes: int
    bits: int
    zero: int
    group: int
    has_minimum: bool
    read: Callable[[Bytes], Parts]
    layout: str = ""

    def row_bytes(self, num_inputs: int) -> int:
        """Return the bytes of a row.

        Raises:
            ModelLoadError: a row is not whole blocks.
        """
        if num_inputs % self.block_size:
            raise ModelLoadError(
                f"a row of {num_inputs:,} numbers is not whole blocks of {self.block_size}, of which {self.name} "
                "consists. Download the file anew."
            )
        return num_inputs // self.block_size * self.block_bytes


_small = partial(BlockType, block_size=32, group=32)
_large = partial(BlockType, block_size=256)
BLOCK_TYPES = {
    each.name: each
    for each in (
        _small("Q4_0", block_bytes=18, bits=4, zero=8, has_minimum=False, read=_q4_0, layout="INT4_GROUPS"),
        _small("Q4_1", block_bytes=20, bits=4, zero=0, has_minimum=True, read=_q4_1, layout="INT4_MINIMA"),
        _small("Q5_0", block_bytes=22, bits=5, zero=16, has_minimum=False, read=_q5_0),
        _small("Q5_1", block_bytes=24, bits=5, zero=0, has_minimum=True, read=_q5_1),
        _small("Q8_0", block_bytes=34, bits=8, zero=128, has_minimum=False, read=_q8_0, layout="INT8_GROUPS"),
        _large("Q4_K", block_bytes=144, bits=4, zero=0, group=32, has_minimum=True, read=_q4_k),
        _large("Q5_K", block_bytes=176, bits=5, zero=0, group=32, has_minimum=True, read=_q5_k),
        _large("Q6_K", block_bytes=210, bits=6, zero=32, group=16, has_minimum=False, read=_q6_k),
        _small("IQ4_NL", block_bytes=18, bits=4, zero=128, has_minimum=False, read=_iq4_nl),
        _large("IQ4_XS", block_bytes=136, bits=4, zero=128, group=32, has_minimum=False, read=_iq4_xs),
        _small("MXFP4", block_bytes=17, bits=4, zero=128, has_minimum=False, read=_mxfp4),
    )
}
"""By name, the types that are computed with as they lie in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A matrix in blocks of a GGUF file, on the CPU.

    Attributes:
        type_name: of the blocks, a key of BLOCK_TYPES.
        shape: outputs and inputs; with an order, outputs are those of the order.
        blocks: [rows of the file, bytes of a row], which may be a file's read-only memory.
        order: [out] int64, the rows of the file that are the outputs; None: all in order.
        activation_bits: of the activations that it is multiplied with: 8, one scale per 32 inputs; or 16, one per row,
            of Q4_0, Q4_1 and Q8_0 alone.
    """

    type_name: str
    shape: tuple[int, int]
    blocks: Bytes
    order: Tensor | None = None
    activation_bits: int = 8

    def __post_init__(self) -> None:
        rows, row_bytes = self.blocks.shape
        if row_bytes != self.form.row_bytes(self.shape[1]) or self.shape[0] != (
            rows if self.order is None else len(self.order)
        ):
            raise ValueError(f"blocks {self.blocks.shape} of {self.type_name} are not a matrix {self.shape}")
        if self.activation_bits != 8 and not self.form.layout:
            raise ValueError(f"{self.type_name} cannot be multiplied with activations of 16 bits")

    @property
    def form(self) -> BlockType:
        """Return the properties that weights must share to be joined."""
        return BLOCK_TYPES[self.type_name]

    @property
    def device(self) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    @property
    def bits(self) -> int:
        """Return the bits of a value as it is stored."""
        return self.form.bits

    def rows(self, index: Tensor) -> BlockWeight:
        """Select or reorder outputs, without reading them. index: [n] int64."""
        order = index if self.order is None else self.order[index]
        return replace(self, shape=(len(index), self.shape[1]), order=order)

    @staticmethod
    def cat(parts: Sequence[BlockWeight]) -> BlockWeight:
        """Concatenate the outputs of several weights of one type and number of inputs; two or more are copied."""
        if len(parts) == 1:
            return parts[0]
        blocks = np.concatenate([part._ordered() for part in parts])
        return replace(parts[0], shape=(len(blocks), parts[0].shape[1]), blocks=blocks, order=None)

    def quantized(self) -> QuantizedWeight:
        """Return the values, a byte each, and the scales as float32, the product of two levels rounded once.

        Raises:
            ModelLoadError: a scale is NaN or infinite. The message names the row alone.
        """
        weight = self._quantized()
        finite = weight.scale.isfinite().all(1)
        finite &= True if weight.minimum is None else weight.minimum.isfinite().all(1)
        if not finite.all():
            raise non_finite_row(int(finite.int().argmin()))
        return weight

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [out, in] numbers, computed in float32 as in llama.cpp and converted to `dtype`."""
        result = torch.empty(self.shape, dtype=dtype)
        for rows in torch.arange(self.shape[0]).split(max(1, _PART // self.shape[1])):  # type: ignore[no-untyped-call]
            result[rows] = self.rows(rows)._quantized().dequantize(dtype)
        return result

    def _ordered(self) -> Bytes:
        return self.blocks if self.order is None else self.blocks[self.order.numpy()]

    def _quantized(self) -> QuantizedWeight:
        form = self.form
        (out, num_inputs) = self.shape
        blocks = self._ordered().reshape(out, num_inputs // form.block_size, form.block_bytes)
        with np.errstate(invalid="ignore"):  # an infinite scale times none
            values, scale, minimum = form.read(blocks)
        return QuantizedWeight(
            form.bits if form.zero < 128 else 8,
            torch.from_numpy(values.reshape(self.shape)),
            form.zero,
            torch.from_numpy(scale.reshape(out, -1)),
            None if minimum is None else torch.from_numpy(minimum.reshape(out, -1)),
            form.group,
            self.activation_bits,
        )


def non_finite_row(row: int) -> ModelLoadError:
    """Return the error of a row in which a scale is NaN or infinite."""
    return ModelLoadError(f"row {row:,} has a scale that is NaN or infinite. Download the file anew.")
