"""Weights in the blocks of GGUF files: the numbers of the gguf package to the last bit, and products that are those of
their definition, whatever the instruction set, the batch composition and the number of threads."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.errors import ModelLoadError
from forerun.kernels.block_weight import BLOCK_TYPES, BlockWeight
from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.linear import NativeLinear, linear_nbytes
from forerun.kernels.quantize import GROUP, QuantizedWeight, quantize_int8, quantize_symmetric
from forerun.kernels.torch.linear import JoinedLinear, QuantizedEmbedding, QuantizedLinear
from forerun.models.linear import make_quantized_linear
from kernel_cases import SCALES_AT, THREADS, blocks_of, drawn, threads

TYPES = sorted(BLOCK_TYPES)
OLD = ("Q4_0", "Q4_1", "Q8_0")


def size_of(type_name: str) -> int:
    return 512 if BLOCK_TYPES[type_name].block_size == 256 else 96


def numbers_of(weight: BlockWeight) -> Tensor:
    numbers = gguf.quants.dequantize(weight.blocks, gguf.GGMLQuantizationType[weight.type_name])
    return torch.from_numpy(np.array(numbers, np.float32))


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def rows_of(count: int, size: int) -> Tensor:
    """Rows of codes at their extremes, of zeros, and of numbers of different sizes."""
    x = drawn(count, size) * 10.0 ** (torch.arange(count)[:, None] % 5 - 2)
    x[0], x[1], x[2], x[3] = 1, -1, drawn(size).sign(), 0
    return x


def defined(weight: BlockWeight, x: Tensor, *, is_fused: bool) -> Tensor:
    """Compute the product by its definition, one operation after another. is_fused: additions are fused with the
    product before them, by float64, in which this product is exact."""
    values = weight.quantized()
    assert values.group is not None
    codes = (values.quantized.long() - values.zero).unflatten(1, (-1, values.group))
    rows, scale = quantize_symmetric(x.unflatten(1, (-1, GROUP)))
    sums = torch.einsum("rgk,ogk->rog", rows.long().flatten(1).unflatten(1, (-1, values.group)), codes).float()
    total = torch.zeros(sums.shape[:2])
    for index in range(sums.shape[2]):
        at = index * values.group // GROUP
        steps = [(sums[..., index] * values.scale[:, index], scale[:, at])]
        if values.minimum is not None:
            steps.append((values.minimum[:, index].expand_as(total), scale[:, at] * rows[:, at].sum(-1, keepdim=True)))
        for factor, other in steps:
            if is_fused:
                total = (factor.double() * other.double() + total.double()).float()
            else:
                total = total + factor * other
    return total


@pytest.mark.parametrize("type_name", TYPES)
def test_numbers_are_those_of_the_gguf_package(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = blocks_of(type_name, 40, size_of(type_name))
    numbers = numbers_of(weight)
    assert same_bits(weight.dequantize(torch.float32), numbers)
    assert same_bits(weight.quantized().dequantize(torch.float32), numbers)
    monkeypatch.setattr("forerun.kernels.block_weight._PART", 3 * weight.shape[1])
    assert torch.equal(weight.dequantize(torch.bfloat16), numbers.bfloat16())
    order = torch.tensor([39, 0, 7, 7])
    picked = weight.rows(order).rows(torch.tensor([2, 0]))
    assert picked.shape == (2, weight.shape[1]) and same_bits(picked.dequantize(torch.float32), numbers[[7, 39]])
    both = BlockWeight.cat([weight, picked])
    assert both.form == weight.form and same_bits(
        both.dequantize(torch.float32), torch.cat([numbers, numbers[[7, 39]]])
    )
    table = QuantizedEmbedding(weight, torch.bfloat16)
    assert torch.equal(table[order], numbers[order].bfloat16()) and table.device.type == "cpu"


@pytest.mark.parametrize("type_name", TYPES)
def test_the_reference_is_the_definition(type_name: str) -> None:
    weight, bias = blocks_of(type_name, 19, size_of(type_name)), drawn(19, seed=3)
    x = rows_of(9, weight.shape[1])
    assert torch.equal(QuantizedLinear(weight, bias).forward(x), defined(weight, x, is_fused=False) + bias)


@pytest.mark.parametrize("out", [1, 33, 48])
@pytest.mark.parametrize("type_name", TYPES)
def test_native_products_are_the_definition(library: Library, type_name: str, out: int) -> None:
    weight, bias = blocks_of(type_name, out, size_of(type_name)), drawn(out, seed=3)
    x, residual = rows_of(64, weight.shape[1]), drawn(64, out, seed=4)
    linear = NativeLinear(library, weight, bias)
    expected = defined(weight, x, is_fused=library.instructions != "portable") + bias
    assert torch.equal(linear.forward(x), expected)
    assert torch.equal(linear.add_to(residual, x), residual + expected)
    for count in range(1, 17):  # in any company
        assert torch.equal(linear.forward(x[:count]), expected[:count]), count
        assert torch.equal(linear.forward(x[-count:].flip(0)), expected[-count:].flip(0)), count
    for count in THREADS:
        with threads(count):
            assert torch.equal(linear.forward(x[:9]), expected[:9]), count


@pytest.mark.parametrize("type_name", TYPES)
def test_a_native_row_that_is_not_finite_spoils_itself_alone(library: Library, type_name: str) -> None:
    weight = blocks_of(type_name, 32, size_of(type_name))
    x = drawn(5, weight.shape[1])
    x[1, 0], x[3, -1] = torch.nan, torch.inf
    y = NativeLinear(library, weight).forward(x)
    assert y[[1, 3]].isnan().all()
    assert torch.equal(y[[0, 2, 4]], NativeLinear(library, weight).forward(x[[0, 2, 4]]))


@pytest.mark.parametrize("type_name", TYPES)
def test_blocks_are_packed_in_any_order_by_any_number_of_threads(native_library: Library, type_name: str) -> None:
    weight = blocks_of(type_name, 80, size_of(type_name))
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:77]
    numbers = numbers_of(weight)
    for count in THREADS:
        with threads(count):
            for packed, expected in ((weight, numbers), (weight.rows(order), numbers[order])):
                linear = NativeLinear(native_library, packed)
                assert same_bits(linear.rows(torch.arange(len(expected))), expected)
    assert linear_nbytes(native_library, *weight.shape, weight.form) == NativeLinear(native_library, weight).nbytes
    assert NativeLinear(native_library, weight).nbytes <= 1.04 * weight.blocks.nbytes
    with pytest.raises(IndexError):
        NativeLinear(native_library, weight.rows(torch.tensor([0, 80])))


@pytest.mark.parametrize("type_name", OLD)
def test_blocks_are_packed_as_the_values_are(native_library: Library, type_name: str) -> None:
    weight = replace(blocks_of(type_name, 40, 96), activation_bits=16)
    values, x = weight.quantized(), drawn(5, 96)
    minimum = None if values.minimum is None else values.minimum.half()
    halves = replace(values, scale=values.scale.half(), minimum=minimum)
    expected = NativeLinear(native_library, halves).forward(x)
    assert torch.equal(NativeLinear(native_library, weight).forward(x), expected)


@pytest.mark.parametrize("type_name", TYPES)
def test_a_scale_that_is_not_finite_is_found(native_library: Library, type_name: str) -> None:
    weight = blocks_of(type_name, 40, size_of(type_name))
    form, bad = weight.form, [b"\0\x7e", b"\0\x7c", b"\0\xfc"]  # float16
    for place in SCALES_AT[type_name]:
        for value in bad if type_name != "MXFP4" else [b"\xff"]:
            blocks = weight.blocks.copy()
            for row in (17, 33):
                last = blocks[row].reshape(-1, form.block_bytes)[-1]
                last[place : place + len(value)] = list(value)
            spoiled = replace(weight, blocks=blocks)
            for row, each in ((17, spoiled), (1, spoiled.rows(torch.tensor([0, 33, 17])))):
                with pytest.raises(ModelLoadError, match=f"row {row} has a scale that is NaN or infinite"):
                    each.quantized()
                with pytest.raises(ModelLoadError, match=f"row {row} has a scale that is NaN or infinite"):
                    NativeLinear(native_library, each)
            NativeLinear(native_library, spoiled.rows(torch.arange(17)))


def test_layers_are_made_of_blocks(native_library: Library) -> None:
    first, second = blocks_of("Q4_K", 20, 256), blocks_of("Q4_K", 12, 256, seed=1)
    x = drawn(5, 256)
    linear = make_quantized_linear([first, second])
    assert isinstance(linear, NativeLinear)
    parts = [NativeLinear(native_library, weight).forward(x) for weight in (first, second)]
    assert torch.equal(linear.forward(x), torch.cat(parts, 1))
    others: list[QuantizedWeight | BlockWeight] = [first, blocks_of("Q6_K", 6, 256), quantize_int8(drawn(4, 256))]
    joined = make_quantized_linear(others)
    assert isinstance(joined, JoinedLinear)
    expected = torch.cat([QuantizedLinear(weight).forward(x) for weight in others], 1)
    assert torch.equal(joined.forward(x), expected)


def test_what_is_not_whole_blocks_is_refused() -> None:
    blocks = np.zeros((4, 144), np.uint8)
    with pytest.raises(ModelLoadError, match="288 numbers is not whole blocks of 256, of which Q4_K"):
        BlockWeight("Q4_K", (4, 288), blocks)
    for shape in ((4, 512), (5, 256)):
        with pytest.raises(ValueError, match="are not a matrix"):
            BlockWeight("Q4_K", shape, blocks)
    with pytest.raises(ValueError, match="16 bits"):
        BlockWeight("Q4_K", (4, 256), blocks, activation_bits=16)
