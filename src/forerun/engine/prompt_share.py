"""How many rows of prompts a step may compute beside sequences that are being answered.

A step that lasts longer is noticed where an answer is streamed. Elsewhere the whole batch is the sooner full, and done.
"""

from __future__ import annotations

from forerun.engine.stats import StepStats

MAX_ROWS = 512
"""Rows of prompts in one step, whoever else is in it."""
MIN_ROWS = 8
"""The same at least: below, the step's fixed cost is most of what a prompt takes."""
DELAY = 1.2
"""By how many times the duration of a step without prompts the prompts in it may lengthen a step."""
DECAY = 0.8
"""Weight that earlier steps keep."""
ENOUGH_ROWS = 64
"""Rows of a step, from which on its duration tells what a row takes, whatever its fixed cost."""
LEAST_SHARE = 0.2
"""Of a step without prompts, what at least is taken for its fixed cost."""


class PromptShare:
    """Learns what a step and its rows take, and so keeps a long prompt from stalling the others' answers.

    A step is taken to last `fixed + row * rows`: rows of prompts and of answers cost about the same, and what they cost
    together is what a crowd must be measured by, since it seldom has a step without any prompt.

    Args:
        adaptive: False: always `MAX_ROWS`, so that what a step holds does not depend on time.
    """

    def __init__(self, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._fixed = 0.0  # seconds of a step, apart from its rows
        self._row = 0.0  # seconds that a row adds

    def rows(self, num_answering: int, is_watched: bool) -> int:
        """Rows of prompts that the next step may hold.

        Args:
            num_answering: sequences that are being answered.
            is_watched: somebody reads an answer while it is written.
        """
        if not (self._adaptive and is_watched and self._fixed and self._row):
            return MAX_ROWS
        return min(max(int(DELAY * (self._fixed / self._row + num_answering)), MIN_ROWS), MAX_ROWS)

    def observe(self, stats: StepStats) -> None:
        """Note a step."""
        if stats.num_prompt_rows:
            if self._fixed or stats.num_rows >= ENOUGH_ROWS:
                self._row = _mixed(self._row, max(stats.time_total - self._fixed, 0.0) / stats.num_rows)
        elif stats.num_rows:
            rest = stats.time_total - self._row * stats.num_rows
            self._fixed = _mixed(self._fixed, max(rest, LEAST_SHARE * stats.time_total))


def _mixed(old: float, new: float) -> float:
    return DECAY * old + (1 - DECAY) * new if old else new
