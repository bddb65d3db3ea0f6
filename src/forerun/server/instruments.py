"""Where counts and times of a server go: the contract, and Prometheus' client, which /metrics reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

LABEL = "model_name"
"""Every metric carries it."""


class Reading(NamedTuple):
    """A gauge at the moment of asking."""

    name: str
    about: str
    value: float


class Counts(Protocol):
    """A counter."""

    def add(self, amount: float, **labels: str) -> None:
        """Count so much more; 0 or above."""


class Times(Protocol):
    """A histogram."""

    def observe(self, value: float) -> None:
        """Another value."""


class Instruments(Protocol):
    """Makes counters, histograms and gauges, all of them with the label `model_name`."""

    def counter(self, name: str, about: str, *labels: str) -> Counts:
        """name: without `_total`."""

    def histogram(self, name: str, about: str, bounds: Seq[float]) -> Times:
        """bounds: of its buckets, increasing."""

    def gauges(self, read: Callable[[], Iterator[Reading]]) -> None:
        """`read` is asked whenever somebody wants to know."""


class Prometheus:
    """Instruments of Prometheus' client, in a registry of their own.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self._registry = CollectorRegistry()
        self._name = name

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)

    def counter(self, name: str, about: str, *labels: str) -> Counts:
        made = _Counts(Counter(name, about, (LABEL, *labels), registry=self._registry), {LABEL: self._name})
        if not labels:
            made.add(0)  # 0 is told from the start
        return made

    def histogram(self, name: str, about: str, bounds: Seq[float]) -> Times:
        return Histogram(name, about, (LABEL,), buckets=bounds, registry=self._registry).labels(self._name)

    def gauges(self, read: Callable[[], Iterator[Reading]]) -> None:
        self._registry.register(_Gauges(read, self._name))


class _Counts:
    def __init__(self, counter: Counter, labels: Mapping[str, str]) -> None:
        self._counter, self._labels = counter, labels

    def add(self, amount: float, **labels: str) -> None:
        self._counter.labels(**self._labels, **labels).inc(amount)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Iterator[Reading]], model: str) -> None:
        self._read, self._model = read, model

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for reading in self._read():
            family = GaugeMetricFamily(reading.name, reading.about, labels=[LABEL])
            family.add_metric([self._model], reading.value)
            yield family
