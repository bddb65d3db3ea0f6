"""How many rows of prompts a step may compute beside sequences that are being answered."""

from __future__ import annotations

from forerun.engine.stats import StepStats

MAX_ROWS = 512
"""Rows of prompts in one step, whoever else is in it."""
MIN_ROWS = 16
"""The same at least: below, the step's fixed cost is most of what a prompt takes."""
DELAY = 1.5
"""By how many times the duration of a step without prompts the prompts in it may lengthen a step."""
DECAY = 0.8
"""Weight that earlier steps keep."""
ENOUGH_ROWS = 64
"""Rows of a step that has nothing but prompts, from which on its duration tells what a row takes."""


class PromptShare:
    """Learns what steps and prompt rows take, and so keeps a long prompt from stalling the others' answers.

    Args:
        adaptive: False: always `MAX_ROWS`, so that what a step holds does not depend on time.
    """

    def __init__(self, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._step = 0.0  # seconds of a step without prompts
        self._row = 0.0  # seconds that a row of a prompt adds

    def rows(self, num_answering: int) -> int:
        """Rows of prompts that the next step may hold beside so many sequences that are being answered."""
        if not (self._adaptive and num_answering and self._step and self._row):
            return MAX_ROWS
        return min(max(int(DELAY * self._step / self._row), MIN_ROWS), MAX_ROWS)

    def observe(self, stats: StepStats) -> None:
        """Note a step."""
        prompts = stats.num_prompt_rows
        if not prompts:
            self._step = _mixed(self._step, stats.time_total)
        elif prompts == stats.num_rows:
            if prompts >= ENOUGH_ROWS:
                self._row = _mixed(self._row, stats.time_total / prompts)
        elif self._step:
            self._row = _mixed(self._row, max(stats.time_total - self._step, 0.0) / prompts)


def _mixed(old: float, new: float) -> float:
    return DECAY * old + (1 - DECAY) * new if old else new
