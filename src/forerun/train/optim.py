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


class Float32Muon(torch.optim.Muon):
    """Muon with products of float32; PyTorch's are of bfloat16, which takes some processors a hundred times as long."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters as PyTorch's class does."""
        for group in self.param_groups:
            momentum = group["momentum"]
            rate = group["lr"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    (rows, columns) = parameter.shape
                    former = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                    former.lerp_(parameter.grad, 1 - momentum)
                    update = orthogonal(parameter.grad.lerp(former, momentum), group)
                    parameter.mul_(1 - rate * group["weight_decay"])
                    parameter.add_(update, alpha=-rate * math.sqrt(max(1, rows / columns)))


def orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Return a matrix with the singular vectors of this one and values near 1 (Newton-Schulz), by Muon's options."""
    a, b, c = group["ns_coefficients"]
    found = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    found = found / found.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if matrix.shape[0] > matrix.shape[1] else found


class Optimisers:
    """Muon and AdamW side by side under one learning-rate schedule.

    dtype: of Muon's products.

    Attributes:
        warmup: share of the run over which the learning rate rises, if that is more than the options' share.
    """

    def __init__(self, model: nn.Module, options: Optimisation, dtype: torch.dtype = torch.float32) -> None:
        self.options = options
        self.warmup = 0.0
        groups: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            groups[not hidden].append(parameter)
        matrices, others = groups
        self._parameters = [*matrices, *others]
        self._all: list[tuple[torch.optim.Optimizer, float]] = []
        on_cpu = next(model.parameters()).device.type == "cpu"
        decay = options.weight_decay
        if options.matrices == "adam":
            self._add_adam(matrices, decay, fused=True)
        else:
            parts = MUON_PARTS if on_cpu else 1
            for part in filter(None, (matrices[index::parts] for index in range(parts))):
                kind = Float32Muon if dtype == torch.float32 else torch.optim.Muon
                muon = kind(part, lr=options.muon_lr, momentum=options.momentum, weight_decay=decay)
                self._all.append((muon, options.muon_lr))
        if others:
            self._add_adam(others, 0.0, fused=not on_cpu)

    def _add_adam(self, parameters: list[nn.Parameter], decay: float, *, fused: bool) -> None:
        rate = self.options.adam_lr
        betas = self.options.betas
        self._all.append((torch.optim.AdamW(parameters, lr=rate, betas=betas, weight_decay=decay, fused=fused), rate))

    @property
    def state_nbytes(self) -> int:
        """Return the bytes of the whole state: of Muon a value of float32 a weight, of AdamW two."""
        return sum(
            (8 if isinstance(optimiser, torch.optim.AdamW) else 4) * parameter.numel()
            for optimiser, _ in self._all
            for group in optimiser.param_groups
            for parameter in group["params"]
        )

    def step(self, progress: float, pool: Executor | None = None) -> Tensor:
        """Update the weights at `progress` in [0, 1] of the run; clips and clears the gradients.

        With a `pool` the optimisers step at the same time: they share no parameter. Returns the gradients' norm.
        """
        factor = schedule(progress, self.options, self.warmup)
        norm = nn.utils.clip_grad_norm_(self._parameters, self.options.clip)
        for optimiser, peak in self._all:
            for group in optimiser.param_groups:
                group["lr"] = peak * factor
        run = map if pool is None else pool.map
        list(run(_step_and_clear, [optimiser for optimiser, _ in self._all]))
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of both, tensors and plain values only."""
        return [optimiser.state_dict() for optimiser, _ in self._all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore what `state_dict` gave."""
        for (optimiser, _), state in zip(self._all, states, strict=True):
            optimiser.load_state_dict(state)


def _step_and_clear(optimiser: torch.optim.Optimizer) -> None:
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def schedule(progress: float, options: Optimisation, warmup: float = 0.0) -> float:
    """Return the factor on the peak learning rate: linear warm-up, flat, then a decay to `final_factor`.

    warmup: see `Optimisers`.
    """
    warmup = max(warmup, options.warmup)
    if progress < warmup:
        return max(progress / warmup, 1e-2)
    decay_start = 1 - options.decay
    if progress <= decay_start:
        return 1.0
    left = max(0.0, (1 - progress) / options.decay)
    if options.shape == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return options.final_factor + (1 - options.final_factor) * left
