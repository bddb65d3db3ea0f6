"""Drafters of the bundled target that learn when a test says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from forerun import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)


def noisy(tensors: dict[str, torch.Tensor], size: float) -> dict[str, torch.Tensor]:
    """Matrices with noise of so many times their deviation."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: each + size * each.std() * torch.randn(each.shape, generator=generator) if each.ndim == 2 else each
        for name, each in tensors.items()
    }


def learn(llm: LLM, tenant: str | None = None) -> Any:
    """Let a tenant's copy learn a round, and return what learns."""
    adapting: Any = llm.adapting
    if tenant not in adapting._pupils:
        adapting._restore(tenant)
    adapting._learn(tenant)
    return adapting._pupils[tenant]


def accepted(llm: LLM, texts: list[str], tenant: str | None = None) -> tuple[float, list[list[int]]]:
    """Tokens a forward, and the answers."""
    answers: Any = llm.generate(texts, replace(PARAMS, tenant=tenant), use_tqdm=False)
    stats = [each.stats for each in answers]
    rate = sum(each.num_tokens for each in stats) / sum(each.num_forwards for each in stats)
    return rate, [list(each.choices[0].token_ids) for each in answers]
