"""The results of requests: choices, generations, stream chunks and their statistics, and what one step adds to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

from forerun.sampling import TokenLogprob
from forerun.types import FinishReason
from forerun.utils.habits import Hinted


@dataclass(slots=True)
class SourceStats:
    """The statistics of one of several sources of drafts.

    Attributes:
        num_draft_tokens: its tokens that the target verified.
        num_accepted_tokens: those of them that were committed.
    """

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class SequenceStats:
    """The statistics of one choice. Times are wall-clock seconds of the steps it took part in, shared with its batch.

    Attributes:
        num_tokens: tokens generated.
        num_forwards: target forwards that gave tokens; a forward over an earlier prompt chunk is not one of them.
        num_draft_tokens: draft tokens that the target verified.
        num_accepted_tokens: those of them that were committed.
        drafted_per_position: [depth] how many draft tokens stood at each depth.
        reached_per_position: [depth] how many drafts had a node at this depth below what was accepted before it: those
            that could be accepted there.
        accepted_per_position: [depth] how many of those were committed; divided by `reached_per_position`, this is the
            acceptance conditional on reaching the position.
        sources: name -> figures of each source, where a drafter has several or names its only one.
        num_plain_forwards: of the forwards, those with K = 0, for which the drafter was not called.
        num_asked_tokens: K summed over the other forwards.
        decisions: forwards by decision and reason: "on: gain", "off: no gain" and so on (`DraftPlan.reason`).
        num_cached_tokens: tokens of the prompt that were in memory already or on disk, and not computed.
        num_read_tokens: of those, which came from the disk.
        num_preemptions: how often it was preempted, and computed again.
        num_experts: that its steps read (`StepStats.num_experts`), whichever sequence wanted them.
        time_draft: in the drafter, drafting and learning what became of the draft.
        time_target: in the target's forwards, those over prompt chunks included.
        time_verify: processing logits, verifying, finding log-probabilities.
        time_first_token: from the start of the first step to the first token.
        time_total: from the start of the first step to the end of the last.
        warnings: what of its grammar was not held while it was generated, and whether the finished answer keeps to it;
            how many extra files were left out.
    """

    num_tokens: int = 0
    num_forwards: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    reached_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    sources: dict[str, SourceStats] = field(default_factory=dict)
    num_plain_forwards: int = 0
    num_asked_tokens: int = 0
    decisions: dict[str, int] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_read_tokens: int = 0
    num_preemptions: int = 0
    num_experts: int = 0
    time_draft: float = 0.0
    time_target: float = 0.0
    time_verify: float = 0.0
    time_first_token: float = 0.0
    time_total: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """Return the tokens per target forward, bonus included; 1 for plain decoding."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Return accepted over drafted tokens; 0 where none were drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Return the generated tokens over the whole time, prompt included."""
        return self.num_tokens / self.time_total if self.time_total else 0.0

    @property
    def mean_num_draft_tokens(self) -> float:
        """Return the mean K of the steps that drafted; 0 if none did."""
        num_drafting = self.num_forwards - self.num_plain_forwards
        return self.num_asked_tokens / num_drafting if num_drafting else 0.0

    @property
    def speculation(self) -> str:
        """Return whether speculation was on, and why, in most forwards."""
        return max(self.decisions, key=self.decisions.__getitem__, default="off: prompts")

    def count_draft(self, depths: list[int], accepted: int, reached: int) -> None:
        """Count one verified draft.

        Args:
            depths: of each node; that of the first is 0.
            accepted: tokens of it that were committed.
            reached: the depths at which it had a node below what was accepted before.
        """
        self.num_draft_tokens += len(depths)
        self.num_accepted_tokens += accepted
        missing = (max(depths) + 1 if depths else 0) - len(self.drafted_per_position)
        for counts in (self.drafted_per_position, self.reached_per_position, self.accepted_per_position):
            counts.extend([0] * missing)
        for depth in depths:
            self.drafted_per_position[depth] += 1
        for depth in range(reached):
            self.reached_per_position[depth] += 1
        for depth in range(accepted):
            self.accepted_per_position[depth] += 1

    def count_sources(self, sources: Sequence[str], accepted: Sequence[int]) -> None:
        """Count the sources of one verified draft's nodes."""
        for name in sources:
            self.sources.setdefault(name, SourceStats()).num_draft_tokens += 1
        for node in accepted:
            self.sources[sources[node]].num_accepted_tokens += 1

    def add_times(self, step: StepStats) -> None:
        """Add the times of a step that the sequence took part in, and what it read."""
        self.num_experts += step.num_experts
        self.time_draft += step.time_draft
        self.time_target += step.time_target
        self.time_verify += step.time_verify


@dataclass(slots=True)
class StepStats:
    """The statistics of one step. Times in seconds.

    Attributes:
        num_sequences: sequences in the forward.
        num_rows: rows of the target's forward.
        num_prompt_rows: of these, rows of prompts.
        num_draft_tokens: of these, draft tokens.
        num_accepted_tokens: draft tokens committed.
        num_tokens: tokens committed.
        num_positions: in the caches of its sequences before it, summed.
        num_experts: that its forward read, in all layers, where the native kernels compute a mixture.
        time_draft, time_target, time_verify: as in SequenceStats.
        time_total: the whole step; what exceeds the sum of the three is the engine's own.
        reason: why so much was drafted, or nothing (`DraftPlan.reason`); empty where the policy was not consulted.
    """

    num_sequences: int = 0
    num_rows: int = 0
    num_prompt_rows: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_tokens: int = 0
    num_positions: int = 0
    num_experts: int = 0
    time_draft: float = 0.0
    time_target: float = 0.0
    time_verify: float = 0.0
    time_total: float = 0.0
    reason: str = ""

    def add(self, other: StepStats) -> None:
        """Add another part of the same step, of other sequences."""
        for each in fields(self):
            if each.name != "reason":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.reason = self.reason or other.reason


_SHOWN = 60
"""Characters of a text in a repr."""


@dataclass(slots=True, repr=False)
class Choice(Hinted):
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
        stop_reason: the request's stop string or stop token that ended it; None for the model's EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    stats: SequenceStats
    stop_reason: int | str | None = None

    def grown(self, chunk: StreamChunk) -> Choice:
        """Return the choice with what a step added to it."""
        logprobs = None if chunk.logprobs is None else [*(self.logprobs or []), *chunk.logprobs]
        return replace(
            self, text=self.text + chunk.text, token_ids=[*self.token_ids, *chunk.token_ids], logprobs=logprobs
        )

    def __repr__(self) -> str:
        """Show the beginning of the text, how many tokens it has and why it ended, in one line."""
        return f"Choice({_shown(self.text)}, {len(self.token_ids)} tokens, {self.finish_reason})"


@dataclass(slots=True, repr=False)
class Generation(Hinted):
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
    def finished(self) -> bool:
        """Return whether all choices have ended, as all have but those that `async for` sees grow."""
        return all(choice.finish_reason for choice in self.choices)

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

    @property
    def warnings(self) -> list[str]:
        """Return what of the grammar was not held, and whether the finished answers keep to it."""
        return list(dict.fromkeys(each for choice in self.choices for each in choice.stats.warnings))


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
        stop_reason: that of the choice, in its last chunk.
    """

    text: str
    token_ids: list[int]
    num_accepted_draft: int = 0
    sources: tuple[str, ...] = ()
    finish_reason: FinishReason | None = None
    index: int = 0
    stats: SequenceStats | None = None
    logprobs: list[TokenLogprob] | None = None
    stop_reason: int | str | None = None


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
