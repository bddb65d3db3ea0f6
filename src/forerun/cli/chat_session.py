"""A chat as it stands: the engine, the options, what was said, and what it has cost."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from forerun.cli.answers import CallTimes, Output, follow
from forerun.cli.options import LLMOptions
from forerun.config import NO_DRAFTER, SamplingParams
from forerun.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from forerun.engine import LLM, StreamChunk


# What has been said in a chat, and how much of it fits the target's context.

Message = dict[str, str]


class Turn(NamedTuple):
    """A user's message and what was answered, as far as it came."""

    user: str
    answer: str


class Fitted(NamedTuple):
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
        """The system message and the turns from the one of this number on, as chat templates read them."""
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[first:]:
            said.append({"role": "user", "content": turn.user})
            said.append({"role": "assistant", "content": turn.answer})
        return said

    def fitted(
        self, text: str, count: Callable[[Sequence[Message]], int], context_length: int, max_tokens: int
    ) -> Fitted:
        """The prompt for a new message, without the oldest turns where all of them would not fit.

        Places for an answer of max_tokens are kept free, or half of the context where that is less; a message that
        does not leave them even alone is taken as long as it leaves one. Nothing is changed here.

        Args:
            count: tokens of a prompt.

        Raises:
            PromptError: the message with the system message alone does not fit.
        """
        limit = context_length - min(max_tokens, context_length // 2)
        for dropped in range(len(self.turns) + 1):
            messages = [*self.messages(dropped), {"role": "user", "content": text}]
            size = count(messages)
            alone = dropped == len(self.turns)
            if size <= limit or (alone and size < context_length):
                return Fitted(messages, size, dropped)
        beside = "The message" if self.system is None else "The message with the system message"
        raise PromptError(
            f"{beside} makes a prompt of {size} tokens, but the context holds {context_length}, and at least one place "
            "is needed for the answer. Shorten it; what was said before is kept."
        )


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

    def add(self, output: Output, times: CallTimes) -> None:
        """Count one answer."""
        self.num_answers += 1
        self.num_tokens += len(output.token_ids)
        self.num_forwards += output.num_forwards
        self.seconds += times.total
        if output.stats is not None:
            self.num_drafted += output.stats.num_draft_tokens
            self.num_accepted += output.stats.num_accepted_tokens


@dataclass
class ChatAnswer:
    """One answer.

    Attributes:
        output: its text and tokens, as far as they came.
        times: its wall-clock seconds.
        interrupted: Ctrl-C ended it.
        kept: it is part of the history; an answer that was interrupted before its first word is not, nor its message.
    """

    output: Output
    times: CallTimes
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

    def answer(self, text: str, show: Callable[[StreamChunk], None], note: Callable[[str], None]) -> ChatAnswer:
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
        return ChatAnswer(output, times, interrupted, kept)

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


# What a chat prints: answers on standard output, everything else on standard error.

_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421, 0x0D: None}
_CONTROLS |= dict.fromkeys(range(128, 160), 65533)
"""Control characters as pictures of them: a text must not move the cursor or rename the window."""


class Screen:
    """Standard output and standard error, each a terminal or not.

    Attributes:
        shows_drafts: accepted draft tokens are marked.
    """

    def __init__(self) -> None:
        self.shows_drafts = False
        self._out_is_terminal = sys.stdout.isatty()
        self._err_is_terminal = sys.stderr.isatty()
        self._styled = os.environ.get("TERM") != "dumb"
        self._line_begun = False

    @property
    def width(self) -> int | None:
        """Columns of standard error; None where it is no terminal."""
        return shutil.get_terminal_size().columns if self._err_is_terminal else None

    def show_drafts(self, wanted: bool) -> None:
        """Mark accepted draft tokens from now on, or no longer.

        Raises:
            ConfigError: standard output cannot show it.
        """
        if wanted and not (self._out_is_terminal and self._styled):
            raise ConfigError("Accepted draft tokens are marked on a terminal alone, and standard output is none.")
        self.shows_drafts = wanted

    def chunk(self, tokenizer: Any, chunk: StreamChunk) -> None:
        """What one step has added to the answer."""
        if not chunk.text:
            return
        self._line_begun = not chunk.text.endswith("\n")
        if self.shows_drafts:
            from forerun.cli.stage import split_accepted  # with rich

            drafted, added = split_accepted(tokenizer, chunk)
            colour = None if os.environ.get("NO_COLOR") else "green"
            drafted = typer.style(visible(drafted), fg=colour, underline=True) if drafted else ""
            text = drafted + visible(added)
        else:
            text = visible(chunk.text) if self._out_is_terminal else chunk.text
        sys.stdout.write(text)
        sys.stdout.flush()

    def end_answer(self) -> None:
        """End the line that the answer has begun; where standard output is no terminal, every answer ends one."""
        self._line_begun = self._line_begun or not self._out_is_terminal
        self.end_line()

    def end_line(self) -> None:
        """End the line that has been begun on standard output, if any."""
        if self._line_begun:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._line_begun = False

    def note(self, text: str) -> None:
        """A line for people, after the answer's last one."""
        self.end_line()
        dim = self._err_is_terminal and self._styled
        typer.echo(typer.style(visible(text), dim=True) if dim else text, err=True)


def visible(text: str) -> str:
    """The text with pictures for its control characters, except the ends of lines and tabs."""
    return text.translate(_CONTROLS)
