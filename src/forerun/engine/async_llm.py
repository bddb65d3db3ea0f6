"""AsyncLLM, the asyncio counterpart of LLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence as Seq
from contextlib import aclosing
from pathlib import Path
from typing import Any

from forerun.config import AUTO, SamplingParams
from forerun.drafters import Drafter
from forerun.engine.chat_template import Prompt, split_prompts
from forerun.engine.engine_thread import EngineThread
from forerun.engine.llm import LLM, one_each
from forerun.engine.request_checks import checked
from forerun.engine.results import Generation, StepOutput, StreamChunk
from forerun.errors import BatchError, ConfigError
from forerun.models import LanguageModel


class AsyncLLM:
    """Generates text for any number of asyncio tasks at once; a thread computes their requests together.

        async with AsyncLLM("bundled", drafter="draft-model") as llm:
            answer = await llm.generate("def f(x):")
            async for chunk in llm.stream("class Stack:"):
                print(chunk.text, end="")

    A task that is cancelled, and an iterator that is closed, end their requests. An error of a request is raised
    in the task that waits for it, and in no other.

    Args:
        target: as LLM's; or an LLM, whose engine is shared: it may be used beside this, from any thread.
        drafter: as LLM's.
        options: as LLM's.

    Attributes:
        llm: the LLM.

    Raises:
        ConfigError, ModelLoadError, DrafterError: as LLM does; or an LLM comes with options, which it has already.
    """

    def __init__(
        self,
        target: str | Path | LanguageModel | LLM = "bundled",
        drafter: str | Path | Drafter | Seq[str | Path | Drafter] | None = AUTO,
        **options: Any,
    ) -> None:
        if not isinstance(target, LLM):
            self.llm = LLM(target, drafter, **options)
        elif drafter != AUTO or options:
            given = ", ".join((["drafter"] if drafter != AUTO else []) + sorted(options))
            raise ConfigError(f"An LLM was given together with {given}, which it has already. Give these to the LLM.")
        else:
            self.llm = target
        self._thread = EngineThread(self.llm.shared)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Any:
        """Answer one prompt or several, like `LLM.generate`.

        Returns:
            A Generation for a single prompt, else a list of them in the order of the prompts.

        Raises:
            PromptError, SamplingError, BatchError: as `LLM.generate`.
            EngineClosedError: this was closed before the answer was there.
        """
        split, single = split_prompts(prompts)
        every = one_each(params, len(split))
        ready = await asyncio.to_thread(lambda: [self._prepare(*each) for each in zip(split, every, strict=True)])
        if single:
            return await self._answer(*ready[0])
        answers = await asyncio.gather(*(self._answer(*each) for each in ready), return_exceptions=True)
        errors = {index: answer for index, answer in enumerate(answers) if isinstance(answer, Exception)}
        if errors:
            generations = [answer if isinstance(answer, Generation) else None for answer in answers]
            raise BatchError(generations, errors) from next(iter(errors.values()))
        return answers

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[StreamChunk, None]:
        """Answer one prompt, step by step. Closing the iterator ends the request.

        Raises:
            PromptError, SamplingError: with the first chunk.
            EngineClosedError: this was closed before the end.
        """
        ready = await asyncio.to_thread(self._prepare, prompt, params)
        async with aclosing(self._outputs(*ready, stream=True)) as outputs:
            async for output in outputs:
                yield output.chunk

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until all have ended, at most `timeout` seconds. Return whether all have."""
        return await asyncio.to_thread(self._thread.drain, timeout)

    async def close(self) -> None:
        """End the thread. Requests that are not finished end with EngineClosedError. The LLM stays as it is."""
        await asyncio.to_thread(self._thread.close)

    def _prepare(self, prompt: Prompt, params: SamplingParams | None) -> tuple[list[int], SamplingParams]:
        """Encode and check a request."""
        llm = self.llm
        token_ids = llm.encode(prompt)
        return token_ids, checked(token_ids, params, llm.target, llm.tokenizer, llm.drafter, llm.engine.grammars)

    async def _answer(self, token_ids: list[int], params: SamplingParams) -> Generation:
        async with aclosing(self._outputs(token_ids, params, stream=False)) as outputs:
            return Generation.of(token_ids, [output async for output in outputs])

    async def _outputs(
        self, token_ids: list[int], params: SamplingParams, stream: bool
    ) -> AsyncGenerator[StepOutput, None]:
        """Yield the outputs of one request until all of its choices have ended. Raises the error of the first that
        fails."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[StepOutput] = asyncio.Queue()

        def sink(output: StepOutput) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, output)

        request_id = self._thread.submit(token_ids, params, sink, stream=stream, quick=True)
        unfinished = params.n
        try:
            while unfinished:
                output = await arrived.get()
                if output.error is not None:
                    raise output.error
                unfinished -= output.choice is not None
                yield output
        finally:
            self._thread.abort(request_id)  # where it has not ended
