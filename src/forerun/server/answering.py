"""One request in the engine: its prompts submitted, their outputs in one order, all of it ended when nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence as Seq
from functools import partial

from forerun.config import SamplingParams
from forerun.engine import EngineThread, Generation, StepOutput
from forerun.engine.loop_inbox import LoopInbox
from forerun.engine.outputs import generation
from forerun.errors import RequestTimeoutError


class Answering:
    """The answer to some prompts, as it comes.

    Args:
        inbox: of the event loop.
        prompts: token ids of each.
        stream: outputs come as tokens do; else one per choice.
        timeout: seconds that all of it may take.

    Attributes:
        generations: of each prompt, complete when `outputs` has ended.
    """

    def __init__(
        self,
        thread: EngineThread,
        inbox: LoopInbox,
        prompts: Seq[list[int]],
        params: SamplingParams,
        *,
        stream: bool,
        timeout: float,
    ) -> None:
        self._thread, self._inbox = thread, inbox
        self._prompts, self._params, self._stream = prompts, params, stream
        self._timeout = timeout
        self._ids: list[int] = []
        self._ended: list[list[StepOutput]] = [[] for _ in prompts]
        self._arrived: asyncio.Queue[tuple[int, StepOutput] | None] = asyncio.Queue()

    @property
    def generations(self) -> list[Generation]:
        return [generation(prompt, outputs) for prompt, outputs in zip(self._prompts, self._ended, strict=True)]

    def submit(self) -> None:
        """Let the prompts be computed; all of them or none.

        Raises:
            PromptError, SamplingError: one of them cannot be served.
            EngineClosedError: no more requests are taken.
        """

        def sink(place: int, output: StepOutput) -> None:
            self._inbox.put(self._arrived.put_nowait, (place, output))

        try:
            for place, prompt in enumerate(self._prompts):
                made = partial(sink, place)
                self._ids.append(self._thread.submit(prompt, self._params, made, stream=self._stream, quick=True))
        except BaseException:
            self.close()
            raise

    async def outputs(self) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """(place of the prompt, output), until all choices have ended.

        Raises:
            RequestTimeoutError: they have not within the timeout.
            Exception: the error of the first that fails.
        """
        unfinished = len(self._prompts) * self._params.n
        end = asyncio.get_running_loop().call_later(self._timeout, self._arrived.put_nowait, None)
        try:
            while unfinished:
                arrived = await self._arrived.get()
                if arrived is None:
                    raise RequestTimeoutError(
                        f"The request was not finished within {self._timeout:g} seconds, which is all the time that "
                        "this server gives it. Ask for fewer tokens."
                    )
                place, output = arrived
                if output.error is not None:
                    raise output.error
                if output.choice is not None:
                    unfinished -= 1
                    self._ended[place].append(output)
                yield place, output
        finally:
            end.cancel()
            self.close()

    def close(self) -> None:
        """End what has not ended."""
        for request_id in self._ids:
            self._thread.abort(request_id)
        self._ids.clear()
