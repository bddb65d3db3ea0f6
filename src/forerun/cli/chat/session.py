"""The state of a chat: its history, the engine with its drafter, and how a message is answered."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun.cli.answers import CallTimes, StreamedChoice, follow, stderr_lines
from forerun.cli.chat.screen import Screen
from forerun.cli.options import LLMOptions
from forerun.config import NO_DRAFTER, SamplingParams
from forerun.errors import PromptError

if TYPE_CHECKING:
    from forerun.chat.response_format import ResponseFormat
    from forerun.engine import LLM, StreamChunk

Message = dict[str, str]
_PROMPT_END = 64
"""Tokens at the end of a prompt in which thinking may be opened."""


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
        first: index of the first turn that prompts still hold; the context has no room for those before it.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    first: int = 0

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
        end = len(self.turns)

        def prompt(dropped: int) -> FittedPrompt:
            messages = [*self.messages(dropped), {"role": "user", "content": text}]
            return FittedPrompt(messages, count(messages), dropped)

        fitted = prompt(self.first if self.first < end else 0)  # turns may have been taken back
        if fitted.size > limit and end:
            least = bisect_left(range(end), True, fitted.dropped + 1, key=lambda each: prompt(each).size <= limit)
            fitted = prompt(least)
        if fitted.size <= (context_length - 1 if fitted.dropped == end else limit):
            return fitted
        subject = "The message" if self.system is None else "The message with the system message"
        raise PromptError(
            f"{subject} makes a prompt of {fitted.size} tokens, but the context holds {context_length}, and at least "
            "one position is needed for the answer. Shorten it; the chat so far is kept."
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

    def figures(self, plain: float | None, max_tokens: int) -> str:
        """Return the line that follows it.

        plain: tokens a second of plain decoding, estimated; None where that is unknown or means nothing.
        """
        tokens = len(self.output.token_ids)
        parts = [counted(tokens, "token")]
        a_step = tokens / self.output.num_forwards if self.output.num_forwards else 0.0
        if (speed := self.times.decoding_speed(tokens)) is not None:
            parts.append(f"{speed:.1f} tokens/s")
            # A step costs no less than one of plain decoding: more than its tokens is the noise of a busy machine.
            parts += [f"about {min(speed / plain, a_step):.1f} times plain (estimated)"] if plain else []
        if a_step:
            parts.append(f"{a_step:.2f} tokens a step")
        if self.times.first is not None:
            parts.append(f"first token {self.times.first:.2f} s")
        if self.interrupted:
            parts.append("stopped by you")
        elif self.output.finish_reason == "length":
            parts.append(
                f"cut: /set max_tokens N allows more than {max_tokens}" if tokens >= max_tokens else "context full"
            )
        return stderr_lines(parts)


@dataclass
class Session:
    """A chat with one target.

    Attributes:
        llm: target and drafter.
        params: sampling parameters of the next answer.
        settings: options of `LLM` beside target and drafter.
        history: the messages so far.
        answers: by drafter, in the order of their first answer.
        template: what the chat template is given beside the messages.
        files: path as it was given -> text of the files that go with the next message.
        draft: what stands in the prompt for the next message.
        replaces: the next message replaces the last turn.
    """

    llm: LLM
    params: SamplingParams
    settings: LLMOptions
    history: History = field(default_factory=History)
    answers: dict[str, list[ChatAnswer]] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    draft: str = ""
    replaces: bool = False
    _prompt: Sequence[int] = ()  # that was counted last

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
        if prompt.dropped > self.history.first:
            note(
                f"the context holds {context} tokens: the oldest turns are dropped from here on "
                f"({prompt.dropped} of {len(self.history.turns)})"
            )
        if context - prompt.size < min(self.params.max_tokens, context // 2):
            note(f"the message leaves {context - prompt.size} tokens for the answer")
        outputs, times, interrupted = follow(self.llm, prompt.messages, self.params, show, self.template)
        answer = ChatAnswer(outputs[0], times, interrupted)
        if answer.kept:
            self.history.first = prompt.dropped
            self.history.turns.append(Turn(text, answer.output.text))
        self.answers.setdefault(self.drafter, []).append(answer)
        return answer

    def with_files(self, text: str) -> str:
        """Return a message after the files that go with it, each fenced and under its name."""
        parts = []
        for name, content in self.files.items():
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", content)), default=0))
            parts.append(f"{name}:\n{fence}\n{content.rstrip()}\n{fence}")
        return "\n\n".join([*parts, text])

    @cached_property
    def thinking(self) -> ResponseFormat | None:
        """Return how the model writes what it thinks; None if it does not, or that is unknown."""
        from forerun.chat.response_format import REASONING, find_format

        template = getattr(self.llm.tokenizer, "chat_template", None)
        form = find_format(template) if isinstance(template, str) else None
        return form if form is not None and any(each.kind == REASONING for each in form.regions) else None

    @property
    def plain_speed(self) -> float | None:
        """Return tokens a second of plain decoding here, by the measured costs of steps; None without a drafter, or if
        none was measured."""
        if self.llm.drafter is None:
            return None
        from forerun.models.base import identity
        from forerun.speculation.cost_model import KINDS, forward_costs

        costs = forward_costs(identity(self.llm.target)).costs
        table = costs.target(KINDS[not self.params.greedy], 1, len(self._prompt), 2)  # an answer is short beside it
        return None if table is None or len(table) < 2 or table[1] <= 0 else 1 / float(table[1])

    @property
    def drafter(self) -> str:
        """Return the drafter of the next answer, as text."""
        return self.llm.drafter_name or NO_DRAFTER

    @property
    def prompt_end(self) -> str:
        """Return the text of the last tokens of the prompt that was counted last, which may open thinking."""
        return str(self.llm.tokenizer.decode([*self._prompt[-_PROMPT_END:]], clean_up_tokenization_spaces=False))

    def count(self, messages: Any) -> int:
        """Return the number of tokens of the prompt that these messages make."""
        if self.template:
            from forerun.engine.chat_template import encode

            self._prompt = encode(messages, self.llm.tokenizer, self.llm.target.name, self.template)
        else:
            self._prompt = self.llm.encode(messages)
        return len(self._prompt)


def open_beside(llm: LLM, drafter: str, settings: LLMOptions) -> LLM:
    """Open an engine with another drafter over the same target, whose pool stays as `cache_memory` has bounded it.
    Raises DrafterError, ConfigError, ModelLoadError."""
    from forerun.engine import LLM

    return LLM(
        llm.target,
        drafter=drafter,
        tokenizer=llm.tokenizer,
        num_draft_tokens=settings.num_draft_tokens,
        prefix_reuse=settings.prefix_reuse,
        acceptance=settings.acceptance,
    )


def answer_message(session: Session, screen: Screen, text: str, *, again: bool = False) -> bool:
    """Answer one message, and print a line of figures. Returns whether Ctrl-C ended the answer.

    What cannot be answered, or was stopped before its first word, is the session's next draft: nothing is lost.

    Args:
        again: it is the last one, whose answer is replaced; `files` wait.
    """
    turns = session.history.turns
    replaces = again or session.replaces
    last = [turns.pop()] if replaces and turns else []
    session.replaces = False
    is_kept = False
    try:
        answer = session.answer(text if again else session.with_files(text), _shown(session, screen), screen.note)
        is_kept = answer.kept
    finally:
        if not is_kept:
            turns += last
            session.draft = text
            session.replaces = replaces
            screen.end_line()
    screen.end_answer()
    if not is_kept:
        screen.note("stopped before the first word: the message is not part of the chat")
        return True
    if not again:
        session.files.clear()
    screen.note(answer.figures(session.plain_speed, session.params.max_tokens))
    return answer.interrupted


def _shown(session: Session, screen: Screen) -> Callable[[StreamChunk], None]:
    """Return what prints the chunks of an answer: what is thought apart from what is said, where that is known."""
    form = session.thinking
    if form is None or not screen.is_terminal or screen.shows_drafts:
        return lambda chunk: screen.chunk(session.llm.tokenizer, chunk)
    from forerun.chat.response_format import REASONING
    from forerun.chat.response_parser import ResponseParser

    parser: ResponseParser | None = None

    def show(chunk: StreamChunk) -> None:
        nonlocal parser
        if parser is None:
            parser = ResponseParser(form, session.prompt_end, (), "")
        for delta in parser.push(chunk.text, last=chunk.finish_reason is not None):
            (screen.thinking_text if delta.kind == REASONING else screen.answer_text)(delta.text)

    return show


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
