"""Computation of a batch's answers. Twice as many choices as one step computes are submitted at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from forerun.engine import LLM, EngineThread, Generation, StepOutput
from forerun.engine.sequence import Request
from forerun.errors import DeviceError, ForerunError, QueueFullError
from forerun.server.batch.lines import BatchLine, answer_line, answer_name, refusal_line
from forerun.server.protocol.answers import Asked, Chunks
from forerun.server.protocol.model_texts import ModelTexts
from forerun.server.protocol.requests import CompletionRequest, with_seed
from forerun.utils.files import digest

_SEED_DIGITS = 15
"""Hexadecimal digits of a seed that is derived from the batch's: below MAX_SEED."""


@dataclass(slots=True, eq=False)
class _ActiveLine:
    """A request of the batch that is being computed.

    Attributes:
        generations: of its finished prompts, by their index.
        num_left: unfinished prompts.
        num_cut: tokens that were cut off before the prompts.
        error: the first error.
        active: ids of its prompts in the engine.
    """

    batch_line: BatchLine
    request: CompletionRequest
    num_left: int
    num_cut: int = 0
    generations: dict[int, Generation] = field(default_factory=dict)
    error: Exception | None = None
    active: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Prompt:
    """One prompt of a request.

    Attributes:
        index: among the request's prompts.
        alone: the engine was empty when it was submitted.
        outputs: of its finished choices.
    """

    active_line: _ActiveLine
    index: int
    request: Request
    alone: bool = False
    outputs: list[StepOutput] = field(default_factory=list)

    @property
    def num_choices(self) -> int:
        return self.active_line.request.params.n


_NO_MORE = object()


class BatchRun:
    """Computes the answers of a batch.

    Args:
        thread: drives the LLM's engine.
        model: its name in answers.
        seed: requests without a seed get one derived from this and their custom_id; None: they get none.

    Attributes:
        num_tokens: tokens generated so far.
        num_cached_tokens: prompt tokens found in the cache so far.
    """

    def __init__(self, llm: LLM, thread: EngineThread, model: str, seed: int | None) -> None:
        self._llm = llm
        self._thread = thread
        self._model = model
        self._seed = seed
        self._texts = ModelTexts(llm.tokenizer)
        self._most = 2 * llm.engine.config.max_batch
        self._max_active = self._most  # choices that may be in the engine: fewer after it has refused some
        self._num_active = 0  # choices in the engine
        self._ended: SimpleQueue[tuple[_Prompt, StepOutput]] = SimpleQueue()
        self._next: deque[_Prompt] = deque()  # read, and not in the engine: the next, and those that it has refused
        self._done: deque[tuple[int, dict[str, Any]]] = deque()
        self.num_tokens = self.num_cached_tokens = 0

    def answers(self, requests: Iterable[BatchLine]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (index, answer) of each request, in the order of their completion.

        Raises:
            DeviceError: the device that computes it has failed.
        """
        pieces = self._pieces(requests)
        more = True
        while True:
            while self._next and self._fits(self._next[0]):
                self._submit(self._next.popleft())
            while self._done:
                yield self._done.popleft()
            if more and not self._next:
                prompt = next(pieces, _NO_MORE)
                if isinstance(prompt, _Prompt):
                    self._next.append(prompt)
                more = prompt is not _NO_MORE
            elif self._num_active:
                self._settle(*self._ended.get())
            elif not self._next:
                return

    def _fits(self, prompt: _Prompt) -> bool:
        return not self._num_active or self._num_active + prompt.num_choices <= self._max_active

    def _pieces(self, requests: Iterable[BatchLine]) -> Iterator[_Prompt | None]:
        """Yield the prompts of the requests; None after an invalid request, which is answered at once."""
        for batch_line in requests:
            try:
                if batch_line.error is not None:
                    raise batch_line.error
                assert batch_line.request is not None
                request = (
                    batch_line.request
                    if self._seed is None
                    else with_seed(batch_line.request, self._seed_of(batch_line))
                )
                prompts = request.requests(self._llm, self._texts)
            except DeviceError:  # nothing more can be computed, and what failed by it is no answer
                raise
            except ForerunError as error:
                self._done.append((batch_line.index, refusal_line(batch_line, error)))
                yield None
                continue
            num_cut = sum(prompt.num_cut for prompt in prompts)
            active_line = _ActiveLine(batch_line, request, len(prompts), num_cut)
            yield from (_Prompt(active_line, index, prompt) for index, prompt in enumerate(prompts))

    def _seed_of(self, batch_line: BatchLine) -> int:
        return int(digest(f"{self._seed} {batch_line.custom_id}".encode())[:_SEED_DIGITS], 16)

    def _submit(self, prompt: _Prompt) -> None:
        active_line = prompt.active_line
        if active_line.error is not None:
            self._leave(prompt)
            return
        prompt.outputs.clear()
        prompt.alone = not self._num_active
        self._thread.enter(prompt.request, lambda output: self._ended.put((prompt, output)))
        active_line.active.add(prompt.request.id)
        self._num_active += prompt.num_choices

    def _settle(self, prompt: _Prompt, output: StepOutput) -> None:
        """Handle a finished choice."""
        prompt.outputs.append(output)
        if len(prompt.outputs) < prompt.num_choices:
            return
        active_line = prompt.active_line
        self._num_active -= prompt.num_choices
        active_line.active.discard(prompt.request.id)
        error = next((each.error for each in prompt.outputs if each.error is not None), None)
        if isinstance(error, QueueFullError) and not prompt.alone:
            self._max_active = max(self._num_active, 1)
            self._next.appendleft(prompt)
            return
        if isinstance(error, DeviceError):
            raise error
        self._max_active = min(self._max_active + 1, self._most)
        if error is not None:
            self._fail(active_line, error)
        elif active_line.error is None:
            for each in prompt.outputs:
                prompt.request.check(each)
            self._count(prompt, Generation.of(prompt.request.prompt_token_ids, prompt.outputs))
        self._leave(prompt)

    def _count(self, prompt: _Prompt, answered: Generation) -> None:
        prompt.active_line.generations[prompt.index] = answered
        self.num_tokens += sum(len(choice.token_ids) for choice in answered.choices)
        self.num_cached_tokens += answered.stats.num_cached_tokens

    def _fail(self, active_line: _ActiveLine, error: Exception) -> None:
        """Record the failure of a request and abort its other prompts."""
        active_line.error = active_line.error or error
        for request_id in active_line.active:
            self._thread.abort(request_id)

    def _leave(self, prompt: _Prompt) -> None:
        active_line = prompt.active_line
        active_line.num_left -= 1
        if active_line.num_left:
            return
        if active_line.error is not None:
            made = refusal_line(active_line.batch_line, active_line.error)
        else:
            generations = [active_line.generations[place] for place in sorted(active_line.generations)]
            name = answer_name(active_line.batch_line)
            # it depends neither on the clock nor on other requests, so that the same batch has the same answers
            prompts = [generation.prompt_token_ids for generation in generations]
            asked = Asked(self._texts, active_line.request, prompts, self._model, name, 0, active_line.num_cut)
            made = answer_line(active_line.batch_line, 200, Chunks(asked).whole(generations, details=False))
        self._done.append((active_line.batch_line.index, made))
