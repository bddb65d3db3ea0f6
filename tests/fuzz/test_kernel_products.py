"""Native products and norms of any shape: near their references, and a row's bits depend on it alone."""

from __future__ import annotations

import ctypes

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from forerun.kernels.cpu.library import Library, ModelStruct
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kernels.quantize import GROUP, QuantizedWeight
from forerun.kernels.torch.elementwise import rms_norm
from fuzzing import examples
from kernel_cases import KINDS, as_read, drawn, each_set, product_of, threads, weight_of

UNIT = 2.0**-24
"""Of rounding to float32."""
TINY = 1e-30

seeds = st.integers(0, 1 << 30)
num_rows = st.integers(1, 64)
scales = st.sampled_from([1e-20, 1e-3, 1.0, 1e4])


def magnitudes(weight: Tensor | QuantizedWeight) -> Tensor:
    """Of the terms that the products add up, [out, in] float64."""
    if not isinstance(weight, QuantizedWeight):
        return weight.double().abs()
    columns = [min(i // (weight.group or GROUP), weight.scale.shape[1] - 1) for i in range(weight.shape[1])]
    numbers = weight.centred().abs() * weight.scale.double()[:, columns]
    return numbers if weight.minimum is None else numbers + weight.minimum.double().abs()[:, columns]


def rows_of(n: int, size: int, seed: int) -> Tensor:
    """Rows of very different sizes, one of zeros among them."""
    x = drawn(n, size, seed=seed) * 10.0 ** torch.randint(-6, 6, (n, 1), generator=torch.Generator().manual_seed(seed))
    x[seed % n] *= seed % 2
    return x


@given(
    kind=st.sampled_from(KINDS),
    out=st.integers(1, 70),
    size=st.one_of(st.integers(1, 140), st.sampled_from([511, 1025])),
    n=num_rows,
    has_bias=st.booleans(),
    seed=seeds,
)
@examples(12)
def test_products(kind: str, out: int, size: int, n: int, has_bias: bool, seed: int, native_library: Library) -> None:
    weight, x, residual = weight_of(kind, out, size, seed), rows_of(n, size, seed), drawn(n, out, seed=seed + 1)
    bias = drawn(out, seed=seed + 2) if has_bias else None
    linear = NativeLinear(native_library, weight, bias)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: 1 + seed % n]
    terms = x.double().abs() @ magnitudes(weight).T
    for name in each_set(native_library):
        expected = product_of(weight, as_read(native_library, weight, x), bias)
        bound = UNIT * ((size + 8) * terms + 2 * expected.double().abs()) + TINY
        alone = torch.cat([linear.forward(row[None]) for row in x])
        if kind == "int8":
            assert torch.equal(alone, expected), name
        assert ((alone.double() - expected.double()).abs() <= bound).all(), name
        for count in (1, 2):
            with threads(count):
                assert torch.equal(linear.forward(x), alone), (name, count)
                assert torch.equal(linear.forward(x[order]), alone[order]), (name, count)
                added = linear.add_to(residual, x)
                assert torch.equal(added[order], linear.add_to(residual[order], x[order])), (name, count)
        assert torch.equal(added, residual + alone), name


@given(
    kind=st.sampled_from(KINDS[2:]),
    out=st.integers(1, 40),
    size=st.integers(1, 200),
    n=st.integers(1, 20),
    extreme=st.booleans(),
    seed=seeds,
)
@examples(40)
def test_whole_sums(kind: str, out: int, size: int, n: int, extreme: bool, seed: int, native_library: Library) -> None:
    """All instruction sets give the same. One group alone has scales that are not zero: nothing is added in floats."""
    weight, x = weight_of(kind, out, size, seed), drawn(n, size, seed=seed + 1)
    assert isinstance(weight, QuantizedWeight)
    if extreme:
        weight.quantized[: out // 2] = 0 if kind != "int8" else 1
        weight.quantized[out // 2 :] = 2**weight.bits - 1
        x = x.sign()
    if weight.group is not None:
        shown = seed % weight.scale.shape[1]
        by_codes = seed // 7 % 2 == 0 or weight.minimum is None
        for index in range(weight.scale.shape[1]):
            if index != shown or not by_codes:
                weight.scale[:, index] = 0
            if weight.minimum is not None and (index != shown or by_codes):
                weight.minimum[:, index] = 0
    if (weight.group is None and weight.activation_bits == 8) or (weight.group or 0) > GROUP:
        # of groups of activations alone, and of larger groups, all but 32 inputs are zero
        shown = seed % weight.scale.shape[1] * weight.group // GROUP if weight.group else seed % -(-size // GROUP)
        x[:, : shown * GROUP] = x[:, (shown + 1) * GROUP :] = 0
    linear, expected = NativeLinear(native_library, weight), product_of(weight, x)
    for name in each_set(native_library):
        assert torch.equal(linear.forward(x), expected), name


@given(
    hidden=st.one_of(st.integers(1, 300), st.sampled_from([1, 17, 49])),
    n=num_rows,
    scale=scales,
    eps=st.sampled_from([1e-5, 1e-6, 1e-12]),
    seed=seeds,
)
@examples(10)
def test_norms(hidden: int, n: int, scale: float, eps: float, seed: int, native_library: Library) -> None:
    x, weight = drawn(n, hidden, seed=seed) * scale, drawn(hidden, seed=seed + 1)
    expected = rms_norm(x.double(), weight.double(), torch.tensor(eps, dtype=torch.float64))
    model = ModelStruct(norm=weight.data_ptr(), hidden=hidden, eps=eps)

    def normed(rows: Tensor) -> Tensor:
        y = rows.clone()
        native_library.head(ctypes.byref(model), len(y), y.data_ptr(), None, torch.get_num_threads())
        return y

    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for name in each_set(native_library):
        alone = torch.cat([normed(row[None]) for row in x])
        # sixteen partial sums, then four halvings; the rest are single operations
        torch.testing.assert_close(alone.double(), expected, rtol=(hidden / 16 + 12) * UNIT, atol=TINY)
        for count in (1, 2):
            with threads(count):
                assert torch.equal(normed(x), alone) and torch.equal(normed(x[order]), alone[order]), (name, count)
