"""The losses against sums written out by hand, and their gradients against those of the same sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forerun.train.defaults import LOSSES, LossName
from forerun.train.losses import (
    at_tokens,
    distillation_loss,
    divergence,
    forward_kl,
    hybrid_share,
    overlap,
    reverse_kl,
    total_variation,
)


def random_probs(rows: int = 5, vocab: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    target, draft = (torch.softmax(2 * torch.randn(rows, vocab, generator=generator), -1) for _ in range(2))
    return target.double(), draft.double()


def by_hand(name: str, p: list[float], q: list[float], acceptance: float, variation_share: float) -> float:
    """One position's loss over the tokens given; p the target's, q the draft's probabilities of them."""
    kl = -sum(a * math.log(b) for a, b in zip(p, q))
    accepted = sum(map(min, p, q))
    rest_p, rest_q = 1 - sum(p), 1 - sum(q)
    tail = rest_q * math.log(rest_q / rest_p) if rest_p > 1e-6 else 0.0
    share = math.exp(-3 * acceptance)
    pairs = [*zip(p, q), *([(rest_p, rest_q)] if rest_p > 1e-6 else [])]
    middle = sum(a * math.log(2 * a / (a + b)) + b * math.log(2 * b / (a + b)) for a, b in pairs) / 2
    return {
        "jensen-shannon": middle,
        "forward-kl": kl,
        "reverse-kl": sum(b * math.log(b / a) for a, b in zip(p, q)) + tail,
        "total-variation": 1 - accepted,
        "log-overlap": -math.log(accepted),
        "hybrid": share * kl + (1 - share) * (1 - accepted),
        "kl-then-tv": (1 - variation_share) * kl + variation_share * (1 - accepted),
    }[name]


@pytest.mark.parametrize("kept", [7, 3], ids=["whole", "truncated"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_its_sum(name: LossName, kept: int) -> None:
    target, draft = random_probs()
    probs, ids = target.topk(kept, dim=-1)
    theirs = draft.gather(-1, ids)
    mean = sum(sum(map(min, p, q)) for p, q in zip(probs.tolist(), theirs.tolist())) / len(probs)
    expected = [by_hand(name, p, q, mean, 0.25) for p, q in zip(probs.tolist(), theirs.tolist())]
    found = divergence(name, theirs.log(), probs, variation_share=0.25)
    assert found.tolist() == pytest.approx(expected, abs=2e-6)


def test_with_the_whole_distribution_they_are_the_textbook_divergences() -> None:
    target, draft = random_probs()
    both = draft.log(), target
    entropy = -(target * target.log()).sum(-1)
    torch.testing.assert_close(forward_kl(*both) - entropy, (target * (target / draft).log()).sum(-1))
    torch.testing.assert_close(reverse_kl(*both), (draft * (draft / target).log()).sum(-1), atol=1e-6, rtol=0)
    torch.testing.assert_close(total_variation(*both), 0.5 * (target - draft).abs().sum(-1))
    assert all(divergence(name, target.log(), target).amin() > -1e-6 for name in LOSSES)


def numeric_gradient(name: LossName, logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Central differences of the sums by hand, with the hybrid's share held still, as it is."""
    held = overlap(at_tokens(logits, ids).double(), probs).mean().item()

    def mean_loss(values: Tensor) -> float:
        q = torch.softmax(values, -1).gather(-1, ids)
        rows = [by_hand(name, p, r, held, 0.25) for p, r in zip(probs.tolist(), q.tolist())]
        return sum(rows) / len(rows)

    result = torch.zeros_like(logits)
    for index in range(logits.numel()):
        nudge = torch.zeros_like(logits)
        nudge.view(-1)[index] = 1e-6
        result.view(-1)[index] = (mean_loss(logits + nudge) - mean_loss(logits - nudge)) / 2e-6
    return result


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_sum_and_descends(name: LossName) -> None:
    target, draft = random_probs()
    probs, ids = target.topk(4, dim=-1)
    logits = draft.log().clone().requires_grad_()
    loss = distillation_loss(logits, ids, probs, name, variation_share=0.25)
    loss.backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, numeric_gradient(name, logits.detach(), ids, probs), atol=2e-6, rtol=1e-4)
    step = distillation_loss(logits.detach() - 0.1 * logits.grad, ids, probs, name, variation_share=0.25)
    assert step < loss


def test_the_hybrid_goes_from_divergence_to_variation_as_acceptance_rises() -> None:
    assert float(hybrid_share(torch.tensor(0.0))) == 1
    assert float(hybrid_share(torch.tensor(1.0))) == pytest.approx(math.exp(-3))
    target, draft = random_probs()
    both = draft.log(), target
    torch.testing.assert_close(divergence("hybrid", *both, acceptance=torch.tensor(0.0)), forward_kl(*both))
    accepted = draft.log().requires_grad_()
    assert not hybrid_share(overlap(accepted, target).mean()).requires_grad


@pytest.mark.parametrize("name", LOSSES)
def test_stored_zeros_and_certain_targets_leave_losses_finite(name: LossName) -> None:
    """Probabilities come as float16: the target's best token may have 1 and the others 0, and sums may exceed 1."""
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.9995, 0.0008, 0.0]])
    logits = torch.tensor([[-40.0, 0.0, 50.0, 50.0], [60.0, 0.0, 0.0, 0.0]], requires_grad=True)
    loss = distillation_loss(logits, torch.tensor([[0, 1, 2]] * 2), probs, name, variation_share=0.5)
    loss.backward()
    assert bool(torch.isfinite(loss)) and logits.grad is not None and bool(torch.isfinite(logits.grad).all())
