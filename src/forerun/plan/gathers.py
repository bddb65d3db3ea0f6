"""What it costs that devices wait for each other: the time of a gather by its size, given or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean, linear_regression

from forerun.errors import ConfigError
from forerun.results.read import load

GATHERS_A_LAYER = 2
"""After attention and after the feed-forward layer; the logits are gathered once."""
STATE_BYTES = 4
"""Of a number that is gathered: partial sums are float32."""
_FIGURE = "gather"


@dataclass(frozen=True, slots=True)
class GatherCost:
    """Seconds of a gather: `latency`, and what the other devices' parts take to arrive. The latency of several devices
    is taken for that of two.

    Attributes:
        bandwidth: bytes a second that arrive at a device.
    """

    latency: float
    bandwidth: float = inf

    def seconds(self, nbytes: float, devices: int) -> float:
        """Of a gather of parts of so many bytes."""
        return self.latency + nbytes * (devices - 1) / self.bandwidth

    @classmethod
    def of_file(cls, path: str | Path) -> GatherCost:
        """From what `forerun bench collectives --json FILE` has written: a line through its medians.

        Raises:
            ConfigError: the file cannot be read, or holds no gathers.
        """
        points = []
        for figure in load(path).figures:
            nbytes, ranks = figure.labels.get("bytes"), figure.labels.get("ranks")
            if figure.name != _FIGURE or figure.value is None:
                continue
            if not isinstance(nbytes, int) or not isinstance(ranks, int):
                raise ConfigError(f"{path}: a gather has no bytes or ranks. Measure anew: forerun bench collectives.")
            points.append((float(nbytes * (ranks - 1)), figure.value))
        if not points:
            raise ConfigError(
                f"{path} holds no gathers. Give what this command writes: forerun bench collectives --json FILE."
            )
        return cls._through(points)

    @classmethod
    def _through(cls, points: Sequence[tuple[float, float]]) -> GatherCost:
        """points: bytes that arrive, seconds."""
        sizes, seconds = zip(*points, strict=True)
        slope, latency = linear_regression(sizes, seconds) if len(set(sizes)) > 1 else (0.0, 0.0)
        if slope <= 0:
            return cls(fmean(seconds))
        return cls(latency if latency > 0 else min(seconds), 1 / slope)
