"""Routers and single gates: the same bits for a row in any company, where PyTorch's sigmoid alone gives others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from families import make_family
from forerun.kernels.experts import PackedExperts
from forerun.kernels.partition import MIN_ROWS
from forerun.kernels.silu import Silu
from forerun.models import load_model
from forerun.models.gates import SingleOutput, call_in_blocks, is_router
from forerun.models.linear import pack_module

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
    """What the module gives for each row where it is computed alone, as often as no product has fewer rows."""
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
    assert type(module.gate) is SingleOutput
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


def test_what_is_a_router() -> None:
    assert is_router(FewRouter()) and not is_router(SharedGate())


def test_no_model_computes_pytorchs_activation(tmp_path: Path) -> None:
    """Experts, which are packed whole, included."""
    model = load_model(make_family("mixtral", tmp_path), "float32")
    modules = [type(module) for module in model.decoder.model.modules()]  # type: ignore[attr-defined]
    assert PackedExperts in modules and Silu in modules
    assert not {nn.SiLU, SiLUActivation} & {*modules}
