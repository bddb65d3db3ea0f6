"""A language model that needs no weights: it says the words it is given, three tokens at a time when it has a draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from forerun.config import SamplingParams
from forerun.engine import Choice, Generation, SequenceStats, StreamChunk
from forerun.models.base import Exactness

WORDS = ["alpha ", "beta ", "gamma ", "delta ", "epsilon ", "zeta"]


class FakeTokenizer:
    """Token i is word i."""

    def encode(self, text: str) -> list[int]:
        return list(range(len(text.split())))

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(WORDS[token] for token in token_ids)


@dataclass
class FakeLLM:
    """Says WORDS. With a draft, every forward yields two draft tokens and one of the target's own.

    Attributes:
        drafts: whether it speculates.
        fail_after: raise `error` after this many chunks.
        requests: what it was asked: (prompt, params).
        closed: whether its last stream was closed.
    """

    drafts: bool = False
    drafter: object = None
    drafter_name: str | None = "suffix"
    exact: bool = True
    num_draft_tokens: int | str = "auto"
    fail_after: int | None = None
    error: BaseException = field(default_factory=KeyboardInterrupt)
    token_ids: list[int] = field(default_factory=lambda: list(range(len(WORDS))))
    requests: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    closed: bool = False
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    target: Any = field(
        default_factory=lambda: SimpleNamespace(
            quantize=None,
            dtype=torch.bfloat16,
            adapter=None,
            num_parameters=1,
            exactness=Exactness(True, tried="2 of 30 layers"),
            recommended_sampling={},
        )
    )

    @property
    def stats(self) -> SequenceStats:
        total = len(self.token_ids)
        if not self.drafts:
            return SequenceStats(num_tokens=total, num_forwards=total)
        return SequenceStats(
            total, total // 3, 4 * total // 3, 2 * total // 3, [2, 2, 2, 2], [2, 2, 0, 0], [2, 2, 0, 0]
        )

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[StreamChunk]:
        self.requests.append((prompt, params))
        self.closed = False
        size = 3 if self.drafts else 1
        try:
            for index in range(params.n):
                for number, start in enumerate(range(0, len(self.token_ids), size)):
                    if self.fail_after is not None and number >= self.fail_after:
                        raise self.error
                    tokens = self.token_ids[start : start + size]
                    last = start + size >= len(self.token_ids)
                    yield StreamChunk(
                        self.tokenizer.decode(tokens),
                        tokens,
                        num_accepted_draft=size - 1,
                        finish_reason="length" if last else None,
                        index=index,
                        stats=self.stats if last else None,
                    )
        finally:
            self.closed = True

    def encode(self, prompt: Any) -> list[int]:
        """A token for each word of each message."""
        return [0 for message in prompt for _ in message["content"].split()]

    def generate(self, prompt: Any, params: SamplingParams) -> Generation:
        self.requests.append((prompt, params))
        text = self.tokenizer.decode(self.token_ids)
        return Generation([0], [Choice(0, text, list(self.token_ids), None, "length", self.stats)])
