"""Metrics of a server by Ray, which each node exports for Prometheus with the prefix `ray_`."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq

from ray.util import metrics

from forerun.server.metrics import LABEL, Add, Gauges, Observe

_INTERVAL = 5.0
"""Seconds between two readings of the gauges."""


class RayMetricFactory:
    """Makes counters, histograms and gauges of Ray.

    Args:
        model: its name, a label of all metrics.
    """

    def __init__(self, model: str) -> None:
        self._tags = {LABEL: model}

    def counter(self, name: str, about: str, *labels: str) -> Add:
        made = metrics.Counter(_allowed(name), about, (LABEL, *labels))

        def add(amount: float, **given: str) -> None:
            if amount > 0:  # Ray refuses an amount of 0
                made.inc(amount, tags={**self._tags, **given})

        return add

    def histogram(self, name: str, about: str, bounds: Seq[float]) -> Observe:
        made = metrics.Histogram(_allowed(name), about, [*bounds], (LABEL,))
        return lambda value: made.observe(value, tags={**self._tags})

    def gauges(self, gauges: Gauges) -> None:
        """Read the gauges every few seconds, in a thread that ends with the process."""
        wait = threading.Event().wait
        rows = [(metrics.Gauge(_allowed(name), about, (LABEL,)), read) for name, (about, read) in gauges.items()]

        def export() -> None:
            while not wait(_INTERVAL):
                for made, read in rows:
                    made.set(read(), tags=self._tags)

        threading.Thread(target=export, name="forerun-gauges", daemon=True).start()


def _allowed(name: str) -> str:
    """Replace colons, which Ray does not allow in names."""
    return name.replace(":", "_")
