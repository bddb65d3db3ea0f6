"""What modules of heads share as training computes them: their tensors, noise of what they read, rotation, what
is the same in their layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

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


class LayerConfig(Protocol):
    """What `HeadLayer` reads of a head's shape."""

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def norm_before_fc(self) -> bool: ...

    @property
    def rms_norm_eps(self) -> float: ...


Shape = TypeVar("Shape", bound=LayerConfig)


class HeadLayer(Generic[Shape]):
    """The base of layers that read the target's states: weights by short names, matrices in the type of products.

    Args:
        prefix: left out of the names.
        kept: prefix of the names of matrices that no product is made with; they keep their type.
    """

    def __init__(
        self, head: nn.Module, config: Shape, dtype: torch.dtype, *, prefix: str = "", kept: str | None = None
    ) -> None:
        self.config = config
        self.weights = {
            name.removeprefix(prefix).removesuffix(".weight"): (
                weight if weight.ndim != 2 or (kept is not None and name.startswith(kept)) else weight.to(dtype)
            )
            for name, weight in head.named_parameters()
        }

    def linear(self, name: str, x: Tensor) -> Tensor:
        return product(x, self.weights[name])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name].to(x.dtype), self.config.rms_norm_eps)

    def joined(self, states: Tensor, augment: Augmentation | None) -> Tensor:
        """[R, layers, H] -> [R, layers * H], what is fused. There may be one layer more."""
        states = states[:, : len(self.config.layers)]
        if self.config.norm_before_fc:
            parts = [self.norm(f"fc_norm.{index}", states[:, index]) for index in range(states.shape[1])]
            states = torch.stack(parts, 1)
        flat = states.flatten(1)
        return flat if augment is None else augment(flat)

    def feed_forward(self, x: Tensor, prefix: str = "") -> Tensor:
        """x with what the gated feed-forward part makes of it added."""
        h = self.norm(f"{prefix}post_attention_layernorm", x)
        h = F.silu(self.linear(f"{prefix}mlp.gate_proj", h)) * self.linear(f"{prefix}mlp.up_proj", h)
        return x + self.linear(f"{prefix}mlp.down_proj", h)


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
