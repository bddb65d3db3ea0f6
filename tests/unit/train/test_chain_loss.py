"""The loss of drafts chain by chain, with weights that follow acceptance, against what it says one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.train.heads.loss import ChainTargets, chain_loss
from forerun.train.losses import divergence, reach_weights, survival_weights


def by_hand(acceptance: list[float], wanted: list[bool], smoothing: float) -> list[float]:
    """The weights of a chain, term by term."""
    weights = []
    for k in range(len(wanted)):
        total = 0.0
        for m in range(k, len(wanted)):
            product = 1.0
            for i in range(m + 1):
                product *= (1 - smoothing) * acceptance[i] + smoothing if wanted[i] else 1.0
            total += product * wanted[m]
        weights.append(total * wanted[k] / (len(wanted) * (len(wanted) + 1) / 2))
    return weights


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_weights_follow_acceptance(smoothing: float) -> None:
    accept_probs = torch.tensor([[0.9, 0.5, 0.2], [0.1, 1.0, 1.0], [0.3, 0.3, 0.3]])
    wanted = torch.tensor([[True, True, True], [True, True, False], [False, True, True]])
    found = survival_weights(accept_probs.requires_grad_(), wanted, smoothing)
    for row in range(3):
        assert found[row].tolist() == pytest.approx(
            by_hand(accept_probs[row].tolist(), wanted[row].tolist(), smoothing)
        )
    assert not found.requires_grad
    assert survival_weights(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), smoothing).sum() == pytest.approx(1)


def test_texts_weighted_by_reach_stand_for_accepted_drafts() -> None:
    """Over all texts of two tokens, drawn from the target: what a value of the first token comes to at the second."""
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.2, 0.1])
    value = torch.tensor([3.0, -1.0, 7.0, 2.0])
    texts = torch.arange(4)[:, None].expand(4, 2)
    drafted, there = q[texts].requires_grad_(), torch.ones(4, 2, dtype=torch.bool)
    weights = reach_weights(drafted, p[texts], there)
    assert weights[:, 0].tolist() == [0.5] * 4 and not weights.requires_grad
    assert torch.allclose((p * weights[:, 1] * value).sum() * 2, (torch.minimum(p, q) * value).sum())
    assert float(weights[3, 1]) == 0, "no draft gets beyond a token that the target never writes"
    there[:, 0] = False
    assert reach_weights(drafted, p[texts], there).tolist() == [[0, 0.5]] * 4


def test_chains_are_weighted_by_the_texts_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    features, layer = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 5), (11, 5)))
    states, weights = torch.randn(6, 5, generator=generator, dtype=torch.float64), torch.ones(2, 3).double()
    text = torch.tensor([4, 2, 9, -1, 0, 1])
    found, _ = chain_loss([(features, layer)], ChainTargets(states, layer, weights, "forward-kl", None, text), chunk=3)
    wanted, drafted = (states @ layer.T).softmax(-1), (features @ layer.T).softmax(-1)
    slow = 0.0
    for chain in range(2):
        reached = 1 / 3
        for row in range(3 * chain, 3 * chain + 3):
            slow -= reached * float((wanted[row] * drafted[row].log()).sum())
            token = int(text[row])
            reached *= min(1.0, float(drafted[row, token] / wanted[row, token])) if token >= 0 else 0.0
    assert float(found) == pytest.approx(slow)


@pytest.mark.parametrize("smoothing", [None, 0.5])
@pytest.mark.parametrize("loss", ["forward-kl", "reverse-kl", "jensen-shannon", "log-overlap"])
def test_the_loss_of_chains_is_its_sum_with_its_gradient(loss: Any, smoothing: float | None) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    features, bias, after = draw(15, 5).requires_grad_(), draw(15, 2).requires_grad_(), draw(11, 2).requires_grad_()
    layer, states = draw(11, 5), draw(15, 5)
    weights = torch.rand((5, 3), generator=generator, dtype=torch.float64)
    weights[1, 2] = weights[4, 0] = 0
    targets = ChainTargets(states, layer, weights, loss, smoothing)
    found, overlaps = chain_loss([(features, layer), (bias, after)], targets, chunk=7)
    gradients = torch.autograd.grad(3 * found, (features, bias, after))
    wanted = (states @ layer.T).softmax(-1)
    logits = features @ layer.T + bias @ after.T
    common = torch.minimum(wanted, logits.softmax(-1)).sum(-1).view(5, 3)
    assert torch.allclose(overlaps, common) and not overlaps.requires_grad
    paced = weights if smoothing is None else weights * survival_weights(common.detach(), weights > 0, smoothing)
    whole = (divergence(loss, logits.log_softmax(-1), wanted).view(5, 3) * paced).sum()
    assert torch.allclose(found, whole)
    for one, other in zip(gradients, torch.autograd.grad(3 * whole, (features, bias, after)), strict=True):
        assert torch.allclose(one, other)
