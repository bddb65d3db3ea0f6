"""Products against their references; a row's bits do not depend on bucket, position, batch or NaN in other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from forerun.kernels.quantize import QuantizedWeight
from forerun.kernels.torch.linear import QuantizedLinear
from forerun.kernels.triton.linear import FloatProduct, Product, multiply
from forerun.kernels.triton.quantized_linear import ActivationBuffers, channel_limit, quantized_product
from kernel_cases import weight_of
from triton_rig import DEVICE, DTYPES, INTERPRETED, MARKS, close, drawn

pytestmark = MARKS
SHAPES = [(96, 64), (33, 200), (64, 1100)] if INTERPRETED else [(96, 64), (33, 200), (6144, 4096), (4096, 14336)]
TOLERANCE = {"int8": 1e-3}
"""Activations are rounded to 16 bits."""
OF_BITS = SHAPES[1] if INTERPRETED else SHAPES[2]
KINDS = ("float", "int8", "int8-groups", "int4-groups", "int4-minima")


def product_of(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Product, Tensor | QuantizedWeight, Tensor]:
    """Return the product, its weight and its bias."""
    bias = drawn(shape[0], seed=5)
    if kind == "float":
        weight = drawn(*shape, seed=2).to(dtype)
        return FloatProduct(weight, bias), weight, bias
    quantized = weight_of(kind, *shape)
    assert isinstance(quantized, QuantizedWeight)
    quantized = quantized.to(DEVICE)
    return quantized_product(quantized, bias, dtype, ActivationBuffers(DEVICE)), quantized, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_reference_computes(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    product, weight, bias = product_of(kind, shape, dtype)
    x = drawn(5, shape[1]).to(dtype)
    numbers = weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    close(
        multiply(product, x), x.double() @ numbers.double().T + bias.double(), dtype, 1e-3 if kind == "int8" else 1e-5
    )
    index = torch.tensor([3, 0, 7], device=DEVICE)
    assert torch.equal(product.rows(index), numbers[index].float())


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_with_a_scale_per_output_the_bits_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    product, weight, bias = product_of("int8", shape, torch.float32)
    assert isinstance(weight, QuantizedWeight)
    x = drawn(20, shape[1])
    x[3], x[4] = 0.0, x[4] * 1e-30
    expected = QuantizedLinear(weight.to(torch.device("cpu")), bias.cpu(), channel_limit(weight)).forward(x.cpu())
    assert torch.equal(multiply(product, x).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_is_that_row_in_any_company(kind: str, dtype: torch.dtype) -> None:
    product, _, _ = product_of(kind, OF_BITS, dtype)
    x = drawn(300, OF_BITS[1]).to(dtype)
    everything = multiply(product, x)
    for row in (0, 5, 15, 16, 33, 130, 255, 299):
        assert torch.equal(multiply(product, x[row : row + 1])[0], everything[row])
    spoilt = x.clone()
    spoilt[::2] = float("nan")
    other = multiply(product, spoilt)
    assert torch.equal(other[1::2], everything[1::2])
    assert other[::2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_count_of_rows_between_buckets(dtype: torch.dtype) -> None:
    product, _, _ = product_of("float", (96, 64), dtype)
    x = drawn(70, 64).to(dtype)
    everything = multiply(product, x)
    for count in range(1, 70, 1 if not INTERPRETED else 5):
        assert torch.equal(multiply(product, x[:count]), everything[:count])
