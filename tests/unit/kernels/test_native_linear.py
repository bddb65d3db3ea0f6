"""The native products: what they compute, and that a row's bits depend on that row alone."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kernels.quantize import QuantizedWeight
from kernel_cases import KINDS, THREADS, as_read, drawn, each_set, product_of, threads, weight_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out", "size"), [(48, 64), (33, 70), (1, 3), (16, 257)])
def test_products_are_those_of_the_reference(library: Library, kind: str, out: int, size: int) -> None:
    weight, x, bias = weight_of(kind, out, size), drawn(11, size), torch.randn(out)
    residual = drawn(11, out, seed=2)
    linear = NativeLinear(library, weight, bias)
    expected = product_of(weight, as_read(library, weight, x), bias)
    if kind == "int8":  # a sum of whole numbers, then two products: the same bits
        assert torch.equal(linear.forward(x), expected)
    torch.testing.assert_close(linear.forward(x), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear.add_to(residual, x), residual + expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_are_the_same_in_any_company(library: Library, kind: str) -> None:
    weight, x = weight_of(kind, 100, 96), drawn(64, 96)
    linear = NativeLinear(library, weight)
    alone = torch.cat([linear.forward(row[None]) for row in x])
    for count in range(2, 65):
        assert torch.equal(linear.forward(x[:count]), alone[:count]), count
        assert torch.equal(linear.forward(x[-count:]), alone[-count:]), count


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_are_the_same_with_any_number_of_threads(library: Library, kind: str) -> None:
    linear, x = NativeLinear(library, weight_of(kind, 500, 96)), drawn(9, 96)
    one = linear.forward(x)
    for count in THREADS:
        with threads(count):
            assert torch.equal(linear.forward(x), one), count
            assert torch.equal(linear.forward(x[8:]), one[8:]), count


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_do_not_saturate(library: Library, kind: str, sign: int) -> None:
    weight = weight_of(kind, 32, 128)
    assert isinstance(weight, QuantizedWeight)
    weight.quantized.fill_(0 if sign < 0 else 2**weight.bits - 1)
    x = torch.full((3, 128), 1.0)
    x[1] = -1.0
    x[2, ::2] = -1.0
    torch.testing.assert_close(
        NativeLinear(library, weight).forward(x), product_of(weight, x, None), rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("size", [1, 31, 33, 63, 95, 160])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("-by-bytes")])
def test_codes_of_bytes_at_their_extremes_are_exact(library: Library, kind: str, size: int) -> None:
    """Inputs of +-127 and scales that are powers of 2 are exact in float32, as are the sums: every order is right."""
    weight, generator = weight_of(kind, 40, size), torch.Generator().manual_seed(size)
    assert isinstance(weight, QuantizedWeight)
    least, most = int(kind.startswith("int8-by")), 2**weight.bits - 1
    weight.quantized.copy_(torch.where(drawn(40, size) > 0, most, least))
    weight.quantized[:16], weight.quantized[16:32] = least, most
    weight.quantized[32, ::2], weight.quantized[33, 1::2] = least, least
    weight.quantized[34] = weight.zero if isinstance(weight.zero, int) else weight.zero[34, 0]
    weight.scale.copy_(2.0 ** torch.randint(-2, 3, weight.scale.shape, generator=generator))
    if weight.minimum is not None:
        weight.minimum.copy_(torch.randint(-8, 9, weight.minimum.shape, generator=generator))
    x = 127 * (drawn(64, size).sign())
    x[:2], x[2, ::2], x[3, 1::2], x[4], x[5, 1::32] = 127, -127, -127, -127, 0
    exact = (x.double() @ weight.dequantize(torch.float64).T).float()
    linear = NativeLinear(library, weight)
    for count in range(1, 65):
        assert torch.equal(linear.forward(x[:count]), exact[:count]), count
        assert torch.equal(linear.forward(x[-count:].flip(0)), exact[-count:].flip(0)), count


@pytest.mark.parametrize("kind", KINDS[2:])
def test_numbers_between_two_codes_become_the_even_one(library: Library, kind: str) -> None:
    weight, x = weight_of(kind, 40, 64), torch.arange(9 * 64).view(9, 64) % 53 - 26.5
    x[:, ::32] = 127 if kind.endswith("-by-bytes") else 32767  # the largest code: the scale is 1
    expected = product_of(weight, x)
    assert (NativeLinear(library, weight).forward(x) - expected).norm() < 2e-6 * expected.norm()


@pytest.mark.parametrize("size", [33, 576])
@pytest.mark.parametrize("kind", KINDS[2:])
def test_sets_with_fused_sums_give_quantized_products_the_same_bits(
    native_library: Library, kind: str, size: int
) -> None:
    linear, x = NativeLinear(native_library, weight_of(kind, 40, size)), drawn(9, size)
    found = {name: linear.forward(x) for name in each_set(native_library) if name != "portable"}
    for name, y in found.items():
        assert torch.equal(y, next(iter(found.values()))), name


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite_stay_in_their_row(library: Library, kind: str) -> None:
    linear, x = NativeLinear(library, weight_of(kind, 32, 64)), drawn(9, 64)
    sound = linear.forward(x)
    x[3, 5], x[6, 40] = torch.nan, torch.inf
    y = linear.forward(x)
    assert not torch.isfinite(y[3]).any()
    assert not torch.isfinite(y[6]).any()
    others = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(y[others], sound[others])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_none(library: Library, kind: str) -> None:
    assert NativeLinear(library, weight_of(kind, 32, 64)).forward(torch.empty(0, 64)).shape == (0, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_weight_are_read_back(library: Library, kind: str) -> None:
    weight, index = weight_of(kind, 50, 70), torch.tensor([49, 0, 17, 17])
    whole = weight.dequantize(torch.float32) if isinstance(weight, QuantizedWeight) else weight.float()
    assert torch.equal(NativeLinear(library, weight).rows(index), whole[index])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [[0, 1, 2], [1], [0, 3], [3]])
def test_some_blocks_of_outputs_have_the_bits_of_all(library: Library, kind: str, blocks: list[int]) -> None:
    linear, indices = NativeLinear(library, weight_of(kind, 55, 70), torch.randn(55)), np.array(blocks, np.int32)
    part = linear.of_blocks(indices)
    outputs = [output for block in blocks for output in range(16 * block, min(55, 16 * block + 16))]
    for count in (1, 2, 3, 9, 40):
        x, y = drawn(count, 70), torch.empty(count, len(outputs))
        assert part.out_features == len(outputs)
        library.linear(ctypes.byref(part), x.data_ptr(), count, None, y.data_ptr(), 2)
        assert torch.equal(y, linear.forward(x)[:, outputs])


@pytest.mark.parametrize("index", [-1, 50, 1 << 40])
def test_rows_that_are_not_there_are_not_read(library: Library, index: int) -> None:
    linear = NativeLinear(library, weight_of("bfloat16", 50, 70))
    with pytest.raises(IndexError):
        linear.rows(torch.tensor([3, index]))


def test_memory_that_cannot_be_had_is_an_error(library: Library) -> None:
    linear, x = NativeLinear(library, weight_of("int8", 32, 64)), drawn(3, 64)
    expected, y = linear.forward(x), torch.empty(3, 32)
    with pytest.raises(MemoryError):
        library.linear(ctypes.byref(linear.struct), x.data_ptr(), 1 << 45, None, y.data_ptr(), 1)
    assert torch.equal(linear.forward(x), expected)


def test_a_thread_keeps_little_of_what_a_large_call_has_taken(native_library: Library) -> None:
    linear, few, many = (
        NativeLinear(native_library, weight_of("int8", 16, 4096)),
        drawn(8, 4096),
        torch.zeros(9000, 4096),
    )
    expected = linear.forward(few)
    kept = native_library.workspace_bytes()
    assert 8 * 4096 * 2 <= kept <= 64 << 20
    assert torch.equal(linear.forward(few), expected) and native_library.workspace_bytes() == kept
    linear.forward(many)  # codes alone are 74 MB
    assert native_library.workspace_bytes() == 0
    assert torch.equal(linear.forward(few), expected) and 0 < native_library.workspace_bytes() <= kept
