"""Routers and single gates give a row the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from forerun.kernels.partition import MIN_ROWS
from forerun.kernels.torch.elementwise import SameAtEveryPlace
from forerun.kernels.torch.linear import PackedExperts, PackedLinear
from forerun.models.linear import call_in_blocks, is_router, pack_module

NUM_ROWS, WIDTH = 203, 64


class FewRouter(nn.Module):
    """As DeepSeek-V3's, of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)))

    def forward(self, hidden_states: Tensor, bias: float = 0.0) -> tuple[Tensor, Tensor]:
        scores = nn.functional.linear(hidden_states.view(-1, WIDTH), self.weight).sigmoid() + bias
        return scores.topk(2)


class SharedGate(nn.Module):
    """As Qwen2's mixture has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.gate(hidden_states).sigmoid()


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def alone(module: nn.Module, rows: Tensor) -> list[Tensor]:
    """Return the module's result for each row computed alone, repeated so that no product has fewer rows."""
    found = []
    for row in rows:
        given = module(row.expand(MIN_ROWS, -1).contiguous())
        found.append(given[0][:1] if isinstance(given, tuple) else given[:1])
    return found


@torch.inference_mode()
def test_a_row_of_a_router_is_the_same_in_any_company(rows: Tensor) -> None:
    holder = nn.ModuleDict({"gate": FewRouter()})
    expected = holder["gate"](rows)
    pack_module(holder)
    router = holder["gate"]
    assert type(router) is FewRouter
    scores, experts = router(rows.view(1, NUM_ROWS, WIDTH))
    torch.testing.assert_close(scores, expected[0])
    assert torch.equal(experts, expected[1])
    assert torch.equal(torch.cat(alone(router, rows)), scores)
    assert torch.equal(router(rows[5:])[0], scores[5:])


@torch.inference_mode()
def test_a_row_of_a_single_gate_is_the_same_in_any_company(rows: Tensor) -> None:
    module = SharedGate()
    expected = module(rows)
    pack_module(module)
    with SameAtEveryPlace():
        together = module(rows[None])[0]
        torch.testing.assert_close(together, expected)
        assert torch.equal(torch.cat(alone(module, rows)), together)
        assert torch.equal(module(rows[5:]), together[5:])


@torch.inference_mode()
def test_a_router_that_is_told_more_computes_as_before(rows: Tensor) -> None:
    router = FewRouter()
    expected = router(rows, 0.5), router(rows, bias=0.5)
    call_in_blocks(router)
    for given, wanted in zip((router(rows, 0.5), router(rows, bias=0.5)), expected):
        assert all(map(torch.equal, given, wanted))


class CountingRouter(FewRouter):
    """Notes how many rows it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def forward(self, hidden_states: Tensor, bias: float = 0.0) -> tuple[Tensor, Tensor]:
        self.counts.append(hidden_states.view(-1, WIDTH).shape[0])
        return super().forward(hidden_states, bias)


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "counts"), [(torch.float32, [32] * 7), (torch.float64, [NUM_ROWS])], ids=str)
def test_a_router_is_called_in_blocks_where_products_are_packed(
    rows: Tensor, dtype: torch.dtype, counts: list[int]
) -> None:
    """Check that a row's position does not depend on the others if products are packed; elsewhere nothing is
    promised."""
    router = CountingRouter().to(dtype)
    expected = router(rows.to(dtype))
    router.counts.clear()
    holder = nn.ModuleDict({"gate": router})
    pack_module(holder)
    given = holder["gate"](rows.to(dtype))
    assert router.counts == counts
    torch.testing.assert_close(given[0], expected[0])
    assert torch.equal(given[1], expected[1])


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 11])
def test_experts_compute_no_product_of_few_rows(rows: Tensor, num_rows: int) -> None:
    """Route few rows to an expert: products of few rows use another kernel, with other last bits."""
    generator = torch.Generator().manual_seed(3)
    gate_up, down = torch.randn(5, 32, WIDTH, generator=generator), torch.randn(5, WIDTH, 16, generator=generator)
    experts = PackedExperts([*gate_up], [*down], nn.functional.silu)
    counts: list[int] = []
    for product in (*experts.gate_up, *experts.down):
        product.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    hidden = rows[:num_rows]
    weights, chosen = torch.randn(num_rows, 5, generator=generator).softmax(-1).topk(2)
    expected = torch.zeros_like(hidden)
    for row, (own_weights, own) in enumerate(zip(weights, chosen, strict=True)):
        for weight, expert in zip(own_weights, own, strict=True):
            gate, up = (gate_up[expert] @ hidden[row]).chunk(2)
            expected[row] += weight * (down[expert] @ (nn.functional.silu(gate) * up))
    torch.testing.assert_close(experts(hidden, chosen, weights), expected, rtol=1e-4, atol=1e-3)
    assert len(counts) == 2 * len({*chosen.flatten().tolist()})
    assert min(counts) >= MIN_ROWS


@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 64, 65, 200])
def test_products_by_tiles_have_at_most_32_rows_and_none_is_small(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """Check the parts of a product: of more rows, a processor's tiles give a row other bits than of fewer. Here the
    products themselves are PyTorch's."""
    counts: list[int] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> Tensor:
        counts.append(x.shape[-2])
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight: weight)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randint(-4, 5, (count, 8), generator=generator).bfloat16() for count in (num_rows, 6))
    assert torch.equal(PackedLinear(weight)(x), nn.functional.linear(x, weight))
    assert sum(counts) == num_rows and max(counts) <= 32 and min(counts) >= min(num_rows, 16)


def test_what_is_a_router() -> None:
    assert is_router(FewRouter()) and not is_router(SharedGate())
