"""Metrics of a server by Ray, which each node exports for Prometheus with the prefix `ray_`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from typing import Any

from ray.util import metrics

from forerun.server.metrics import LABEL, Counts, Reading, TimeHistogram

_INTERVAL = 5.0
"""Seconds between two readings of the gauges."""


class RayMetricFactory:
    """Makes counters, histograms and gauges of Ray.

    Args:
        model: its name, a label of all metrics.
    """

    def __init__(self, model: str) -> None:
        self._tags = {LABEL: model}
        self._gauges: dict[str, metrics.Gauge] = {}

    def counter(self, name: str, about: str, *labels: str) -> Counts:
        return _Counts(metrics.Counter(_allowed(name), about, (LABEL, *labels)), self._tags)

    def histogram(self, name: str, about: str, bounds: Seq[float]) -> TimeHistogram:
        return _Times(metrics.Histogram(_allowed(name), about, [*bounds], (LABEL,)), self._tags)

    def gauges(self, read: Callable[[], Iterator[Reading]]) -> None:
        """Read the gauges every few seconds, in a thread that ends with the process."""
        wait = threading.Event().wait

        def export() -> None:
            while not wait(_INTERVAL):
                for reading in read():
                    name = _allowed(reading.name)
                    if name not in self._gauges:
                        self._gauges[name] = metrics.Gauge(name, reading.about, (LABEL,))
                    self._gauges[name].set(reading.value, tags=self._tags)

        threading.Thread(target=export, name="forerun-gauges", daemon=True).start()


class _Counts:
    def __init__(self, counter: Any, tags: Mapping[str, str]) -> None:
        self._counter, self._tags = counter, tags

    def add(self, amount: float, **labels: str) -> None:
        if amount > 0:  # Ray refuses an amount of 0
            self._counter.inc(amount, tags={**self._tags, **labels})


class _Times:
    def __init__(self, histogram: Any, tags: Mapping[str, str]) -> None:
        self._histogram, self._tags = histogram, tags

    def observe(self, value: float) -> None:
        self._histogram.observe(value, tags={**self._tags})


def _allowed(name: str) -> str:
    """Replace colons, which Ray does not allow in names."""
    return name.replace(":", "_")
