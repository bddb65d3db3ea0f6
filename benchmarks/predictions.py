"""Predicted (replay) beside measured speed-ups of `forerun tune --results` files: predictions.py FILE...

A prediction is judged where the measured interval is narrower than 10 % to either side; it holds within 15 %.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forerun.bench.report import markdown_table
from forerun.results import Results, load

NARROW, NEAR = 0.10, 0.15


@dataclass(frozen=True, slots=True)
class Pair:
    """One finalist of a tuning.

    Attributes:
        low, high: of what was measured, 95 %.
    """

    where: str
    arm: str
    predicted: float
    measured: float
    low: float
    high: float

    @property
    def is_judged(self) -> bool:
        """Whether what was measured is known well enough."""
        return max(self.high - self.measured, self.measured - self.low) <= NARROW * self.measured

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def verdict(self) -> str:
        """For people."""
        if not self.is_judged:
            return "not judged: the interval is too wide"
        return "within 15 %" if abs(self.error) <= NEAR else "off"


def pairs(results: Results, file: str) -> Iterator[Pair]:
    """Of a file."""
    target = "" if results.target is None else results.target.name
    measured = {each.labels["method"]: each for each in results.figures if each.labels.get("part") == "report"}
    for figure in results.figures:
        found = measured.get(figure.labels.get("method", ""))
        if figure.name != "over_plain_predicted" or found is None or figure.value is None:
            continue
        if found.value is None or found.low is None or found.high is None:
            continue
        workload = results.prompts[0].workload if results.prompts else ""
        arm = str(figure.labels["method"])
        yield Pair(f"{target}, {workload} (`{file}`)", arm, figure.value, found.value, found.low, found.high)


def main(paths: list[str]) -> None:
    """A table of all files."""
    if not paths:
        sys.exit(__doc__)
    every = [pair for path in paths for pair in pairs(load(path), Path(path).name)]
    rows = [
        [
            each.where,
            f"`{each.arm}`",
            f"{each.predicted:.2f}",
            f"{each.measured:.2f} [{each.low:.2f}, {each.high:.2f}]",
            f"{100 * each.error:+.0f} %",
            each.verdict,
        ]
        for each in every
    ]
    print(markdown_table(["target and prompts", "arm", "predicted", "measured", "error", "verdict"], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
