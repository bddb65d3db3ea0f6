"""What /metrics tells: vLLM's names, and what was decided about speculation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from forerun.engine import LLM, SequenceStats

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


class Metrics:
    """Counts what the server does.

    Args:
        name: of the model, the label `model_name`.
        num_choices: tells how many are computed or wait.
    """

    def __init__(self, llm: LLM, name: str, num_choices: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": name}
        self.registry.register(_EngineState(llm, name, num_choices))
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = self._counter("vllm:request_success", "Choices that have ended.", "finished_reason")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts verified.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._per_position = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by depth.", "position"
        )
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Seconds to the first token.")
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "Seconds between what a stream gets.", _SECONDS_PER_TOKEN
        )
        self._between_here = self._between.labels(**self._labels)  # looked up once: it is asked for every chunk
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean seconds per token after the first.", _SECONDS_PER_TOKEN
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Seconds of a whole request.")
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Seconds before the first step.")
        self._decisions = self._counter(
            "forerun:decisions", "Steps of sequences, by what was decided about drafting, and why.", "decision"
        )
        self._source_drafted = self._counter("forerun:drafter_draft_tokens", "Draft tokens, by drafter.", "drafter")
        self._source_accepted = self._counter("forerun:drafter_accepted_tokens", "Accepted, by drafter.", "drafter")
        self._responses = self._counter("forerun:http_responses", "Responses, by status.", "status")
        self._disconnects = self._counter("forerun:disconnects", "Clients that left before their answer was whole.")

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)

    def responded(self, status: int) -> None:
        """A response has begun."""
        self._responses.labels(**self._labels, status=str(status)).inc()

    def disconnected(self) -> None:
        """A client has left before the end."""
        self._disconnects.labels(**self._labels).inc()

    def prompted(self, num_tokens: int) -> None:
        """A request has been let in, with so many tokens of prompts."""
        self._prompt_tokens.labels(**self._labels).inc(num_tokens)

    def chunk(self, seconds: float) -> None:
        """A stream has got more, so long after what it got before."""
        self._between_here.observe(seconds)

    def ended(self, stats: SequenceStats, finish_reason: str | None, seconds: float) -> None:
        """A choice has ended.

        seconds: since its request was let in.
        """
        labels = self._labels
        queued = max(seconds - stats.time_total, 0.0)
        self._generation_tokens.labels(**labels).inc(stats.num_tokens)
        self._success.labels(**labels, finished_reason=finish_reason or "error").inc()
        self._whole.labels(**labels).observe(seconds)
        self._queue.labels(**labels).observe(queued)
        if stats.num_tokens:
            self._first.labels(**labels).observe(queued + stats.time_first_token)
        if stats.num_tokens > 1:
            rest = max(stats.time_total - stats.time_first_token, 0.0)
            self._per_token.labels(**labels).observe(rest / (stats.num_tokens - 1))
        if stats.reached_per_position:
            self._drafts.labels(**labels).inc(stats.reached_per_position[0])
        self._drafted.labels(**labels).inc(stats.num_draft_tokens)
        self._accepted.labels(**labels).inc(stats.num_accepted_tokens)
        for position, count in enumerate(stats.accepted_per_position):
            self._per_position.labels(**labels, position=str(position)).inc(count)
        for decision, count in stats.decisions.items():
            self._decisions.labels(**labels, decision=decision).inc(count)
        for drafter, source in stats.sources.items():
            self._source_drafted.labels(**labels, drafter=drafter).inc(source.num_draft_tokens)
            self._source_accepted.labels(**labels, drafter=drafter).inc(source.num_accepted_tokens)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        counter = Counter(name, about, ("model_name", *labels), registry=self.registry)
        if not labels:
            counter.labels(**self._labels)  # 0 is told from the start
        return counter

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(name, about, ("model_name",), buckets=buckets, registry=self.registry)


class _EngineState(Collector):
    """What is read from the engine at the moment of asking, between two numbers of a step at worst."""

    def __init__(self, llm: LLM, name: str, num_choices: Callable[[], int]) -> None:
        self._llm, self._name, self._num_choices = llm, name, num_choices

    def collect(self) -> Iterator[GaugeMetricFamily]:
        scheduler, pool = self._llm.engine.scheduler, self._llm.target.pool
        running = len(scheduler.running)
        yield self._gauge("vllm:num_requests_running", "Sequences that are computed.", running)
        waiting = max(self._num_choices() - running, 0)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", waiting)
        if pool is not None and pool.num_pages:
            used = 1 - pool.num_available / pool.num_pages
            yield self._gauge("vllm:kv_cache_usage_perc", "Share of the pages of keys and values in use.", used)

    def _gauge(self, name: str, about: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self._name], value)
        return family
