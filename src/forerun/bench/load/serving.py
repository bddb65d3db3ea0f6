"""One engine under load, as its clients see it: who sent what, and when the tokens came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from forerun.bench.engines import gaps_of
from forerun.bench.load.asks import Ask
from forerun.config import SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.stats import StepStats


@dataclass(slots=True)
class Stream:
    """One request as its client saw it.

    Attributes:
        sent: when it was sent, in seconds.
        arrivals: (seconds, tokens) of everything that came.
        done: whether the answer is complete.
    """

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    done: bool = False

    @property
    def first_token(self) -> float | None:
        """Seconds from sending to the first token; None before it."""
        return self.arrivals[0][0] - self.sent if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens: those that come together share the time since the tokens before."""
        return gaps_of(self.arrivals)

    @property
    def waits(self) -> list[float]:
        """Seconds between arrivals, however many tokens came with each."""
        times = [when for when, _ in self.arrivals]
        return list(np.diff(times))


class Clients:
    """The clients of one engine, and its driver. Not for several threads.

    Args:
        engine: nobody else drives it.
        params: of all requests but for their length.
        tenant: each request is a tenant of its own, under this name, so that none finds what another has left;
            None: they name none.
        clock: seconds.
        streamed: the answers come as they are written; otherwise whole, and prompts need not wait for them.

    Attributes:
        clock: see above.
        live: by request id, what has been sent and is not complete.
        complete: what is.
        num_tokens: that came, from all.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        tenant: str | None = None,
        clock: Callable[[], float] = perf_counter,
        streamed: bool = True,
    ) -> None:
        self.engine = engine
        self._streamed = streamed
        self._params, self._tenant, self.clock = params, tenant, clock
        self.live: dict[int, Stream] = {}
        self.complete: list[Stream] = []
        self.num_tokens = 0
        self._num_sent = 0

    def send(self, ask: Ask, tenant: str | None = None) -> Stream:
        """Send a request. tenant: in place of one of its own."""
        tenant = tenant or (None if self._tenant is None else f"{self._tenant} {self._num_sent}")
        self._num_sent += 1
        params = replace(self._params, max_tokens=ask.max_tokens, tenant=tenant)
        stream = Stream(self.clock())
        self.live[self.engine.add(ask.token_ids, params, stream=self._streamed)] = stream
        return stream

    def step(self) -> StepStats:
        """One step of the engine, and what came of it.

        Raises:
            Exception: what a request ended with.
        """
        self.engine.advance()
        now, outputs = self.clock(), self.engine.outputs
        while outputs:
            output = outputs.popleft()
            if output.error is not None:
                raise output.error
            come = output.choice if output.choice is not None and not self._streamed else output.chunk
            stream, count = self.live[output.request_id], len(come.token_ids)
            if count:
                stream.arrivals.append((now, count))
                self.num_tokens += count
            if output.choice is not None:
                stream.done = True
                self.complete.append(self.live.pop(output.request_id))
        return self.engine.last_step

    def finish(self) -> None:
        """Step until everything is complete."""
        while self.live:
            self.step()

    def leave(self) -> None:
        """Abort what is not complete."""
        for request_id in list(self.live):
            self.engine.abort(request_id)
        while self.engine.has_work:
            self.engine.step()
        self.live.clear()


@dataclass(frozen=True, slots=True)
class Window:
    """What came while the number of outstanding requests was kept.

    Attributes:
        seconds: from the first request to the end.
        num_tokens: that came.
        streams: of all requests, complete or not.
    """

    seconds: float
    num_tokens: int
    streams: Sequence[Stream]

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


def closed_loop(clients: Clients, asks: Sequence[Ask], outstanding: int) -> Window:
    """As soon as an answer is complete the next request is sent, so that as many as `outstanding` are always open.

    The window closes with the first answer for which there is no next request; the others are aborted.

    asks: `outstanding` of them or more.
    """
    waiting = deque(asks)
    streams = [clients.send(waiting.popleft()) for _ in range(min(outstanding, len(waiting)))]
    started, tokens = streams[0].sent, clients.num_tokens
    while len(clients.live) == outstanding:
        clients.step()
        while waiting and len(clients.live) < outstanding:
            streams.append(clients.send(waiting.popleft()))
    window = Window(clients.clock() - started, clients.num_tokens - tokens, streams)
    clients.leave()
    return window


def quantile(values: Sequence[float], share: float) -> float:
    """NaN if there are none."""
    return float(np.quantile(values, share)) if len(values) else float("nan")
