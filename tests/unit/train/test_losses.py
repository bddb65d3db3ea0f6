"""The losses against sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.train.losses import distillation_loss, forward_kl, overlap, total_variation


def random_probs(rows: int = 5, vocab: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.softmax(2 * torch.randn(rows, vocab, generator=generator), -1) for _ in range(2))  # type: ignore[return-value]


def test_with_whole_distribution_they_are_the_textbook_divergences() -> None:
    target, draft = random_probs()
    probabilities, ids = target.topk(target.shape[1], dim=-1)
    for row in range(len(target)):
        p, q = target[row].tolist(), draft[row].tolist()
        one = (draft[row : row + 1].log(), ids[row : row + 1], probabilities[row : row + 1])
        entropy = -sum(a * math.log(a) for a in p)
        kl = sum(a * math.log(a / b) for a, b in zip(p, q))
        assert float(forward_kl(*one)) == pytest.approx(kl + entropy, rel=1e-5)
        assert float(overlap(*one)) == pytest.approx(sum(map(min, p, q)), rel=1e-5)
        assert float(total_variation(*one)) == pytest.approx(0.5 * sum(abs(a - b) for a, b in zip(p, q)), abs=1e-5)


def test_truncated_distribution_ignore_the_tail() -> None:
    target, draft = random_probs()
    probabilities, ids = target.topk(3, dim=-1)
    expected = [
        sum(min(target[row, token], draft[row, token]) for token in ids[row].tolist()) for row in range(len(target))
    ]
    assert overlap(draft.log(), ids, probabilities).tolist() == pytest.approx([float(x) for x in expected], rel=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_mixture_and_its_gradient(share: float) -> None:
    target, draft = random_probs()
    probabilities, ids = target.topk(4, dim=-1)
    logits = draft.log().clone().requires_grad_()
    loss = distillation_loss(logits, ids, probabilities, variation_share=share)
    by_hand = (1 - share) * forward_kl(draft.log(), ids, probabilities).mean() + share * total_variation(
        draft.log(), ids, probabilities
    ).mean()
    assert float(loss.detach()) == pytest.approx(float(by_hand), rel=1e-5)
    loss.backward()
    step = distillation_loss(logits.detach() - 0.1 * logits.grad, ids, probabilities, variation_share=share)
    assert step < loss
