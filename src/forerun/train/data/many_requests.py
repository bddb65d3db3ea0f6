"""Many requests through one engine: as many at a time as it computes together, and as many again in its queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from forerun.config import SamplingParams
from forerun.engine import LLM, Choice
from forerun.errors import PromptError, SamplingError

K = TypeVar("K")


def compute(
    llm: LLM, waiting: deque[K], request: Callable[[K], tuple[list[int], SamplingParams]]
) -> Iterator[tuple[K, Choice | PromptError | SamplingError]]:
    """Each request's answer as soon as it is there, or why it cannot be served.

    Args:
        waiting: what is asked, taken from the front. More may be appended while answers are taken.
        request: the prompt's token ids and the options of one of them, n being 1; it may raise PromptError.

    Raises:
        ForerunError: a step failed. What was unfinished is forgotten.
    """
    engine, inside = llm.engine, dict[int, K]()
    most = 2 * engine.config.max_batch
    try:
        while waiting or inside:
            while waiting and len(inside) < most:
                key = waiting.popleft()
                try:
                    inside[engine.add(*request(key))] = key
                except (PromptError, SamplingError) as error:
                    yield key, error
            for output in engine.step() if inside else ():
                if output.error is not None:
                    raise output.error
                if output.choice is not None:
                    yield inside.pop(output.request_id), output.choice
    finally:
        for request_id in inside:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
