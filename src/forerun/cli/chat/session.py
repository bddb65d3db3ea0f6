"""A chat as it stands: the engine, the options, what was said, and what it has cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forerun.cli.answers import Output, Times
from forerun.cli.chat.history import History, Turn
from forerun.cli.options import LLMOptions
from forerun.cli.streaming import follow
from forerun.config import NO_DRAFTER, SamplingParams

if TYPE_CHECKING:
    from forerun.engine import LLM, StreamChunk


@dataclass
class Totals:
    """What the answers with one drafter have cost.

    Attributes:
        num_drafted, num_accepted: draft tokens of the answers that were not interrupted; of the others, how many were
            drafted is not told.
    """

    num_answers: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0

    def add(self, output: Output, times: Times) -> None:
        """Count one answer."""
        self.num_answers += 1
        self.num_tokens += len(output.token_ids)
        self.num_forwards += output.num_forwards
        self.seconds += times.total
        if output.stats is not None:
            self.num_drafted += output.stats.num_draft_tokens
            self.num_accepted += output.stats.num_accepted_tokens


@dataclass
class Answer:
    """One answer.

    Attributes:
        output: its text and tokens, as far as they came.
        times: its wall-clock seconds.
        interrupted: Ctrl-C ended it.
        kept: it is part of the history; an answer that was interrupted before its first word is not, nor its message.
    """

    output: Output
    times: Times
    interrupted: bool
    kept: bool


@dataclass
class Session:
    """A chat with one target.

    Attributes:
        llm: target and drafter.
        params: of the next answer.
        settings: what LLM was told beside target and drafter.
        history: what was said.
        totals: by drafter, in the order of their first answer.
    """

    llm: LLM
    params: SamplingParams
    settings: LLMOptions
    history: History = field(default_factory=History)
    totals: dict[str, Totals] = field(default_factory=dict)

    def answer(self, text: str, show: Callable[[StreamChunk], None], note: Callable[[str], None]) -> Answer:
        """Put a message to the target and stream the answer.

        Args:
            show: is given each chunk.
            note: is told what people should know: what was dropped, and how little room is left.

        Raises:
            PromptError: the message cannot be put to the target; the chat is as before.
        """
        context = self.llm.target.context_length
        fitted = self.history.fitted(text, self._count, context, self.params.max_tokens)
        if fitted.dropped:
            note(
                f"the context holds {context} tokens: the oldest turns are dropped from here on "
                f"({fitted.dropped} of {len(self.history.turns)})"
            )
        if context - fitted.size < min(self.params.max_tokens, context // 2):
            note(f"the message leaves room for an answer of {context - fitted.size} tokens")
        outputs, times, interrupted = follow(self.llm, fitted.messages, self.params, show)
        output = outputs[0]
        del self.history.turns[: fitted.dropped]
        kept = bool(output.text) or not interrupted
        if kept:
            self.history.turns.append(Turn(text, output.text))
        self.totals.setdefault(self.drafter, Totals()).add(output, times)
        return Answer(output, times, interrupted, kept)

    def change_drafter(self, drafter: str) -> None:
        """Go on with another drafter over the same target.

        Raises:
            DrafterError, ConfigError, ModelLoadError: it cannot be used; the one before stays.
        """
        self.llm = open_beside(self.llm, drafter, self.settings)

    @property
    def drafter(self) -> str:
        """Of the next answer, as text."""
        return self.llm.drafter_name or NO_DRAFTER

    @property
    def prompt_size(self) -> int:
        """Tokens that the next prompt begins with; 0 where nothing was said."""
        return self._count(self.history.messages()) if self.history.turns else 0

    def _count(self, messages: Any) -> int:
        return len(self.llm.encode(messages))


def open_beside(llm: LLM, drafter: str, settings: LLMOptions) -> LLM:
    """An engine with another drafter over the same target. The seam that tests replace."""
    from forerun.engine import LLM

    return LLM(
        llm.target,
        drafter=drafter,
        tokenizer=llm.tokenizer,
        num_draft_tokens=settings.num_draft_tokens,
        prefix_reuse=settings.prefix_reuse,
        acceptance=settings.acceptance,
    )
