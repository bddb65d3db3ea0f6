"""Heads with random weights for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.drafters.models.eagle.config import EagleConfig

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "target_hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_positions": 256,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
}
"""Of a small head; those of the target are 96 tokens, 32 wide, 12 layers."""
EAGLE_1 = EagleConfig(version=1, draft_vocab_size=96, layers=(12,), **SIZES)
EAGLE_3 = EagleConfig(version=3, draft_vocab_size=40, layers=(1, 6, 9), **SIZES)
EXTENDED = EagleConfig(
    version=3,
    draft_vocab_size=40,
    layers=(1, 6, 9),
    norm_before_fc=True,
    norm_output=True,
    embedding_residual=True,
    sliding_window=64,
    **SIZES,
)


def random_tensors(config: EagleConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights of about the size that trained ones have; those of norms are about 1."""
    generator = torch.Generator().manual_seed(seed)

    def make(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return 1 + 0.1 * torch.randn(shape, generator=generator)
        return torch.randn(shape, generator=generator) / shape[1] ** 0.5

    return {name: make(shape) for name, shape in config.tensors().items()}


def random_d2t(config: EagleConfig, seed: int = 0) -> Tensor | None:
    """Offsets to distinct tokens of the target, rising."""
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if size == vocab_size:
        return None
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    return order[:size].sort().values - torch.arange(size)
