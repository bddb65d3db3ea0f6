"""One request as it streams: what came is counted and shown chunk by chunk, and Ctrl-C ends it between two chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from forerun.cli.answers import Output, Times
from forerun.config import SamplingParams

if TYPE_CHECKING:
    from forerun.engine import LLM, StreamChunk


def follow(
    llm: LLM, prompt: Any, params: SamplingParams, show: Callable[[StreamChunk], None]
) -> tuple[dict[int, Output], Times, bool]:
    """Generate; returns the choices by index, the wall-clock seconds, and whether Ctrl-C ended it.

    What is counted has been shown, also where Ctrl-C came between the two: it waits for the end of the chunk.
    """
    from forerun.engine.interrupts import HeldInterrupts  # with torch, which --help does not load

    outputs: dict[int, Output] = {index: Output() for index in range(params.n)}
    interrupted = False
    times, start = Times(), time.perf_counter()
    try:
        stream: Any = llm.stream(prompt, params)
        with closing(stream):  # however it ends, the engine frees the sequence now
            for chunk in stream:
                with HeldInterrupts():
                    if times.first is None and chunk.token_ids:
                        times.first, times.num_first = time.perf_counter() - start, len(chunk.token_ids)
                    outputs[chunk.index].add(chunk)
                    show(chunk)
    except KeyboardInterrupt:
        interrupted = True
    times.total = time.perf_counter() - start
    return outputs, times, interrupted
