"""AsyncLLM, the asyncio counterpart of LLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence as Seq
from contextlib import aclosing
from pathlib import Path
from typing import Any

from forerun.config import AUTO
from forerun.drafters import Drafter
from forerun.engine.chat_template import Message, Prompt, one_prompt, split_chats, split_prompts, template_of
from forerun.engine.engine_thread import EngineThread
from forerun.engine.llm import LLM
from forerun.engine.request_checks import Params, sampling_of
from forerun.engine.results import Generation, StepOutput, StreamChunk
from forerun.engine.sequence import Request
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
        model: as LLM's; or an LLM, whose engine is shared: it may be used beside this, from any thread.
        drafter: as LLM's.
        options: as LLM's.

    Attributes:
        llm: the LLM.

    Raises:
        ConfigError, ModelLoadError, DrafterError: as LLM does; or an LLM comes with options, which it has already.
    """

    def __init__(
        self,
        model: str | Path | LanguageModel | LLM = "bundled",
        drafter: str | Path | Drafter | Seq[str | Path | Drafter] | None = AUTO,
        **options: Any,
    ) -> None:
        if not isinstance(model, LLM):
            self.llm = LLM(model, drafter, **options)
        elif drafter != AUTO or options:
            given = ", ".join((["drafter"] if drafter != AUTO else []) + sorted(options))
            raise ConfigError(f"An LLM was given together with {given}, which it has already. Give these to the LLM.")
        else:
            self.llm = model
        self._thread = EngineThread(self.llm.shared)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def get_tokenizer(self) -> Any:
        """Return the tokenizer; None if the model has none."""
        return self.llm.tokenizer

    async def generate(
        self,
        prompts: Prompt | Seq[Prompt] = (),
        sampling_params: Params | Seq[Params] | None = None,
        *,
        use_tqdm: Any = None,  # no bar is shown: tasks that wait share the terminal
        **sampling: Any,
    ) -> Any:
        """Answer one prompt or several, like `LLM.generate`.

        Returns:
            A Generation for a single prompt, else a list of them in the order of the prompts.

        Raises:
            PromptError, SamplingError, BatchError: as `LLM.generate`.
            EngineClosedError: this was closed before the answer was there.
        """
        params = sampling_of(sampling_params, sampling)
        split, single = split_prompts(prompts)
        return await self._answers(await asyncio.to_thread(self.llm.requests, split, params), single)

    async def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: Params | Seq[Params] | None = None,
        *,
        use_tqdm: Any = None,  # as of `generate`
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Answer a chat or several, like `LLM.chat`. Returns and raises as `generate`."""
        template, sampling = template_of(chat_template_kwargs, options)
        params = sampling_of(sampling_params, sampling)
        split, single = split_chats(messages)
        return await self._answers(await asyncio.to_thread(self.llm.requests, split, params, template), single)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Answer one prompt, step by step, like `LLM.stream`. Closing the iterator ends the request.

        Raises:
            PromptError, SamplingError: with the first chunk.
            EngineClosedError: this was closed before the end.
        """
        template, sampling = template_of(chat_template_kwargs, options)
        params, prompts = sampling_of(sampling_params, sampling), [one_prompt(prompt)]
        (request,) = await asyncio.to_thread(self.llm.requests, prompts, params, template, stream=True)
        async with aclosing(self._outputs(request)) as outputs:
            async for output in outputs:
                yield output.chunk

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until all have ended, at most `timeout` seconds. Return whether all have."""
        return await asyncio.to_thread(self._thread.drain, timeout)

    async def close(self) -> None:
        """End the thread. Requests that are not finished end with EngineClosedError. The LLM stays as it is."""
        await asyncio.to_thread(self._thread.close)

    async def _answers(self, requests: Seq[Request], single: bool) -> Any:
        """Compute requests together. Returns and raises as `generate`."""
        if single:
            return await self._answer(requests[0])
        answers = await asyncio.gather(*map(self._answer, requests), return_exceptions=True)
        errors = {index: answer for index, answer in enumerate(answers) if isinstance(answer, Exception)}
        if errors:
            generations = [answer if isinstance(answer, Generation) else None for answer in answers]
            raise BatchError(generations, errors) from next(iter(errors.values()))
        return answers

    async def _answer(self, request: Request) -> Generation:
        async with aclosing(self._outputs(request)) as outputs:
            return Generation.of(request.prompt_token_ids, [output async for output in outputs], request.prompt)

    async def _outputs(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """Yield the outputs of one request until all of its choices have ended. Raises the error of the first that
        fails."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[StepOutput] = asyncio.Queue()

        def sink(output: StepOutput) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, output)

        self._thread.enter(request, sink, quick=True)
        unfinished = request.params.n
        try:
            while unfinished:
                output = await arrived.get()
                if output.error is not None:
                    raise output.error
                unfinished -= output.choice is not None
                yield output
        finally:
            self._thread.abort(request.id)  # where it has not ended
