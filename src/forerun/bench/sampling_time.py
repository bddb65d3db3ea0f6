"""Time that a step spends on sampling and verification, outside all forwards: on random logits, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from forerun.bench.report import Columns
from forerun.config import SamplingParams
from forerun.sampling import LogitsPipeline, LogitsRow, StepNoise, draw_tokens
from forerun.types import Draft, PackedDrafts, Sequence as Tokens
from forerun.verify import rule_for, verify_step

VOCAB_SIZES = (4096, 49_152)
"""Of the bundled models, and of a common larger one."""
SPREAD = 3.0
"""Standard deviation of the target's logits."""
DISAGREEMENT = 1.0
"""Standard deviation of the difference between the draft's logits and the target's."""
PLAIN = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1)
"""Options of the plain step."""
WARM_UP = 5
"""Rounds before those that count."""


@dataclass(frozen=True, slots=True)
class SamplingTimeRow:
    """One kind of step. Medians in milliseconds.

    Attributes:
        step: what is drafted, and how tokens are chosen.
        vocab_size: V.
        draft: the draft's distributions, and its tokens drawn from them.
        target: the target's distributions.
        verify: the verdict, with its noise.
        total: all of them.
        fast: the 10th percentile of the total; it is disturbed less by other programs.
    """

    step: str
    vocab_size: int
    draft: float
    target: float
    verify: float
    total: float
    fast: float


COLUMNS: Columns[SamplingTimeRow] = {
    "step": lambda row: row.step,
    "vocabulary": lambda row: str(row.vocab_size),
    "draft in ms": lambda row: f"{row.draft:.3f}",
    "target in ms": lambda row: f"{row.target:.3f}",
    "verify in ms": lambda row: f"{row.verify:.3f}",
    "all in ms": lambda row: f"{row.total:.3f}",
    "10 %": lambda row: f"{row.fast:.3f}",
}


def measure(
    vocab_sizes: Sequence[int] = VOCAB_SIZES,
    num_draft_tokens: int = 4,
    rounds: int = 200,
    say: Callable[[str], None] = lambda _: None,
) -> list[SamplingTimeRow]:
    """Two rows per vocabulary, measured in turn: a drawn chain at temperature 1, and a plain step with a seed.

    Args:
        num_draft_tokens: K, of the drawn chain.
        rounds: steps of each kind that count.
    """
    rows = []
    for vocab_size in vocab_sizes:
        say(f"timing {rounds} steps at a vocabulary of {vocab_size}")
        generator = torch.Generator().manual_seed(vocab_size)
        shape = (num_draft_tokens + 1, vocab_size)
        target = SPREAD * torch.randn(shape, generator=generator)
        draft = target + DISAGREEMENT * torch.randn(shape, generator=generator)
        drawn, plain = Tokens(0, [0], 1, SamplingParams(temperature=1.0)), Tokens(1, [0], 1, PLAIN)
        names = [f"drawn chain, K = {num_draft_tokens}", f"plain, {_options(PLAIN)}"]
        times: list[list[list[float]]] = [[], []]
        for _ in range(WARM_UP + rounds):
            times[0].append(_step_seconds(drawn, draft[:-1], target, generator))
            times[1].append(_step_seconds(plain, draft[:0], target[:1], generator))
        for name, seconds in zip(names, times, strict=True):
            counted = 1e3 * np.array(seconds[WARM_UP:])
            total = counted.sum(-1)
            drafted, processed, verified, whole = (float(np.median(part)) for part in (*counted.T, total))
            fast = float(np.quantile(total, 0.1))
            rows.append(SamplingTimeRow(name, vocab_size, drafted, processed, verified, whole, fast))
    return rows


def _step_seconds(sequence: Tokens, draft_logits: Tensor, logits: Tensor, generator: torch.Generator) -> list[float]:
    """Seconds of draft, target and verdict. draft_logits: [K, V]; logits: [K + 1, V]."""
    pipeline = LogitsPipeline(logits.shape[-1])
    start = perf_counter()
    draft = _drawn_chain(sequence, draft_logits, pipeline, generator) if len(draft_logits) else Draft.empty()
    drafted = perf_counter()
    packed = PackedDrafts.of([draft])
    path = draft.ids
    logprobs = pipeline.process(logits, [LogitsRow(sequence, path[:depth]) for depth in range(len(path) + 1)])
    processed = perf_counter()
    noise = StepNoise(generator, [sequence], packed, logits.device)
    verify_step(packed, logprobs, [rule_for(sequence.params, draft)], noise)
    return [drafted - start, processed - drafted, perf_counter() - processed]


def _drawn_chain(sequence: Tokens, logits: Tensor, pipeline: LogitsPipeline, generator: torch.Generator) -> Draft:
    """As a draft model draws it, one token after the other."""
    uniforms = torch.rand(len(logits), dtype=torch.float64, generator=generator)
    token_ids: list[int] = []
    probabilities: list[Tensor] = []
    for place in range(len(logits)):
        part = slice(place, place + 1)
        probabilities.append(pipeline.probabilities(logits[part], [LogitsRow(sequence, token_ids[:])])[0])
        token_ids += draw_tokens(probabilities[-1][None], uniforms[part]).tolist()
    unread = torch.zeros_like(probabilities[0])
    return Draft.chain(token_ids, torch.stack([*probabilities, unread]))


def _options(params: SamplingParams) -> str:
    """The options that are not at their defaults."""
    default = SamplingParams()
    changed = {name: getattr(params, name) for name in params.__slots__}
    return " ".join(f"{name}={value}" for name, value in changed.items() if value != getattr(default, name))
