"""A worker of a batch: a model in an actor's process, and the requests of ranges of a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.batch.ranges import ByteRange, requests_in
from forerun.batch.run import BatchRun
from forerun.engine import LLM, EngineThread


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer, and what was computed since the one before it in its range."""

    index: int
    answer: dict[str, Any]
    num_tokens: int
    num_cached_tokens: int


class Worker:
    """Answers requests.

    Args:
        model, drafter, llm: of `LLM`.
        threads: of torch.
        name, seed: of `BatchRun`.
    """

    def __init__(
        self, model: str, drafter: str, llm: Mapping[str, Any], threads: int, name: str, seed: int | None
    ) -> None:
        self._of_model = (model, drafter, {**llm})
        self._threads, self._name, self._seed = threads, name, seed
        self._loaded: tuple[LLM, EngineThread] | None = None
        self._loading = threading.Lock()

    def load(self) -> None:
        """Load the model, once. Raises as `LLM`."""
        self._model()

    def _model(self) -> tuple[LLM, EngineThread]:
        with self._loading:
            if self._loaded is None:
                torch.set_num_threads(self._threads)
                model, drafter, settings = self._of_model
                llm = LLM(model, drafter=drafter, **settings)
                self._loaded = llm, EngineThread(llm.shared)
            return self._loaded

    def answers(self, path: str, part: ByteRange, done: frozenset[int]) -> Iterator[Answered]:
        """The answers to a range's requests but those that are done. Raises ConfigError as `requests_in`."""
        llm, thread = self._model()
        run = BatchRun(llm, thread, self._name, self._seed)
        asked = requests_in(Path(path), part, lambda index: index not in done, self._name, llm.target.context_length)
        num_tokens = num_cached = 0
        for index, answer in run.answers(asked):
            yield Answered(index, answer, run.num_tokens - num_tokens, run.num_cached_tokens - num_cached)
            num_tokens, num_cached = run.num_tokens, run.num_cached_tokens
