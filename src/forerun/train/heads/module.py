"""What modules of heads share as training computes them: their tensors, noise of what they read, rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.errors import ConfigError
from forerun.heads.config import HeadConfig
from forerun.train.accelerator import SHAPE_STEP


class HeadModule(nn.Module):
    """The trained tensors of a head of any kind, float32, under their names; NaN until they are set."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config: HeadConfig = config
        for name, shape in config.tensors().items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.full(shape, float("nan"))))

    def check(self) -> None:
        """Raises ConfigError where a tensor holds NaN or infinity."""
        for name, parameter in self.named_parameters():
            if not torch.isfinite(parameter).all():
                raise ConfigError(f"{name} of the head holds NaN or infinity: it was never set, or training failed.")


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Noise and dropout of the target's normalised states.

    Attributes:
        seed: of the draws.
    """

    dropout: float
    noise: float
    seed: int

    def __call__(self, states: Tensor) -> Tensor:
        """states: [R, S]. One draw decides of both, since drawing takes as long as a product."""
        generator = torch.Generator(states.device).manual_seed(self.seed)
        drawn = torch.rand(states.shape, generator=generator, device=states.device)
        kept = drawn >= self.dropout
        # uniform again among what is kept
        noise = (2 * (drawn - self.dropout) / (1 - self.dropout) - 1).mul_(self.noise)
        return (states + noise) * kept / (1 - self.dropout)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """[..., in] -> [..., out] in x's type, computed in the weight's, of as many rows as suit the device."""
    flat = x.flatten(0, -2)
    padded = F.pad(flat.to(weight.dtype), (0, 0, 0, -len(flat) % SHAPE_STEP))
    return F.linear(padded, weight)[: len(flat)].to(x.dtype).view(*x.shape[:-1], -1)


def rotated(x: Tensor, positions: Tensor, rope_theta: float) -> Tensor:
    """x: [..., heads, head_dim], its halves rotated together, by angles of float32, as when it is served."""
    half = x.shape[-1] // 2
    powers = torch.arange(0, 2 * half, 2, dtype=torch.float32, device=x.device) / (2 * half)
    angles = positions[..., None].float() / rope_theta**powers
    cosines, sines = (part.to(x.dtype)[..., None, :] for part in (angles.cos(), angles.sin()))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
