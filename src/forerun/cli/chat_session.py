"""The state of a chat and its output: history, the engine with its drafter, and the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from forerun.cli.answers import CallTimes, StreamedChoice, follow
from forerun.cli.options import LLMOptions
from forerun.config import NO_DRAFTER, SamplingParams
from forerun.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from forerun.engine import LLM, StreamChunk

Message = dict[str, str]


class Turn(NamedTuple):
    """A user's message and the answer to it; partial if the answer was interrupted."""

    user: str
    answer: str


class FittedPrompt(NamedTuple):
    """The prompt of the next answer.

    Attributes:
        messages: the system message, the turns that are kept, and the new message.
        size: tokens of the prompt.
        dropped: turns, the oldest, that are left out.
    """

    messages: list[Message]
    size: int
    dropped: int


@dataclass
class History:
    """The turns of a chat after its system message.

    Attributes:
        system: the system message; None without one. It is never dropped.
        turns: the oldest first.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, first: int = 0) -> list[Message]:
        """Return the system message and the turns from index `first` on, in the form that chat templates read."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[first:]:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]
        return messages

    def fit(
        self, text: str, count: Callable[[Sequence[Message]], int], context_length: int, max_tokens: int
    ) -> FittedPrompt:
        """Build the prompt for a new message, without the oldest turns if all of them would not fit.

        `max_tokens` positions are kept free for the answer, or half of the context if that is less. A message that
        does not leave them even alone is accepted as long as it leaves one. The history is not changed.

        Args:
            count: returns the number of tokens of a prompt.

        Raises:
            PromptError: the message with the system message alone does not fit.
        """
        limit = context_length - min(max_tokens, context_length // 2)
        for dropped in range(len(self.turns) + 1):
            messages = [*self.messages(dropped), {"role": "user", "content": text}]
            size = count(messages)
            if size <= (context_length - 1 if dropped == len(self.turns) else limit):
                return FittedPrompt(messages, size, dropped)
        subject = "The message" if self.system is None else "The message with the system message"
        raise PromptError(
            f"{subject} makes a prompt of {size} tokens, but the context holds {context_length}, and at least one "
            "position is needed for the answer. Shorten it; the chat so far is kept."
        )


class ChatAnswer(NamedTuple):
    """One answer.

    Attributes:
        output: its text and tokens, partial if it was interrupted.
        times: its wall-clock seconds.
        interrupted: Ctrl-C ended it.
    """

    output: StreamedChoice
    times: CallTimes
    interrupted: bool

    @property
    def kept(self) -> bool:
        """Return whether it is part of the history: not if it was interrupted before its first word."""
        return bool(self.output.text) or not self.interrupted


@dataclass
class Session:
    """A chat with one target.

    Attributes:
        llm: target and drafter.
        params: sampling parameters of the next answer.
        settings: options of `LLM` beside target and drafter.
        history: the messages so far.
        answers: by drafter, in the order of their first answer.
    """

    llm: LLM
    params: SamplingParams
    settings: LLMOptions
    history: History = field(default_factory=History)
    answers: dict[str, list[ChatAnswer]] = field(default_factory=dict)

    def answer(self, text: str, show: Callable[[StreamChunk], None], note: Callable[[str], None]) -> ChatAnswer:
        """Send a message to the target and stream the answer.

        Args:
            show: called with each chunk.
            note: called with notes for people: turns that were dropped, and the space left for the answer.

        Raises:
            PromptError: the message cannot be sent to the target; the chat is unchanged.
        """
        context = self.llm.target.context_length
        prompt = self.history.fit(text, self.count, context, self.params.max_tokens)
        if prompt.dropped:
            note(
                f"the context holds {context} tokens: the oldest turns are dropped from here on "
                f"({prompt.dropped} of {len(self.history.turns)})"
            )
        if context - prompt.size < min(self.params.max_tokens, context // 2):
            note(f"the message leaves {context - prompt.size} tokens for the answer")
        outputs, times, interrupted = follow(self.llm, prompt.messages, self.params, show)
        answer = ChatAnswer(outputs[0], times, interrupted)
        del self.history.turns[: prompt.dropped]
        if answer.kept:
            self.history.turns.append(Turn(text, answer.output.text))
        self.answers.setdefault(self.drafter, []).append(answer)
        return answer

    @property
    def drafter(self) -> str:
        """Return the drafter of the next answer, as text."""
        return self.llm.drafter_name or NO_DRAFTER

    def count(self, messages: Any) -> int:
        """Return the number of tokens of the prompt that these messages make."""
        return len(self.llm.encode(messages))


def open_beside(llm: LLM, drafter: str, settings: LLMOptions) -> LLM:
    """Open an engine with another drafter over the same target. Raises DrafterError, ConfigError, ModelLoadError."""
    from forerun.engine import LLM

    return LLM(
        llm.target,
        drafter=drafter,
        tokenizer=llm.tokenizer,
        num_draft_tokens=settings.num_draft_tokens,
        prefix_reuse=settings.prefix_reuse,
        acceptance=settings.acceptance,
    )


_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421, 0x0D: None}
_CONTROLS |= dict.fromkeys(range(128, 160), 65533)
"""Control characters as pictures of them: a text must not move the cursor or rename the window."""


class Screen:
    """Answers on standard output and notes on standard error, each a terminal or not.

    Attributes:
        shows_drafts: accepted draft tokens are marked.
    """

    def __init__(self) -> None:
        self.shows_drafts = False
        self._out_is_terminal = sys.stdout.isatty()
        self._err_is_terminal = sys.stderr.isatty()
        self._styled = os.environ.get("TERM") != "dumb"
        self._line_open = False

    def show_drafts(self, enabled: bool) -> None:
        """Mark accepted draft tokens from now on, or no longer. Raises ConfigError if standard output cannot."""
        if enabled and not (self._out_is_terminal and self._styled):
            raise ConfigError("Accepted draft tokens are marked on a terminal alone, and standard output is none.")
        self.shows_drafts = enabled

    def chunk(self, tokenizer: Any, chunk: StreamChunk) -> None:
        """Print the text that one step has added to the answer."""
        if not chunk.text:
            return
        self._line_open = not chunk.text.endswith("\n")
        text = visible(chunk.text) if self._out_is_terminal else chunk.text
        if self.shows_drafts:
            from forerun.engine.text import split_accepted

            drafted, added = map(visible, split_accepted(tokenizer, chunk))
            colour = None if os.environ.get("NO_COLOR") else "green"
            text = (typer.style(drafted, fg=colour, underline=True) if drafted else "") + added
        print(text, end="", flush=True)

    def end_answer(self) -> None:
        """End the line of the answer; if standard output is no terminal, every answer is followed by an empty line."""
        if not self._out_is_terminal:
            print("\n", flush=True)
            self._line_open = False
        self.end_line()

    def end_line(self) -> None:
        """End the line that is open on standard output, if any."""
        if self._line_open:
            print(flush=True)
        self._line_open = False

    def note(self, text: str) -> None:
        """Print a line on standard error, below the answer."""
        self.end_line()
        dim = self._err_is_terminal and self._styled
        typer.echo(typer.style(visible(text), dim=True) if dim else text, err=True)


def visible(text: str) -> str:
    """Return the text with pictures for its control characters, except line breaks and tabs."""
    return text.translate(_CONTROLS)
