"""Metrics of a server: vLLM's names, and the decisions about speculation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from functools import partial
from typing import Any, Protocol, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

from forerun import __version__
from forerun.engine import LLM, SequenceStats

LABEL = "model_name"
"""Every metric carries it."""


Gauges: TypeAlias = Mapping[str, tuple[str, Callable[[], float]]]
"""Name of a gauge -> what it is, and what reads its current value."""
Add: TypeAlias = Callable[..., object]
"""Adds an amount, 0 or above, to a counter; its labels come as keywords."""
Observe: TypeAlias = Callable[[float], object]
"""Records a value in a histogram."""


class MetricFactory(Protocol):
    """Makes counters, histograms and gauges, all with the label `model_name`."""

    def counter(self, name: str, about: str, *labels: str) -> Add:
        """Make a counter. name: without `_total`."""

    def histogram(self, name: str, about: str, bounds: Seq[float]) -> Observe:
        """Make a histogram. bounds: of its buckets, increasing."""

    def gauges(self, gauges: Gauges) -> None:
        """Read the gauges whenever the metrics are read."""


class Prometheus:
    """Metrics of Prometheus' client, in their own registry; /metrics reads them.

    Args:
        name: the model's name.
    """

    def __init__(self, name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {LABEL: name}
        ProcessCollector(registry=self._registry)
        Info("forerun", "What runs.", registry=self._registry).info({"version": __version__, **self._labels})

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def counter(self, name: str, about: str, *labels: str) -> Add:
        made = Counter(name, about, (LABEL, *labels), registry=self._registry)
        if not labels:
            made.labels(**self._labels)  # reported as 0 from the start
        return lambda amount, **given: made.labels(**self._labels, **given).inc(amount)

    def histogram(self, name: str, about: str, bounds: Seq[float]) -> Observe:
        return Histogram(name, about, (LABEL,), buckets=bounds, registry=self._registry).labels(**self._labels).observe

    def gauges(self, gauges: Gauges) -> None:
        for name, (about, read) in gauges.items():
            Gauge(name, about, (LABEL,), registry=self._registry).labels(**self._labels).set_function(read)


_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
"""Bounds of the histograms of latencies."""
_SECONDS_PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5)


class HTTPMetrics:
    """Counts responses.

    Attributes:
        responded: counts a response that begins, by its `status`, a text.
        disconnected: counts a client that disconnected early.
    """

    def __init__(self, factory: MetricFactory) -> None:
        self.responded = partial(factory.counter("forerun:http_responses", "Responses, by status.", "status"), 1)
        disconnects = factory.counter("forerun:disconnects", "Clients that left before their answer was whole.")
        self.disconnected = partial(disconnects, 1)


_COUNTERS: dict[str, tuple[str, ...]] = {
    "vllm:prompt_tokens": ("Tokens of prompts.",),
    "vllm:generation_tokens": ("Tokens generated.",),
    "vllm:prefix_cache_queries": ("Prompt tokens looked for in the cache.",),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the cache.",),
    "vllm:external_prefix_cache_hits": ("Prompt tokens read from the disk, which are among them.",),
    "vllm:num_preemptions": ("Times that sequences lost their place to others, to be computed again later.",),
    "vllm:request_success": ("Choices that have ended.", "finished_reason"),
    "vllm:spec_decode_num_drafts": ("Drafts verified.",),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens verified.",),
    "vllm:spec_decode_num_accepted_tokens": ("Draft tokens accepted.",),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("Draft tokens accepted, by depth.", "position"),
    "forerun:decisions": ("Steps of sequences, by what was decided about drafting, and why.", "decision"),
    "forerun:drafter_draft_tokens": ("Draft tokens, by drafter.", "drafter"),
    "forerun:drafter_accepted_tokens": ("Accepted, by drafter.", "drafter"),
}
"""Name of a counter -> what it counts, and its label if it has one."""
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Seconds to the first token.", _SECONDS),
    "vllm:inter_token_latency_seconds": ("Seconds between what a stream gets.", _SECONDS_PER_TOKEN),
    "vllm:request_time_per_output_token_seconds": ("Mean seconds per token after the first.", _SECONDS_PER_TOKEN),
    "vllm:e2e_request_latency_seconds": ("Seconds of a whole request.", _SECONDS),
    "vllm:request_queue_time_seconds": ("Seconds before the first step.", _SECONDS),
}
"""Name of a histogram -> what it measures, and the bounds of its buckets."""


class Metrics(HTTPMetrics):
    """Counts what the server does.

    Args:
        live: returns how many choices are `running` and `waiting`, and of the prompts without an answer the
            `prompt_tokens_computed` and `prompt_tokens_waiting`.

    Attributes:
        prompted: counts the prompt tokens of an admitted request.
        chunk: records the seconds between two chunks of a stream.
    """

    def __init__(self, llm: LLM, live: Callable[[], Mapping[str, Any]], factory: MetricFactory) -> None:
        super().__init__(factory)

        def used() -> float:
            pool = llm.target.pool
            return 1 - pool.num_available / pool.num_pages if pool is not None and pool.num_pages else 0.0

        def of(name: str) -> Callable[[], float]:
            return lambda: live()[name]

        factory.gauges(  # read from the engine, possibly in the middle of a step
            {
                "vllm:num_requests_running": ("Sequences that are computed.", of("running")),
                "vllm:num_requests_waiting": ("Sequences that wait.", of("waiting")),
                "forerun:prompt_tokens_computed": (
                    "Tokens of prompts that are computed, of requests without output.",
                    of("prompt_tokens_computed"),
                ),
                "forerun:prompt_tokens_waiting": (
                    "Tokens of prompts that are not computed yet.",
                    of("prompt_tokens_waiting"),
                ),
                "vllm:kv_cache_usage_perc": ("Share of the pages of keys and values in use.", used),
            }
        )
        self._add = {name: factory.counter(name, *about) for name, about in _COUNTERS.items()}
        self._observe = {name: factory.histogram(name, *about) for name, about in _HISTOGRAMS.items()}
        self.prompted = self._add["vllm:prompt_tokens"]
        self.chunk = self._observe["vllm:inter_token_latency_seconds"]

    def ended(self, stats: SequenceStats, finish_reason: str | None, prompt: int, seconds: float) -> None:
        """Count a finished choice.

        Args:
            prompt: number of tokens of its prompt.
            seconds: since its request was admitted.
        """
        queued = max(seconds - stats.time_total, 0.0)
        durations = {"vllm:e2e_request_latency_seconds": seconds, "vllm:request_queue_time_seconds": queued}
        if stats.num_tokens:
            durations["vllm:time_to_first_token_seconds"] = queued + stats.time_first_token
        if stats.num_tokens > 1:
            rest = max(stats.time_total - stats.time_first_token, 0.0)
            durations["vllm:request_time_per_output_token_seconds"] = rest / (stats.num_tokens - 1)
        counts = {
            "vllm:prefix_cache_queries": prompt,
            "vllm:prefix_cache_hits": stats.num_cached_tokens,
            "vllm:external_prefix_cache_hits": stats.num_read_tokens,
            "vllm:generation_tokens": stats.num_tokens,
            "vllm:num_preemptions": stats.num_preemptions,
            "vllm:spec_decode_num_drafts": sum(stats.reached_per_position[:1]),
            "vllm:spec_decode_num_draft_tokens": stats.num_draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        }
        by_label: dict[str, Mapping[Any, int]] = {
            "vllm:request_success": {finish_reason or "error": 1},
            "vllm:spec_decode_num_accepted_tokens_per_pos": dict(enumerate(stats.accepted_per_position)),
            "forerun:decisions": stats.decisions,
            "forerun:drafter_draft_tokens": {name: each.num_draft_tokens for name, each in stats.sources.items()},
            "forerun:drafter_accepted_tokens": {name: each.num_accepted_tokens for name, each in stats.sources.items()},
        }
        for name, duration in durations.items():
            self._observe[name](duration)
        for name, count in counts.items():
            self._add[name](count)
        for name, labelled in by_label.items():
            for label, count in labelled.items():
                self._add[name](count, **{_COUNTERS[name][1]: str(label)})
