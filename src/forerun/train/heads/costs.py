"""What a step costs on this machine, and the speed-up that an acceptance length then gives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models import LanguageModel, Rows
from forerun.models.eagle import EagleModel

CONTEXT = 256
"""Positions in the cache when a step is timed."""
ROUNDS = 9


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds.

    Attributes:
        target: of a step of the target, by its rows, from one.
        head: of the head's first row of a draft, with the rows that it catches up on, and of each later one.
    """

    target: list[float]
    head: tuple[float, float]

    def speedup(self, length: float, num_draft_tokens: int) -> float:
        """Tokens per second over plain decoding, with chains of K and this mean acceptance length."""
        first, later = self.head
        step = self.target[num_draft_tokens] + first + (num_draft_tokens - 1) * later
        return length * self.target[0] / step


@torch.no_grad()
def measure_costs(served: LanguageModel, head: EagleModel, num_draft_tokens: int) -> StepCosts:
    """Medians of a few rounds, in which all are timed in turn."""
    rows = _Timed(served, None)
    drafts = _Timed(head, torch.zeros(CONTEXT, head.config.hidden_size, dtype=head.compute_dtype, device=head.device))
    found: dict[str, list[float]] = {}
    try:
        for _ in range(ROUNDS + 1):
            for count in range(1, num_draft_tokens + 2):
                found.setdefault(f"target {count}", []).append(rows.seconds(count))
            for count in (1, 2):
                found.setdefault(f"head {count}", []).append(drafts.seconds(count))
    finally:
        rows.cache.free()
        drafts.cache.free()
    median = {name: statistics.median(values[1:]) for name, values in found.items()}
    target = [median[f"target {count}"] for count in range(1, num_draft_tokens + 2)]
    return StepCosts(target, (median["head 2"], median["head 1"]))


class _Timed:
    """A model with a context in its cache."""

    def __init__(self, model: LanguageModel, states: Tensor | None) -> None:
        self._model, self._states = model, states
        self.cache = model.new_cache()
        self._forward(CONTEXT)
        self.cache.commit(range(CONTEXT))

    def seconds(self, count: int) -> float:
        """Of a forward of so many rows, which are dropped."""
        seconds = seconds_of(self._model, lambda: self._forward(count))
        self.cache.drop()
        return seconds

    def _forward(self, count: int) -> None:
        states = None if self._states is None else self._states[:count]
        tokens = [index % self._model.vocab_size for index in range(count)]
        self._model.forward([Rows(self.cache, tokens, num_logits=min(count, CONTEXT // 2), states=states)])


@torch.no_grad()
def target_costs(served: LanguageModel, num_draft_tokens: int) -> list[float]:
    """Medians of the target's steps, by rows from one."""
    rows = _Timed(served, None)
    counts = range(1, num_draft_tokens + 2)
    try:
        found = [[rows.seconds(count) for count in counts] for _ in range(ROUNDS + 1)][1:]
    finally:
        rows.cache.free()
    return [statistics.median(values) for values in zip(*found, strict=True)]


def seconds_of(model: LanguageModel, work: Callable[[], None]) -> float:
    """What some work of a model takes, to its end."""
    synchronise = _synchroniser(model)
    synchronise()
    started = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - started


def _synchroniser(model: LanguageModel) -> Callable[[], None]:
    return torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
