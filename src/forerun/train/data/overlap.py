"""Whether training prompts hold what a drafter will be measured on: runs of 13 words that both have."""

from __future__ import annotations

from collections.abc import Sequence

from forerun import workloads
from forerun.workloads import word_runs


class Overlap:
    """The runs of 13 words of the prompts of workloads.

    Args:
        workload: names of bundled workloads, and paths of JSONL files with prompts.

    Attributes:
        num_prompts: how many prompts there are.

    Raises:
        ConfigError: there is no such workload, or it cannot be read.
    """

    def __init__(self, evaluation: Sequence[str]) -> None:
        cases = [case for workload in evaluation for case in workloads.load(workload)]
        self.num_prompts = len(cases)
        self._runs = {run for case in cases for text in case.texts for run in word_runs(text)}

    def __contains__(self, text: str) -> bool:
        """Whether a text shares 13 words in a row with one of the prompts."""
        return any(run in self._runs for run in word_runs(text))


def bundled() -> list[str]:
    """All bundled workloads: what forerun itself is measured on."""
    return workloads.names()
