"""A G-test of what the engine samples, on a Markov chain whose distribution is known exactly.

As in test_distribution: given the token before them, each two tokens are an independent draw from a joint distribution.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import MarkovModel
from forerun import LLM, SamplingParams
from forerun.lab.audit.statistics import LEAST_EXPECTED, NOTHING, g_test

VOCAB, BATCH, SIGNIFICANCE = 4, 256, 1e-3
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))


class Clock:
    """Time that is only counted."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every module of the package that measures time reads this clock."""
        modules = [module for name, module in sys.modules.items() if name.startswith("forerun.")]
        measuring = [module for module in modules if "perf_counter" in vars(module)]
        assert measuring
        for module in measuring:
            monkeypatch.setattr(module, "perf_counter", self)


class Timed(MarkovModel):
    """A Markov chain each of whose forwards takes a known time."""

    def __init__(self, table: Tensor, clock: Clock, seconds: float, name: str) -> None:
        super().__init__(table)
        self.clock, self.seconds, self.name = clock, seconds, name

    def forward(self, batch: Any, layers: Any = ()) -> Any:
        self.clock.now += self.seconds * (1 + 0.0005 * sum(len(rows.token_ids) for rows in batch))
        return super().forward(batch, layers)


def p_value(
    drafter: Any,
    num_samples: int,
    num_draft_tokens: Any = 6,
    acceptance: str | None = None,
    tokenizer: Any = None,
    target: Any = None,
    batch: int = BATCH,
) -> float:
    """Of the G-test of all pairs of tokens, given the token before them.

    batch: sequences at a time; the fewer, the longer each of them.
    """
    length = -(-num_samples * 2 // batch) // 2 * 2
    model: Any = MarkovModel(TARGET) if target is None else target
    llm: Any = LLM(
        model,
        drafter,
        num_draft_tokens=num_draft_tokens,
        acceptance=acceptance,
        max_batch=batch,
        seed=20,
        tokenizer=tokenizer,
    )
    results = llm.generate([[i % VOCAB] for i in range(batch)], SamplingParams(max_tokens=length, ignore_eos=True))
    accepted = sum(result.stats.num_accepted_tokens for result in results)
    assert accepted > num_samples / 5, (accepted, num_samples)
    tokens = torch.tensor([[i % VOCAB, *result.token_ids] for i, result in enumerate(results)])
    windows = tokens.unfold(1, 3, 2).reshape(-1, 3)
    distribution = TARGET.double().softmax(-1)
    weights = torch.tensor([VOCAB**2, VOCAB, 1])
    counts = torch.bincount((windows * weights).sum(-1), minlength=VOCAB**3).double().reshape(VOCAB, -1)
    expected = torch.einsum("sa,ab->sab", distribution, distribution).reshape(VOCAB, -1)
    outcome = NOTHING
    for row, accept_probs in zip(counts, expected):
        outcome += g_test(row.numpy(), accept_probs.numpy(), LEAST_EXPECTED)
    return outcome.p_value
