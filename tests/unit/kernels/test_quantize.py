"""Quantized weights: their error, what is refused, and GGUF's blocks to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.errors import ModelLoadError
from forerun.kernels import quantize as quantize, quantize as quantized_weight
from forerun.kernels.quantize import QuantizedWeight, quantize_int4, quantize_int8
from forerun.kernels.torch.linear import QuantizedEmbedding
from forerun.models.loading.gguf.file import GgufTensor, read_types, weight_to_keep
from gguf_files import pack

QUANTISE: dict[str, Callable[..., QuantizedWeight]] = {"int8": quantize_int8, "int4": quantize_int4}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tensor_of(packed: np.ndarray, type_name: str, shape: tuple[int, ...]) -> GgufTensor:
    return GgufTensor("blk.0.ffn_up.weight", shape, type_name, packed)


def test_int8_is_within_half_a_step_and_uses_all_codes() -> None:
    matrix = drawn(33, 77)
    weight = quantize_int8(matrix)
    assert (weight.bits, weight.zero, weight.group, weight.minimum) == (8, 128, None, None)
    assert weight.scale.shape == (33, 1) and weight.scale.dtype == torch.float32
    assert ((weight.dequantize(torch.float32) - matrix).abs() <= weight.scale * 0.5001).all()
    assert ((weight.quantized == 1) | (weight.quantized == 255)).any(1).all() and weight.quantized.min() > 0


@pytest.mark.parametrize("width", [32, 77, 5])
def test_int4_is_within_half_a_step_of_its_group(width: int) -> None:
    matrix = drawn(33, width)
    weight = quantize_int4(matrix)
    groups = -(-width // 32)
    assert (weight.bits, weight.zero, weight.group) == (4, 0, 32) and weight.minimum is not None
    assert weight.quantized.shape == (33, width) and weight.quantized.max() == 15
    assert weight.scale.shape == weight.minimum.shape == (33, groups) and weight.scale.dtype == torch.float16
    steps = weight.scale.float().repeat_interleave(32, 1)[:, :width]
    # minimum and scale are rounded to float16: some thousandths of the range
    assert ((weight.dequantize(torch.float32) - matrix).abs() <= 0.5 * steps + 0.005).all()


def test_a_group_of_one_number_is_that_number() -> None:
    weight = quantize_int4(torch.full((2, 64), 0.75))
    assert torch.equal(weight.dequantize(torch.float32), torch.full((2, 64), 0.75))


@pytest.mark.parametrize("name", QUANTISE)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(name: str, bad: float) -> None:
    matrix = drawn(4, 64)
    matrix[3, 63] = bad
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.x holds NaN or infinity"):
        QUANTISE[name](matrix, "model.layers.1.x")


def test_what_the_codes_cannot_hold_is_refused() -> None:
    matrix = drawn(4, 64)
    matrix[2, 3] = 3e6
    with pytest.raises(ModelLoadError, match=r"x holds numbers beyond float16's range.*quantize='int8'"):
        quantize_int4(matrix, "x")
    quantize_int8(matrix)
    with pytest.raises(ModelLoadError, match=r"131,073 inputs, and at 8 bits at most 131,072"):
        quantize_int8(torch.zeros(1, 131_073))


@pytest.mark.parametrize("name", QUANTISE)
def test_parts_make_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = drawn(20, 70).bfloat16()
    whole = QUANTISE[name](matrix)
    numbers = whole.dequantize(torch.float32)
    monkeypatch.setattr(quantize, "_PART", 3 * 70)
    monkeypatch.setattr(quantized_weight, "_PART", 3 * 70)
    parted = QUANTISE[name](matrix)
    assert torch.equal(parted.quantized, whole.quantized) and torch.equal(parted.scale, whole.scale)
    assert torch.equal(parted.dequantize(torch.float32), numbers)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1"])
def test_the_blocks_of_a_gguf_file_are_taken_to_the_last_bit(type_name: str) -> None:
    packed, meaning = pack(drawn(7, 96).numpy(), type_name)
    if type_name == "Q8_0":
        packed[0, 2] = 128  # -128, which ggml does not write, but others may
        meaning = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
    weight = weight_to_keep(tensor_of(packed, type_name, (7, 96)))
    assert weight is not None and weight.shape == (7, 96)
    assert torch.equal(weight.dequantize(torch.float32).view(torch.int32), meaning.view(torch.int32))
    assert torch.equal(weight.dequantize(torch.bfloat16), meaning.bfloat16())
    packed[:] = 0  # nothing of the file is kept
    assert torch.equal(weight.dequantize(torch.float32), meaning)


@pytest.mark.parametrize("type_name", sorted(set(read_types()) - {"Q8_0", "Q4_0", "Q4_1"}))
def test_other_types_are_dequantized_by_whoever_wants_them(type_name: str) -> None:
    assert weight_to_keep(tensor_of(np.zeros((2, 256), np.uint8), type_name, (2, 256))) is None


@pytest.mark.parametrize("place", [0, 1])
def test_a_scale_that_is_not_finite_is_refused_by_name(place: int) -> None:
    packed, _ = pack(drawn(2, 64).numpy(), "Q4_1")
    packed[1].view(np.float16)[10 + place] = np.nan  # scale or minimum of the second block
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_up\.weight: row 1 has a scale that is NaN or infinite"):
        weight_to_keep(tensor_of(packed, "Q4_1", (2, 64)))


@pytest.mark.parametrize("name", QUANTISE)
def test_rows_and_cat(name: str) -> None:
    matrix = drawn(12, 40)
    weight, order = QUANTISE[name](matrix), torch.tensor([3, 3, 11, 0])
    numbers = weight.dequantize(torch.float32)
    assert torch.equal(weight.rows(order).dequantize(torch.float32), numbers[order])
    both = QuantizedWeight.cat([weight, weight.rows(order)])
    assert both.form == weight.form and torch.equal(
        both.dequantize(torch.float32), torch.cat([numbers, numbers[order]])
    )
    table = QuantizedEmbedding(weight, torch.bfloat16)
    assert torch.equal(table[order], numbers[order].bfloat16()) and table.device == matrix.device


def test_weights_of_different_forms_are_not_one() -> None:
    with pytest.raises(ValueError, match="different forms"):
        QuantizedWeight.cat([quantize_int8(drawn(2, 32)), quantize_int4(drawn(2, 32))])
    with pytest.raises(ValueError, match="different forms"):
        QuantizedWeight.cat([quantize_int8(drawn(2, 32)), quantize_int8(drawn(2, 64))])
