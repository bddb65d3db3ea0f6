"""AsyncLLM, the asyncio counterpart of LLM."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence as Seq
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Self

from forerun.config import AUTO
from forerun.drafters import Drafter
from forerun.engine.chat_template import Message, Prompt, one_prompt, split_chats, split_prompts, template_of
from forerun.engine.engine_thread import EngineThread, LoopWaker
from forerun.engine.llm import LLM
from forerun.engine.request_checks import Params, naming_prompt, sampling_of
from forerun.engine.results import Choice, Generation, SequenceStats, StepOutput, StreamChunk
from forerun.engine.sequence import Request
from forerun.errors import BatchError, ConfigError, RequestTimeoutError
from forerun.models import LanguageModel
from forerun.utils.children import in_thread
from forerun.utils.habits import Hinted


class Answer(Coroutine[Any, Any, Any]):
    """A coroutine of the whole answer, which `async for` turns into the answer as it grows."""

    def __init__(self, whole: Coroutine[Any, Any, Any], growing: AsyncGenerator[Generation, None]) -> None:
        self._whole = whole
        self._growing = growing

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._whole.__await__()

    def __aiter__(self) -> AsyncGenerator[Generation, None]:
        self._whole.close()  # it is not awaited any more
        return self._growing

    def send(self, value: Any) -> Any:
        """Run it, as tasks do."""
        return self._whole.send(value)

    def throw(self, *error: Any) -> Any:
        """Run it, as tasks do that are cancelled."""
        return self._whole.throw(*error)

    def close(self) -> None:
        """End it."""
        self._whole.close()


class AsyncLLM(Hinted):
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
        thread: computes the requests, and owns their queue.

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
        self.thread = EngineThread(self.llm.shared)
        self._waker: LoopWaker | None = None

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> Self:
        """Make an AsyncLLM, as Transformers' programs say it."""
        return cls(model, **options)

    def __repr__(self) -> str:
        """Show the LLM, in one line."""
        return f"Async{self.llm!r}"

    async def reset_prefix_cache(self) -> bool:
        """Forget what is kept for requests that begin alike, like `LLM.reset_prefix_cache`."""
        return self.llm.reset_prefix_cache()

    async def get_tokenizer(self) -> Any:
        """Return the Transformers tokenizer; None if the model has none."""
        return self.llm.get_tokenizer()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt] = (),
        sampling_params: Params | Seq[Params] | None = None,
        request_id: str | None = None,  # vLLM's programs give one; a request is ended by cancelling its task
        *,
        use_tqdm: Any = None,  # no bar is shown: tasks that wait share the terminal
        **sampling: Any,
    ) -> Answer:
        """Answer one prompt or several, like `LLM.generate`.

        Returns:
            What is awaited for a Generation for a single prompt, else a list of them in the order of the prompts. Or
            `async for`, for a single prompt, gives at each step the Generation so far, as vLLM's does.

        Raises:
            PromptError, SamplingError, BatchError: as `LLM.generate`.
            EngineClosedError: this was closed before the answer was there.
        """
        return Answer(
            self._whole(prompts, sampling_params, sampling), self._growing(prompts, sampling_params, sampling)
        )

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
        params = sampling_of(sampling_params, sampling)
        prompts = [one_prompt(prompt)]
        (request,) = await asyncio.to_thread(self.llm.requests, prompts, params, template, stream=True)
        async with aclosing(self.outputs([request])) as outputs:
            async for _, output in outputs:
                yield output.chunk

    async def outputs(
        self, requests: Seq[Request], timeout: float | None = None
    ) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """Compute requests of `LLM.requests` together, and yield (index of the request, output) until all of their
        choices have ended. Closing the iterator aborts what has not ended.

        Raises:
            RequestTimeoutError: they have not ended after `timeout` seconds.
            EngineClosedError: this was closed before the end.
            Exception: the error of the first choice that fails.
        """
        loop = asyncio.get_running_loop()
        if self._waker is None or self._waker.loop is not loop:
            self._waker = LoopWaker(loop)
        arrived: deque[tuple[int, StepOutput] | None] = deque()  # None: the time is over
        ready = asyncio.Event()
        wake = self._waker.wake

        def sink(index: int, output: StepOutput) -> None:
            arrived.append((index, output))
            wake(ready)

        def expire() -> None:
            arrived.append(None)
            ready.set()

        unfinished = sum(request.params.n for request in requests)
        end = None if timeout is None else loop.call_later(timeout, expire)
        try:
            for index, request in enumerate(requests):
                self.thread.enter(request, partial(sink, index))
            while unfinished:
                while not arrived:
                    ready.clear()
                    await ready.wait()
                if (found := arrived.popleft()) is None:
                    raise RequestTimeoutError(
                        f"The request was not finished within {timeout:g} seconds, its limit. Ask for fewer tokens."
                    )
                index, output = found
                if output.error is not None:
                    with naming_prompt(index, len(requests)):
                        raise output.error
                unfinished -= output.choice is not None
                if output.choice is not None and requests[index].unheld.schema:
                    await in_thread(partial(requests[index].check, output))
                yield index, output
        finally:
            if end is not None:
                end.cancel()
            for request in requests:
                self.thread.abort(request.id)  # where it has not ended

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until all have ended, at most `timeout` seconds. Return whether all have."""
        return await asyncio.to_thread(self.thread.drain, timeout)

    async def close(self) -> None:
        """End the thread. Requests that are not finished end with EngineClosedError. The LLM stays as it is."""
        await asyncio.to_thread(self.thread.close)

    async def _whole(
        self, prompts: Prompt | Seq[Prompt], given: Params | Seq[Params] | None, sampling: Mapping[str, Any]
    ) -> Any:
        """Answer as `generate` does when it is awaited."""
        params = sampling_of(given, sampling)
        split, single = split_prompts(prompts)
        return await self._answers(await asyncio.to_thread(self.llm.requests, split, params), single)

    async def _growing(
        self, prompt: Any, given: Params | Seq[Params] | None, sampling: Mapping[str, Any]
    ) -> AsyncGenerator[Generation, None]:
        """Answer one prompt as `generate` does when it is iterated."""
        params = sampling_of(given, sampling)
        (request,) = await asyncio.to_thread(self.llm.requests, [one_prompt(prompt)], params, stream=True)
        choices = [Choice(index, "", [], None, None, SequenceStats()) for index in range(request.params.n)]
        prompt_logprobs = None
        async with aclosing(self.outputs([request])) as outputs:
            async for _, output in outputs:
                chunk = output.chunk
                choices[chunk.index] = output.choice or choices[chunk.index].grown(chunk)
                prompt_logprobs = output.prompt_logprobs or prompt_logprobs
                if chunk.token_ids or output.choice is not None:
                    yield Generation(request.prompt_token_ids, [*choices], prompt_logprobs, request.prompt)

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
        async with aclosing(self.outputs([request])) as outputs:
            return Generation.of(request.prompt_token_ids, [output async for _, output in outputs], request.prompt)
