"""One choice of one request while it is in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.config import SamplingParams
from forerun.engine.results import Choice
from forerun.engine.stats import SequenceStats
from forerun.engine.text import TextStream
from forerun.sampling import TokenLogprob
from forerun.types import Cache, FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what is asked for it.

    Attributes:
        id: unique within the engine.
        prompt_token_ids: at least one.
        params: options.
        stream: text is wanted as it arrives.
        stop_ids: token ids that end the output: the model's EOS, unless ignored, and the request's own.
        prediction: the client's guess of the output, in the target's tokens; None without one.
    """

    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool
    stop_ids: frozenset[int]
    prediction: list[int] | None = None


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence with everything the engine holds for it.

    Attributes:
        request: what it belongs to.
        sequence: its tokens; the drafter knows it by this object.
        argmax_suffices: greedy, and no option alters the argmax of the raw logits.
        text: incremental text; None where nobody needs it before the end.
        cache: the target's cache; None before the first step and after the last.
        logprobs, prompt_logprobs: filled as tokens come; None where not asked for.
        entered: whether the drafter has been told of the sequence.
        time_started: perf_counter at the first step.
    """

    request: Request
    sequence: Sequence
    argmax_suffices: bool
    text: TextStream | None = None
    cache: Cache | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    entered: bool = False
    time_started: float = 0.0

    def cut(self, new_ids: list[int]) -> tuple[int, FinishReason | None]:
        """How many of the tokens that a step would append are kept, and why the sequence ends there, if it does.

        Text of the kept tokens has been pushed afterwards.
        """
        sequence, params = self.sequence, self.request.params
        keep = len(new_ids)
        reason: FinishReason | None = None
        exempt = params.min_tokens - sequence.num_output
        stop_ids = self.request.stop_ids
        for i, token_id in enumerate(new_ids):
            if token_id in stop_ids and i >= exempt:
                keep, reason = i + 1, "stop"
                break
        room = sequence.max_length - len(sequence.token_ids)
        if keep > room or (keep == room and reason is None):
            keep, reason = room, "length"
        if self.text is not None:
            # a token that ends the output by its id is no part of the text
            shown = new_ids[: keep - 1] if reason == "stop" else new_ids[:keep]
            stopped = self.text.push(shown, min(max(exempt - 1, 0), len(shown)))
            if stopped is not None:
                return stopped, "stop"
            if reason is not None:
                self.text.finish()
        return keep, reason

    def choice(self, text: str) -> Choice:
        """The finished result."""
        sequence = self.sequence
        return Choice(
            index=sequence.choice,
            text=text,
            token_ids=sequence.output_ids,
            logprobs=self.logprobs,
            finish_reason=sequence.finish_reason,
            stats=self.stats,
        )
