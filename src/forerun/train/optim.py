"""Optimisers and their schedule: Muon for hidden matrices, AdamW for embeddings and norms."""

from __future__ import annotations

import math
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor, nn

from forerun.train.defaults import Optimisation

MUON_PARTS = 2
"""Muon's orthogonalisation is a tenth of a step on a CPU; in two parts, two threads share it."""


class Optimisers:
    """Muon and AdamW side by side under one learning-rate schedule."""

    def __init__(self, model: nn.Module, options: Optimisation) -> None:
        self.options = options
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if hidden else others).append(parameter)
        self._parameters = [*matrices, *others]
        self._all: list[tuple[torch.optim.Optimizer, float]] = []
        on_cpu = next(model.parameters()).device.type == "cpu"
        muon_class: type[torch.optim.Optimizer] = torch.optim.Muon if on_cpu else StackedMuon
        parts = MUON_PARTS if on_cpu else 1
        if options.matrices == "adam":
            adam = torch.optim.AdamW(
                matrices, lr=options.adam_lr, betas=options.betas, weight_decay=options.weight_decay, fused=True
            )
            self._all.append((adam, options.adam_lr))
            matrices = []
        for part in (matrices[index::parts] for index in range(parts)):
            if part:
                muon = muon_class(  # type: ignore[call-arg]
                    part, lr=options.muon_lr, momentum=options.momentum, weight_decay=options.weight_decay
                )
                self._all.append((muon, options.muon_lr))
        if others:
            adam = torch.optim.AdamW(
                others, lr=options.adam_lr, betas=options.betas, weight_decay=0.0, fused=not on_cpu
            )
            self._all.append((adam, options.adam_lr))

    def step(self, progress: float, pool: Executor | None = None) -> Tensor:
        """One update at `progress` in [0, 1] of the run; clips and clears the gradients.

        With a `pool` the optimisers step at the same time: they share no parameter. Returns the gradients' norm.
        """
        factor = schedule(progress, self.options)
        norm = nn.utils.clip_grad_norm_(self._parameters, self.options.clip)
        for optimiser, peak in self._all:
            for group in optimiser.param_groups:
                group["lr"] = peak * factor
        run = map if pool is None else pool.map
        list(run(_step_and_clear, [optimiser for optimiser, _ in self._all]))
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        """State of both, tensors and plain values only."""
        return [optimiser.state_dict() for optimiser, _ in self._all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore what `state_dict` gave."""
        for (optimiser, _), state in zip(self._all, states, strict=True):
            optimiser.load_state_dict(state)


class StackedMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` with the matrices of one shape orthogonalised as one stack.

    An accelerator spends less on the arithmetic than on starting it: 112 matrices of four shapes take
    a hundredth of the launches. Same rule: Nesterov momentum, five Newton-Schulz steps in bfloat16,
    decoupled weight decay.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    STEPS = 5
    EPSILON = 1e-7

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient stay."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                self._step_of_one_shape(shape, parameters, group)

    def _step_of_one_shape(self, shape: torch.Size, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momenta = [
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter)) for parameter in parameters
        ]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, momenta, group["momentum"])
        updates = self.orthogonal(torch.stack(nesterov)).to(parameters[0].dtype).unbind()
        rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-rate)

    @classmethod
    def orthogonal(cls, stack: Tensor) -> Tensor:
        """Each matrix of [N, R, C] with its singular values brought near one, in bfloat16."""
        a, b, c = cls.COEFFICIENTS
        tall = stack.shape[1] > stack.shape[2]
        x = (stack.mT if tall else stack).bfloat16()
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=cls.EPSILON)
        for _ in range(cls.STEPS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if tall else x


def _step_and_clear(optimiser: torch.optim.Optimizer) -> None:
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def schedule(progress: float, options: Optimisation) -> float:
    """Factor on the peak learning rate: linear warm-up, flat, then a decay to `final_factor`, linear or as a cosine."""
    if progress < options.warmup:
        return max(progress / options.warmup, 1e-2)
    decay_start = 1 - options.decay
    if progress <= decay_start:
        return 1.0
    left = max(0.0, (1 - progress) / options.decay)
    if options.shape == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return options.final_factor + (1 - options.final_factor) * left
