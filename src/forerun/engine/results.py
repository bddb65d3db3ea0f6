"""The results of requests: choices, generations, stream chunks, and what one step adds to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forerun.engine.stats import SequenceStats
from forerun.sampling import TokenLogprob
from forerun.types import FinishReason

_SHOWN = 60
"""Characters of a text in a repr."""


@dataclass(slots=True, repr=False)
class Choice:
    """One answer to one prompt.

    Attributes:
        index: among the request's `n`.
        text: the text that the answer adds to the decoded prompt, without the stop string or the token that ended
            it; empty if the model has no tokenizer. A character that the prompt begins belongs to it if the
            answer completes it.
        token_ids: the generated tokens, with the token that ended it.
        logprobs: one entry per token, of the model's own distribution before any option; None if not requested.
        finish_reason: "stop" (EOS, a stop token or a stop string), "length" or "abort".
        stats: its statistics.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    stats: SequenceStats

    def __repr__(self) -> str:
        """Show the beginning of the text, how many tokens it has and why it ended, in one line."""
        return f"Choice({_shown(self.text)}, {len(self.token_ids)} tokens, {self.finish_reason})"


@dataclass(slots=True, repr=False)
class Generation:
    """The answers to one prompt. `text`, `token_ids`, `logprobs`, `finish_reason` and `stats` are those of the first.

    vLLM returns a list even for one prompt: [0] is the Generation itself, and its length is 1.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        choices: `n` of them.
        prompt_logprobs: one entry per prompt token, the first None; or None if not requested.
        prompt: as it was given, if that was text.
    """

    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prompt: str | None = None

    @classmethod
    def of(cls, prompt_token_ids: list[int], outputs: Iterable[StepOutput], prompt: str | None = None) -> Generation:
        """Collect the choices of a request from its outputs, in whatever order they ended."""
        last = sorted((output for output in outputs if output.choice is not None), key=lambda each: each.chunk.index)
        choices = [output.choice for output in last if output.choice is not None]
        return cls(prompt_token_ids, choices, last[0].prompt_logprobs, prompt)

    def __repr__(self) -> str:
        """Show the prompt's beginning or its length, and the choices, in one line."""
        prompt = f"{len(self.prompt_token_ids)} tokens" if self.prompt is None else _shown(self.prompt)
        return f"Generation({prompt}, {', '.join(map(repr, self.choices))})"

    def __getitem__(self, index: int) -> Generation:
        return (self,)[index]

    def __len__(self) -> int:
        return 1

    @property
    def outputs(self) -> list[Choice]:
        """Return the choices, by vLLM's name."""
        return self.choices

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def stats(self) -> SequenceStats:
        return self.choices[0].stats


@dataclass(slots=True)
class StreamChunk:
    """The tokens and text that one step added to one choice.

    Attributes:
        text: may be empty while a character, or what may become a stop string, is incomplete.
        token_ids: tokens committed.
        num_accepted_draft: how many of them, the first ones, came from the draft.
        sources: the source of each of those, where a drafter has several or names its only one.
        index: of the choice.
        finish_reason: set in the choice's last chunk.
        stats: set in the choice's last chunk.
        logprobs: one entry per token, or None if not requested.
    """

    text: str
    token_ids: list[int]
    num_accepted_draft: int = 0
    sources: tuple[str, ...] = ()
    finish_reason: FinishReason | None = None
    index: int = 0
    stats: SequenceStats | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class StepOutput:
    """The result of one engine step for one sequence.

    Attributes:
        request_id: of the request it belongs to.
        chunk: what was added; token_ids is empty while the prompt is computed, or if the sequence was aborted.
        choice: the whole result, when the sequence is finished.
        prompt_logprobs: with the first choice's result, if requested.
        error: the exception that ended this sequence; other sequences continue.
    """

    request_id: int
    chunk: StreamChunk
    choice: Choice | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: Exception | None = None


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")
