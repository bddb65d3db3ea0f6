"""The same requests without HTTP: through the engine's thread in this process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from forerun.bench.serve.answers import Answered
from forerun.bench.serve.asks import Ask
from forerun.engine import LLM, EngineThread
from forerun.engine.results import StepOutput
from forerun.openai_format.requests import parse_body


class Inside:
    """An engine in this process, asked by the bodies that servers get. Used as a context."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._thread = EngineThread(llm.shared)

    def __enter__(self) -> Inside:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    async def send(self, ask: Ask, **more: Any) -> Answered:
        """Through the engine's thread, streamed. more: fields of the body."""
        answered, loop = Answered(ask, time.perf_counter()), asyncio.get_running_loop()
        ended: asyncio.Future[StepOutput] = loop.create_future()

        def sink(output: StepOutput) -> None:  # between two steps, in the engine's thread
            if output.chunk.text:
                answered.arrivals.append(time.perf_counter())
            if output.choice is not None or output.error is not None:
                answered.ended = time.perf_counter()
                loop.call_soon_threadsafe(ended.set_result, output)

        asked = parse_body(ask.path, {**ask.body, "stream": True, **more}, self._llm.target.context_length)
        (token_ids,) = asked.encode(self._llm.tokenizer, self._llm.target.name)
        self._thread.submit(token_ids, asked.params, sink, stream=True, quick=True)
        output = await ended
        if output.error is not None or output.choice is None:
            answered.error = str(output.error)
            return answered
        choice = output.choice
        answered.text, answered.num_tokens, answered.is_counted = choice.text, len(choice.token_ids), True
        answered.prompt_tokens, answered.num_forwards = len(token_ids), choice.stats.num_forwards
        answered.num_drafted = choice.stats.num_draft_tokens
        answered.num_accepted = choice.stats.num_accepted_tokens
        return answered
