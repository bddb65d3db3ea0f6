"""The answers to a batch's requests. In the engine are as many at a time as it computes together, and as many again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from forerun.engine import LLM, EngineThread, Generation, StepOutput
from forerun.errors import DeviceError, ForerunError, QueueFullError
from forerun.server.batch.lines import BatchLine, answer, answer_name, refusal
from forerun.server.protocol.requests import CompletionRequest, with_seed
from forerun.server.protocol.responses import Responses
from forerun.utils.files import digest

_SEED_DIGITS = 15
"""Hexadecimal digits of a seed that is made from the batch's: below MAX_SEED."""


@dataclass(slots=True, eq=False)
class _ActiveLine:
    """A request of the batch, under way.

    Attributes:
        generations: of its prompts that are answered, by their place.
        num_left: prompts that are not.
        error: the first that came.
        inside: ids of its prompts in the engine.
    """

    asked: BatchLine
    request: CompletionRequest
    num_left: int
    generations: dict[int, Generation] = field(default_factory=dict)
    error: Exception | None = None
    inside: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Piece:
    """One prompt of a request: what the engine computes.

    Attributes:
        place: among the request's prompts.
        id: in the engine thread; -1 outside.
        alone: nothing else was in the engine when it entered.
        outputs: of its choices that have ended.
    """

    line: _ActiveLine
    place: int
    prompt: list[int]
    id: int = -1
    alone: bool = False
    outputs: list[StepOutput] = field(default_factory=list)

    @property
    def num_choices(self) -> int:
        return self.line.request.params.n


_NO_MORE = object()


class BatchRun:
    """Computes answers.

    Args:
        thread: drives the LLM's engine.
        model: the name of the model in answers.
        seed: requests without a seed get one made from this and their custom_id; None: they get none.

    Attributes:
        num_tokens: generated so far.
        num_cached_tokens: of the prompts so far, tokens that were in memory already.
    """

    def __init__(self, llm: LLM, thread: EngineThread, model: str, seed: int | None) -> None:
        self._llm, self._thread, self._model, self._seed = llm, thread, model, seed
        self._responses = Responses(llm.tokenizer)
        self._most = 2 * llm.engine.config.max_batch
        self._room = self._most  # choices that may be in the engine: fewer while it refuses them
        self._inside = 0  # choices that are
        self._ended: SimpleQueue[tuple[_Piece, StepOutput]] = SimpleQueue()
        self._next: deque[_Piece] = deque()  # read, and not in the engine: the next, and those that found no room
        self._done: deque[tuple[int, dict[str, Any]]] = deque()
        self.num_tokens = self.num_cached_tokens = 0

    def answers(self, requests: Iterable[BatchLine]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index, answer) of each request, in the order in which they are done.

        Raises:
            DeviceError: the device that computes it has failed.
        """
        pieces, more = self._pieces(requests), True
        while True:
            while self._next and self._has_room(self._next[0]):
                self._submit(self._next.popleft())
            yield from self._taken()
            if more and not self._next:
                piece = next(pieces, _NO_MORE)
                if isinstance(piece, _Piece):
                    self._next.append(piece)
                more = piece is not _NO_MORE
            elif self._inside:
                self._settle(*self._ended.get())
            elif not self._next:
                return

    def _taken(self) -> Iterator[tuple[int, dict[str, Any]]]:
        while self._done:
            yield self._done.popleft()

    def _has_room(self, piece: _Piece) -> bool:
        return not self._inside or self._inside + piece.num_choices <= self._room

    def _pieces(self, requests: Iterable[BatchLine]) -> Iterator[_Piece | None]:
        """The prompts of the requests; None after a request that cannot be served, which is answered at once."""
        for asked in requests:
            try:
                if asked.error is not None:
                    raise asked.error
                assert asked.request is not None
                request = asked.request if self._seed is None else with_seed(asked.request, self._seed_of(asked))
                prompts = request.encode(self._llm.tokenizer, self._llm.target.name)
            except ForerunError as error:
                self._done.append((asked.index, refusal(asked, error)))
                yield None
                continue
            line = _ActiveLine(asked, request, len(prompts))
            yield from (_Piece(line, place, prompt) for place, prompt in enumerate(prompts))

    def _seed_of(self, asked: BatchLine) -> int:
        return int(digest(f"{self._seed} {asked.custom_id}".encode())[:_SEED_DIGITS], 16)

    def _submit(self, piece: _Piece) -> None:
        line = piece.line
        if line.error is not None:
            self._leave(piece)
            return
        piece.outputs.clear()
        piece.alone = not self._inside
        try:
            piece.id = self._thread.submit(piece.prompt, line.request.params, partial(self._arrived, piece))
        except DeviceError:  # nothing more can be computed, and what failed by it is no answer
            raise
        except ForerunError as error:
            self._fail(line, error)
            self._leave(piece)
            return
        line.inside.add(piece.id)
        self._inside += piece.num_choices

    def _arrived(self, piece: _Piece, output: StepOutput) -> None:
        """The sink of a piece, in another thread."""
        self._ended.put((piece, output))

    def _settle(self, piece: _Piece, output: StepOutput) -> None:
        """A choice has ended."""
        piece.outputs.append(output)
        if len(piece.outputs) < piece.num_choices:
            return
        line = piece.line
        self._inside -= piece.num_choices
        line.inside.discard(piece.id)
        error = next((each.error for each in piece.outputs if each.error is not None), None)
        if isinstance(error, QueueFullError) and not piece.alone:
            self._room = max(self._inside, 1)
            self._next.appendleft(piece)
            return
        if isinstance(error, DeviceError):
            raise error
        self._room = min(self._room + 1, self._most)
        if error is not None:
            self._fail(line, error)
        elif line.error is None:
            self._count(piece, Generation.of(piece.prompt, piece.outputs))
        self._leave(piece)

    def _count(self, piece: _Piece, answered: Generation) -> None:
        piece.line.generations[piece.place] = answered
        self.num_tokens += sum(len(choice.token_ids) for choice in answered.choices)
        self.num_cached_tokens += answered.stats.num_cached_tokens

    def _fail(self, line: _ActiveLine, error: Exception) -> None:
        """The request has failed: what else of it is in the engine need not be computed."""
        line.error = line.error or error
        for request_id in line.inside:
            self._thread.abort(request_id)

    def _leave(self, piece: _Piece) -> None:
        line = piece.line
        line.num_left -= 1
        if line.num_left:
            return
        if line.error is not None:
            made = refusal(line.asked, line.error)
        else:
            generations = [line.generations[place] for place in sorted(line.generations)]
            name = answer_name(line.asked)
            # nothing in it depends on the clock or on other requests, so that the same batch has the same answers
            body = self._responses.body(
                line.request, generations, model=self._model, name=name, created=0, details=False
            )
            made = answer(line.asked, 200, body)
        self._done.append((line.asked.index, made))
