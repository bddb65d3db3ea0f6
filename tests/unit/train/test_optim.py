from __future__ import annotations

import torch

from forerun.train.optim import StackedMuon


def test_the_stacked_muon_steps_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (16, 8), (8, 8), (8, 16), (8, 16)]
    ours, theirs = (
        [
            torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i)))
            for i, shape in enumerate(shapes)
        ]
        for _ in range(2)
    )
    stacked = StackedMuon(ours, lr=0.02, momentum=0.95, weight_decay=0.1)
    single = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.1)
    before = [parameter.detach().clone() for parameter in ours]
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        stacked.step()
        single.step()
    for one, other, first in zip(ours, theirs, before, strict=True):
        assert torch.allclose(one, other, atol=1e-3) and not torch.allclose(one, first, atol=1e-2)


def test_parameters_without_a_gradient_stay() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    parameters[0].grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    StackedMuon(parameters, lr=0.1, momentum=0.9, weight_decay=0.1).step()
    assert torch.equal(parameters[1], torch.ones(4, 4)) and not torch.equal(parameters[0], torch.ones(4, 4))
