"""The same requests without HTTP: through the engine's thread in this process, and by `LLM.generate`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from forerun.bench.serve.answers import Answered
from forerun.bench.serve.asks import Ask
from forerun.config import SamplingParams
from forerun.engine import LLM, EngineThread
from forerun.engine.results import Choice, StepOutput
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

        token_ids, params = self._read(ask, more)
        self._thread.submit(token_ids, params, sink, stream=True, quick=True)
        output = await ended
        if output.error is not None or output.choice is None:
            answered.error = str(output.error)
            return answered
        return _with(answered, token_ids, output.choice)

    async def generate(self, ask: Ask, **more: Any) -> Answered:
        """By `LLM.generate`, which nothing else may run beside. more: fields of the body."""
        answered = Answered(ask, time.perf_counter())
        token_ids, params = self._read(ask, more)
        generation: Any = self._llm.generate(token_ids, params)
        answered.ended = time.perf_counter()
        choice: Choice = generation.choices[0]
        answered.arrivals = [answered.sent + choice.stats.time_first_token, answered.ended]
        return _with(answered, token_ids, choice)

    def _read(self, ask: Ask, more: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        asked = parse_body(ask.path, {**ask.body, "stream": True, **more}, self._llm.target.context_length)
        (token_ids,) = asked.encode(self._llm.tokenizer, self._llm.target.name)
        return token_ids, asked.params


def _with(answered: Answered, token_ids: list[int], choice: Choice) -> Answered:
    answered.text, answered.num_tokens, answered.is_counted = choice.text, len(choice.token_ids), True
    answered.prompt_tokens = len(token_ids)
    answered.num_drafted = choice.stats.num_draft_tokens
    answered.num_accepted = choice.stats.num_accepted_tokens
    answered.num_forwards = choice.stats.num_forwards
    return answered
