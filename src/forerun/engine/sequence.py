"""One choice of one request while it is in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

from forerun.config import NO_DRAFTER, SamplingParams
from forerun.engine.results import StreamChunk
from forerun.engine.stats import SequenceStats
from forerun.engine.text import TextStream, TokenTexts
from forerun.sampling import TokenLogprob, takes_argmax
from forerun.types import Cache, Constraint, FinishReason, Sequence, TokenIds


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """A prompt and what is asked for it.

    Attributes:
        id: unique within the engine.
        prompt_token_ids: at least one.
        params: options.
        stream: text is wanted as it arrives.
        stop_ids: token ids that end the output: the model's EOS, unless ignored, and the request's own.
    """

    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool
    stop_ids: frozenset[int]


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    """A sequence with everything the engine holds for it.

    Attributes:
        request: what it belongs to.
        sequence: its tokens; the drafter knows it by this object.
        argmax_suffices: greedy, and no option but the grammar alters the argmax of the raw logits.
        given: the sequence's attributes that are the engine's alone, as they must stay.
        text: incremental text; None where nobody needs it before the end.
        cache: the target's cache; None before the first step and after the last.
        logprobs, prompt_logprobs: filled as tokens come; None where not asked for.
        entered: whether the drafter has been told of the sequence.
        time_started: perf_counter at the first step.
        changing: the step under way changes what cannot be taken back.
        pending: what the step under way has committed, until it is among the engine's outputs.
        leader: another choice of the request, which computes the prompt for this one too; None without one.
        prompt_is_shared: its prompt, computed, has been handed to others.
        error: what ends the sequence.
        has_left: its result or error is among the engine's outputs, or was.
        most_drafted: nodes that its request lets a draft have; None: any number.
    """

    request: Request
    sequence: Sequence
    argmax_suffices: bool
    given: tuple[Any, ...]
    text: TextStream | None = None
    cache: Cache | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    entered: bool = False
    time_started: float = 0.0
    changing: bool = False
    pending: StreamChunk | None = None
    leader: SequenceState | None = None
    prompt_is_shared: bool = False
    error: Exception | None = None
    has_left: bool = False
    most_drafted: int | None = None

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that the target has not computed yet."""
        return len(self.sequence.token_ids) - (0 if self.cache is None else self.cache.length)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are missing."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.sequence.num_prompt

    def pages_wanted(self, num_rows: int) -> int:
        """Pages that its cache must take to hold so many rows more."""
        assert self.cache is not None
        return self.cache.pages_wanted(self.cache.length + num_rows)

    def is_untouched(self) -> bool:
        """Whether the sequence's attributes are the engine's; from now on they are."""
        sequence, given = self.sequence, self.given
        if all(map(is_, _attributes(sequence), given)):
            return True
        for name, value in zip(_READ_ONLY, given, strict=True):
            setattr(sequence, name, value)
        return False

    def cut(self, new_ids: list[int]) -> tuple[int, FinishReason | None]:
        """How many of the tokens that a step would append are kept, and why the sequence ends there, if it does.

        Text of the kept tokens has been pushed afterwards.
        """
        sequence, params = self.sequence, self.request.params
        keep = len(new_ids)
        if keep == 1 and self.text is None:  # plain decoding of many sequences
            if new_ids[0] in self.request.stop_ids and sequence.num_output >= params.min_tokens:
                return 1, "stop"
            return 1, "length" if len(sequence.token_ids) + 1 >= sequence.max_length else None
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


def new_state(
    request: Request,
    choice: int,
    number: int,
    context_length: int,
    texts: TokenTexts | None,
    constraint: Constraint | None = None,
) -> SequenceState:
    """One choice of a request, before its first step.

    Args:
        number: the sequence's id.
        context_length: of the target.
        constraint: this choice's alone.
    """
    params, prompt = request.params, request.prompt_token_ids
    max_length = min(len(prompt) + params.max_tokens, context_length)
    sequence = Sequence(number, TokenIds(prompt), len(prompt), params, choice, max_length)
    if params.prediction is not None:
        assert not isinstance(params.prediction, str)  # it has been encoded
        sequence.prediction = TokenIds(params.prediction)
    sequence.constraint = constraint
    state = SequenceState(request, sequence, takes_argmax(params), _attributes(sequence))
    state.most_drafted = 0 if params.drafter == NO_DRAFTER else params.num_draft_tokens
    if texts is not None and (request.stream or params.stop):
        state.text = TextStream(texts, prompt, params.stop)
    if params.logprobs is not None:
        state.logprobs = []
    if params.prompt_logprobs is not None and choice == 0:
        state.prompt_logprobs = [None]
    return state


_READ_ONLY = ("token_ids", "id", "num_prompt", "params", "choice", "max_length", "prediction", "constraint")
_attributes = attrgetter(*_READ_ONLY)
