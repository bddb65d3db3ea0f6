"""The traffic of a journal served again in virtual time: the same requests at the same moments, other steps.

Sequences share steps as in the engine: a prompt is computed in chunks beside the answers under way, one prompt after
the other; the others go on by their mean tokens per step. Nothing is drawn, so a replay is the same every time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.bench.journal.prices import Work


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the traffic.

    Attributes:
        at: seconds at which it comes.
        prompt: rows of its prompt that must be computed.
        context: positions in its cache once that is done.
        tokens: of its answer.
        per_step: tokens that a step gives it, after the first.
        drafted: draft tokens that a step verifies for it.
        category: of it.
        share: of its steps that have draft tokens.
    """

    at: float
    prompt: int
    context: int
    tokens: int
    per_step: float
    drafted: float
    category: str = ""
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request.

    Attributes:
        first: seconds from its coming to its first token.
        seconds: to its end.
    """

    request: Request
    first: float
    seconds: float

    @property
    def per_token(self) -> float | None:
        """Seconds from one token to the next, after the first; None where there is but one."""
        return (self.seconds - self.first) / (self.request.tokens - 1) if self.request.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay.

    Attributes:
        served: in the order in which requests ended.
        busy: seconds of all steps.
        busy_by_batch: the same by sequences past their prompts.
    """

    served: Sequence[Served]
    busy: float
    busy_by_batch: dict[int, float]


@dataclass(slots=True)
class _Running:
    request: Request
    owed: float
    left: float = 0.0
    positions: float = 0.0
    first: float = 0.0

    @classmethod
    def of(cls, request: Request) -> _Running:
        return cls(request, float(request.prompt), positions=request.context - request.prompt)


def replay(
    requests: Sequence[Request],
    price: Callable[[Work], float],
    max_batch: int,
    chunk: Callable[[int], float],
    together: int = 64,
) -> Replayed:
    """Serve the requests.

    Args:
        price: seconds of a step.
        max_batch: sequences of a step.
        chunk: rows of a prompt in a step, by how many others are decoding.
        together: alike steps that have one price; positions grow meanwhile.
    """
    waiting = deque(sorted(requests, key=lambda each: each.at))
    running: list[_Running] = []
    served: list[Served] = []
    now = busy = 0.0
    by_batch: dict[int, float] = {}
    while waiting or running:
        if not running:
            now = max(now, waiting[0].at)
        while waiting and len(running) < max_batch and waiting[0].at <= now:
            running.append(_Running.of(waiting.popleft()))
        prompts = [each for each in running if each.owed > 0]
        decoding = [each for each in running if each.owed <= 0]
        chunks = math.ceil(prompts[0].owed / max(chunk(len(decoding)), 1.0)) if prompts else 0
        rows = prompts[0].owed / chunks if prompts else 0.0
        drafted, positions = sum(each.request.drafted for each in decoding), sum(each.positions for each in running)
        share = sum(each.request.share for each in decoding) / max(len(decoding), 1)
        seconds = price(Work(len(decoding), drafted, rows, positions, share=share))
        limits = [each.left / each.request.per_step for each in decoding]  # means: the last step may be a part of one
        limits += [float(chunks)] if prompts else []
        if waiting and len(running) < max_batch and seconds > 0:
            limits.append(max(math.ceil((waiting[0].at - now) / seconds), 1.0))
        count = min([*limits, float(together)])
        now += count * seconds
        busy += count * seconds
        by_batch[len(decoding)] = by_batch.get(len(decoding), 0.0) + count * seconds
        _advance(decoding, prompts[:1], count, rows, now)
        for each in [each for each in running if each.owed <= 0 and each.left <= 1e-9]:
            running.remove(each)
            served.append(Served(each.request, each.first, now - each.request.at))
    return Replayed(served, busy, by_batch)


def _advance(decoding: Sequence[_Running], prompts: Sequence[_Running], count: float, rows: float, now: float) -> None:
    """Take sequences so many steps further; a prompt whose last row is computed has its first token."""
    for each in decoding:
        each.left -= count * each.request.per_step
        each.positions += count * each.request.per_step
    for each in prompts:
        each.owed -= count * rows
        each.positions += count * rows
        if each.owed <= 1e-9:
            each.owed, each.left, each.first = 0.0, each.request.tokens - 1.0, now - each.request.at
