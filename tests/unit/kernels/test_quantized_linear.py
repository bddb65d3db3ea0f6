"""Products with weights of 8 and 4 bits: each implementation gives the bits that whole numbers and the order of the
scales decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.kernels.quantize import QuantizedWeight, activation_limit, quantize_int4, quantize_int8, quantize_symmetric
from forerun.kernels.torch import linear as quantized_linear
from forerun.kernels.torch.linear import JoinedLinear, QuantizedLinear

IMPLEMENTATIONS: dict[str, Callable[[QuantizedWeight, Tensor | None], QuantizedLinear]] = {"reference": QuantizedLinear}
SHAPES = [(16, 32), (5, 1), (33, 31), (48, 97), (7, 1025), (12, 3000)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grouped(weight: Tensor, *, bits: int, zero: int, has_minimum: bool) -> QuantizedWeight:
    """Return a weight with random values, all of them used, in groups of 32 inputs."""
    generator = torch.Generator().manual_seed(weight.shape[1])
    groups = -(-weight.shape[1] // 32)
    quantized = torch.randint(0, 1 << bits, tuple(weight.shape), generator=generator, dtype=torch.uint8)
    scale = (0.01 + torch.rand(len(weight), groups, generator=generator)).half()
    minimum = torch.randn(len(weight), groups, generator=generator).half() if has_minimum else None
    return QuantizedWeight(bits, quantized, zero, scale, minimum, 32)


FORMS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int4": quantize_int4,
    "Q8_0": lambda weight: grouped(weight, bits=8, zero=128, has_minimum=False),
    "Q4_0": lambda weight: grouped(weight, bits=4, zero=8, has_minimum=False),
    "Q4_1": lambda weight: grouped(weight, bits=4, zero=0, has_minimum=True),
}
# the same with activations of 8 bits
FORMS |= {
    f"{name}-a8": lambda weight, make=make: replace(make(weight), activation_bits=8) for name, make in FORMS.items()
}


def defined(weight: QuantizedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product by its definition, one operation after another in NumPy, sums in int64."""
    codes_w = weight.quantized.numpy().astype(np.int64) - weight.zero
    scale_w = weight.scale.numpy().astype(np.float32)
    padding = -weight.shape[1] % 32
    limit = np.float32(32767)
    if weight.group is None:  # sums over all inputs fit into 32 bits
        limit = np.float32(min(32767, (2**31 - 1) // (128 * weight.shape[1])))
    rows = x.float().numpy()
    if weight.activation_bits == 8:  # each group is a row of its own
        limit, rows = np.float32(127), np.pad(rows, ((0, 0), (0, padding))).reshape(len(rows), -1, 32)
    amax = np.abs(rows).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = limit / amax
        codes_x = np.rint(rows * inverse)
    codes_x = np.where(np.isfinite(amax) & np.isfinite(inverse), codes_x, 0).astype(np.int64)
    scale_x = np.where(np.isfinite(amax), amax / limit, np.float32(np.nan)).astype(np.float32)
    codes_w = np.pad(codes_w, ((0, 0), (0, padding))).reshape(len(codes_w), -1, 32)
    if weight.activation_bits == 16:
        codes_x = np.pad(codes_x, ((0, 0), (0, padding))).reshape(len(codes_x), -1, 32)
    sums = np.einsum("rgk,ogk->rog", codes_x, codes_w)
    if weight.activation_bits == 8:
        total = np.zeros(sums.shape[:2], np.float32)
        for g in range(sums.shape[2]):
            term = sums[..., g].astype(np.float32)
            total += (term if weight.group is None else term * scale_w[:, g]) * scale_x[:, g]
            if weight.minimum is not None:
                minimum = weight.minimum.numpy().astype(np.float32)[:, g]
                total += minimum * (scale_x[:, g] * codes_x[:, g].sum(-1, keepdims=True).astype(np.float32))
        total = total * scale_w[:, 0] if weight.group is None else total
    elif weight.group is None:
        total = sums.sum(-1).astype(np.float32) * (scale_x * scale_w[:, 0])
    else:
        total = np.zeros(sums.shape[:2], np.float32)
        for g in range(sums.shape[2]):
            total += scale_w[:, g] * sums[..., g].astype(np.float32)
            if weight.minimum is not None:
                minimum = weight.minimum.numpy().astype(np.float32)[:, g]
                total += minimum * codes_x[:, g].sum(-1, keepdims=True).astype(np.float32)
        total = total * scale_x
    return torch.from_numpy(total if bias is None else total + bias.numpy())


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.nan_to_num(1e30), right.nan_to_num(1e30))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_bits_are_those_of_the_definition(implementation: str, form: str, shape: tuple[int, int]) -> None:
    weight = FORMS[form](drawn(*shape))
    for bias in (None, drawn(shape[0], seed=3)):
        linear = IMPLEMENTATIONS[implementation](weight, bias)
        assert (linear.out_features, linear.in_features) == shape
        x = drawn(9, shape[1], seed=1)
        wanted = defined(weight, x, bias)
        assert same_bits(linear.forward(x), wanted)
        residual = drawn(9, shape[0], seed=2)
        assert same_bits(linear.add_to(residual, x), wanted + residual)
        for count in (1, 2, 5, 8):  # in any company
            assert same_bits(linear.forward(x[:count]), wanted[:count])


@pytest.mark.parametrize("form", ["int8", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_hold_with_every_code_at_its_extreme(implementation: str, form: str) -> None:
    x = torch.full((3, 4096), 127.0) * torch.tensor([[1.0], [-1.0], [1.0]])
    x[2, ::2] = -127.0
    weight = FORMS[form](drawn(6, 4096))
    weight.quantized[:2] = 0  # -128 in a GGUF file
    weight.quantized[2:4] = 2**weight.bits - 1
    weight.quantized[4, ::2] = 0
    assert same_bits(IMPLEMENTATIONS[implementation](weight, None).forward(x), defined(weight, x, None))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_that_is_not_finite_spoils_itself_alone(implementation: str, form: str) -> None:
    weight = FORMS[form](drawn(10, 70))
    linear = IMPLEMENTATIONS[implementation](weight, None)
    x = drawn(6, 70, seed=1)
    x[1, 69], x[3, 0], x[4, 40] = torch.nan, torch.inf, -torch.inf
    y = linear.forward(x)
    assert y[[1, 3, 4]].isnan().all()
    assert same_bits(y[[0, 2, 5]], linear.forward(x[[0, 2, 5]]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_and_weights_of_zeros_and_of_the_smallest_numbers(implementation: str, form: str) -> None:
    matrix = drawn(8, 64)
    matrix[2] = 0
    matrix[3] = 1e-42
    weight, bias = FORMS[form](matrix), drawn(8, seed=3)
    x = torch.zeros(4, 64)
    x[1] = 1e-39  # 127 / amax overflows
    x[2, 5] = 1e-30
    y = IMPLEMENTATIONS[implementation](weight, bias).forward(x)
    assert same_bits(y, defined(weight, x, bias))
    assert torch.equal(y[:2], bias.expand(2, -1))


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_other_float_types_and_dimensions(implementation: str, form: str) -> None:
    weight = FORMS[form](drawn(24, 40))
    linear = IMPLEMENTATIONS[implementation](weight, None)
    x = drawn(2, 3, 40, seed=1).bfloat16()
    y = linear.forward(x)
    assert y.shape == (2, 3, 24) and y.dtype == torch.bfloat16
    wanted = defined(weight, x.view(6, 40), None)
    assert same_bits(y.view(6, 24), wanted.bfloat16())
    residual = drawn(6, 24, seed=2).bfloat16()
    assert same_bits(linear.add_to(residual, x.view(6, 40)), (wanted + residual.float()).bfloat16())
    assert linear.forward(x[:0]).shape == (0, 3, 24)


def test_many_rows_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = quantize_int4(drawn(24, 40)), drawn(50, 40, seed=1)
    whole = QuantizedLinear(weight).forward(x)
    monkeypatch.setattr(quantized_linear, "_PART", 24 * 2 * 3)
    assert torch.equal(QuantizedLinear(weight).forward(x), whole)


@pytest.mark.parametrize("forms", [("int8", "Q4_1", "Q8_0"), ("Q4_0", "Q4_1"), ("int4", "int4")], ids=str)
def test_weights_in_different_codes_are_one_layer(forms: tuple[str, ...]) -> None:
    """Check that all weights use the same quantized activations: the least of their limits."""
    weights = [FORMS[form](drawn(5 + i, 700, seed=i)) for i, form in enumerate(forms)]
    x, bias = drawn(9, 700, seed=7), drawn(sum(range(5, 5 + len(forms))), seed=8)
    joined = JoinedLinear(weights, bias)
    assert (joined.out_features, joined.in_features) == (len(bias), 700)
    limit = activation_limit(weights[0])
    assert limit == (23967 if forms[0] == "int8" else 32767)
    parts = zip(weights, bias.split([len(weight.quantized) for weight in weights]))
    wanted = torch.cat([QuantizedLinear(weight, each, limit).forward(x) for weight, each in parts], 1)
    assert torch.equal(joined.forward(x), wanted)
    residual = drawn(9, len(bias), seed=9)
    assert torch.equal(joined.add_to(residual, x), wanted + residual)


def test_codes_of_activations() -> None:
    x = torch.tensor([[-127.0, 0.5, 1.5, 2.5, -0.5, 126.5], [0, 0, 0, 0, 0, 0], [1, torch.nan, 1, 1, 1, 1]])
    quantized, scale = quantize_symmetric(x)
    assert quantized.tolist() == [[-127, 0, 2, 2, 0, 126], [0] * 6, [0] * 6]  # halves to even
    assert scale[:2, 0].tolist() == [1, 0] and scale[2].isnan()
