"""Where the time of a generation's steps goes: target, drafter, and the engine around them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forerun.bench.measure import timed
from forerun.bench.report import percent
from forerun.config import SamplingParams
from forerun.engine import LLM


@dataclass(frozen=True, slots=True)
class StepTimeRow:
    """One method, in milliseconds per step that gives tokens.

    Attributes:
        method: its name.
        step: the whole step; the parts below add up to it.
        target: in the target's forwards, those over the prompt included.
        draft: in the drafter, with or without a model, learning what became of its drafts included.
        engine: all other time: distributions, verification, commits, text.
    """

    method: str
    step: float
    target: float
    draft: float
    engine: float


def measure(engines: Mapping[str, LLM], prompts: Sequence[Sequence[int]], max_tokens: int) -> list[StepTimeRow]:
    """Medians over the prompts, by the engine's statistics of a greedy generation from each.

    Args:
        engines: by method name.
        prompts: token ids; the first is also generated from once to warm up.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    rows = []
    for name, llm in engines.items():
        llm.generate(list(prompts[0]), params)
        parts = []
        for prompt in prompts:
            run = timed(partial(_generate, llm, prompt, params))
            stats = run.value.stats
            scale = 1000 / stats.num_forwards
            rest = run.seconds - stats.time_target - stats.time_draft
            parts.append([scale * part for part in (run.seconds, stats.time_target, stats.time_draft, rest)])
        rows.append(StepTimeRow(name, *(statistics.median(column) for column in zip(*parts, strict=True))))
    return rows


def header() -> list[str]:
    """The column titles."""
    return ["method", "step", "target", "draft", "engine", "engine share"]


def cells(row: StepTimeRow) -> list[str]:
    """One line of the table."""
    parts = [f"{part:.2f}" for part in (row.step, row.target, row.draft, row.engine)]
    return [row.method, *parts, percent(row.engine / row.step)]


def _generate(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Any:
    return llm.generate(list(prompt), params)
