"""Where the time of a generation's steps goes: target, drafter, and the engine around them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from forerun.bench.measure import timed
from forerun.bench.report import Columns, percent
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


COLUMNS: Columns[StepTimeRow] = {
    "method": lambda row: row.method,
    "step": lambda row: f"{row.step:.2f}",
    "target": lambda row: f"{row.target:.2f}",
    "draft": lambda row: f"{row.draft:.2f}",
    "engine": lambda row: f"{row.engine:.2f}",
    "engine share": lambda row: percent(row.engine / row.step),
}


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
            run = timed(partial(llm.generate, list(prompt), params))
            stats = run.value.stats
            scale = 1000 / stats.num_forwards
            rest = run.seconds - stats.time_target - stats.time_draft
            parts.append([scale * part for part in (run.seconds, stats.time_target, stats.time_draft, rest)])
        rows.append(StepTimeRow(name, *(statistics.median(column) for column in zip(*parts, strict=True))))
    return rows
