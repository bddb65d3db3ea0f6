"""The state of one choice of a request while it is in the engine, and its part of one step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from operator import attrgetter, is_
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from forerun.config import NO_DRAFTER, SamplingParams
from forerun.engine.results import Choice, SequenceStats, StepOutput, StepStats, StreamChunk
from forerun.engine.text import NO_STOPS, Detokenizer, StopStrings, TextStream, TokenTexts
from forerun.models import Rows
from forerun.sampling import LogitsRow, TokenLogprob, takes_argmax, token_logprobs
from forerun.sampling.json_schemas import ALL_HELD, Unheld
from forerun.speculation import DraftOutcome, Reason
from forerun.types import Cache, Constraint, Draft, FinishReason, Needs, Sequence, Step, TokenIds, Verdict
from forerun.utils.tree import ROOT

_READ_ONLY = ("token_ids", "id", "num_prompt", "params", "choice", "max_length", "prediction", "constraint")
_attributes = attrgetter(*_READ_ONLY)


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """A request's prompt and options.

    Attributes:
        id: unique within the engine.
        prompt_token_ids: at least one.
        params: options.
        stream: outputs carry text as it arrives.
        stop_ids: token ids that end the output: the model's EOS, unless ignored, and the request's own.
        stops: strings that end it.
        flow: the scheduler is fair to flows: a tenant, or the requests of one body.
        scope: priorities are compared within a scope: a tenant, or None where they count among all.
        prompt: as text, where it was given as text.
        marks: id -> text of the special tokens that are part of the answer's text.
        unheld: what of its grammar is not held while an answer is generated.
        stop_reasons: of `stop_ids`, the request's own -> what an answer that they end reports.
        num_cut: tokens that were cut off before the prompt.
        num_left_out: extra files that were left out of it.
    """

    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool
    stop_ids: frozenset[int]
    stops: StopStrings = NO_STOPS
    flow: Hashable = None
    scope: Hashable = None
    prompt: str | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    unheld: Unheld = ALL_HELD
    stop_reasons: Mapping[int, int | str] = field(default_factory=dict)
    num_cut: int = 0
    num_left_out: int = 0

    def check(self, output: StepOutput) -> None:
        """Check a finished answer by what is not held otherwise, and have its warnings say what comes of it.

        It may take seconds, and is not for the engine's thread.
        """
        choice = output.choice
        if choice is not None and self.unheld.schema:
            is_whole = choice.finish_reason == "stop"
            choice.stats.warnings.append(self.unheld.verdict(choice.text, is_whole=is_whole))


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    """A sequence with all state that the engine holds for it.

    Attributes:
        request: the request it belongs to.
        sequence: its tokens; the drafter identifies it by this object.
        argmax_suffices: greedy, and no option but the grammar alters the argmax of the raw logits.
        given: the sequence's attributes that are the engine's alone, as they must stay.
        text: incremental text; None where it is not needed before the end.
        cache: the target's cache; None before the first step and after the last.
        logprobs, prompt_logprobs: filled as tokens come; None where not requested.
        entered: `Drafter.start` was called for the sequence.
        time_started: perf_counter at the first step.
        changing: the step under way changes what cannot be taken back.
        pending: what the step under way has committed, until it is among the engine's outputs.
        leader: another choice of the request, which computes the prompt for this one too; None without one.
        prompt_is_shared: its prompt, computed, has been published.
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
        """Return the number of committed tokens that the target has not computed yet."""
        return len(self.sequence.token_ids) - (0 if self.cache is None else self.cache.length)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether log-probabilities of the prompt are missing."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.sequence.num_prompt

    def pages_wanted(self, num_rows: int) -> int:
        """Return the number of pages that its cache must take to hold `num_rows` more rows."""
        assert self.cache is not None
        return self.cache.pages_wanted(self.cache.length + num_rows)

    def is_untouched(self) -> bool:
        """Return whether the sequence's attributes are the engine's, and restore them if not."""
        sequence = self.sequence
        given = self.given
        if all(map(is_, _attributes(sequence), given)):
            return True
        for name, value in zip(_READ_ONLY, given, strict=True):
            setattr(sequence, name, value)
        return False

    def cut(self, new_ids: list[int]) -> tuple[int, FinishReason | None]:
        """Return how many of the step's tokens are kept, and why the sequence ends there, if it does.

        Text of the kept tokens has been pushed afterwards.
        """
        sequence = self.sequence
        params = self.request.params
        keep = len(new_ids)
        if keep == 1 and self.text is None:  # plain decoding of many sequences
            if new_ids[0] in self.request.stop_ids and sequence.num_output >= params.min_tokens:
                return 1, "stop"
            return 1, "length" if len(sequence.token_ids) + 1 >= sequence.max_length else None
        reason: FinishReason | None = None
        exempt = params.min_tokens - sequence.num_output
        stop_ids = self.request.stop_ids
        end = next((i for i, token_id in enumerate(new_ids, 1) if i > exempt and token_id in stop_ids), None)
        if end is not None:
            keep = end
            reason = "stop"
        left = sequence.max_length - len(sequence.token_ids)
        if keep > left or (keep == left and reason is None):
            keep = left
            reason = "length"
        if self.text is not None:
            # a token that ends the output by its id is no part of the text
            without_end = reason == "stop" and not params.include_stop_str_in_output
            shown = new_ids[: keep - 1] if without_end else new_ids[:keep]
            stopped = self.text.push(shown, min(max(exempt - 1, 0), len(shown)))
            if stopped is not None:
                return stopped, "stop"
            if reason is not None:
                self.text.finish()
        return keep, reason

    def result(self, texts: TokenTexts | None) -> StepOutput:
        """Make the last output of a sequence that has ended. Raises what decoding raises.

        texts: decodes the output where it was not decoded as it came; None without a tokenizer.
        """
        sequence = self.sequence
        stats = self.stats
        chunk = self.pending or StreamChunk("", [], index=sequence.choice)
        chunk.finish_reason = sequence.finish_reason
        chunk.stats = stats
        if self.time_started:
            stats.time_total = perf_counter() - self.time_started
        output = sequence.output_ids
        text = ""
        if self.text is not None:
            if sequence.finish_reason == "abort":
                self.text.finish()
            text = self.text.text
            if self.request.stream:
                chunk.text = self.text.take()
        elif texts is not None:
            detokenizer = Detokenizer(texts, self.request.prompt_token_ids, self.request.marks)
            without_end = sequence.finish_reason == "stop" and not self.request.params.include_stop_str_in_output
            text = detokenizer.push(output[:-1] if without_end else output) + detokenizer.flush()
        choice = Choice(sequence.choice, text, output, self.logprobs, sequence.finish_reason, stats)
        if sequence.finish_reason == "stop":
            by_text = "" if self.text is None else self.text.stopped_by
            choice.stop_reason = chunk.stop_reason = by_text or self.request.stop_reasons.get(output[-1])
        return StepOutput(self.request.id, chunk, choice, self.prompt_logprobs if sequence.choice == 0 else None)

    def failure(self, error: Exception) -> StepOutput:
        """Make the last output of a sequence that an error has ended."""
        chunk = StreamChunk("", [], finish_reason="abort", index=self.sequence.choice, stats=self.stats)
        return StepOutput(self.request.id, chunk, error=error)


def new_state(
    request: Request,
    choice: int,
    number: int,
    context_length: int,
    texts: TokenTexts | None,
    constraint: Constraint | None = None,
) -> SequenceState:
    """Make the state of one choice of a request, before its first step.

    Args:
        number: the sequence's id.
        context_length: of the target.
        constraint: this choice's alone.
    """
    params = request.params
    prompt = request.prompt_token_ids
    max_length = min(len(prompt) + params.max_tokens, context_length)
    sequence = Sequence(number, TokenIds(prompt), len(prompt), params, choice, max_length)
    if params.prediction is not None:
        assert not isinstance(params.prediction, str)  # it has been encoded
        sequence.prediction = TokenIds(params.prediction)
    sequence.constraint = constraint
    state = SequenceState(request, sequence, takes_argmax(params), _attributes(sequence))
    state.most_drafted = 0 if params.drafter == NO_DRAFTER else params.num_draft_tokens
    if texts is not None and (request.stream or params.stop):
        keeps_stop = params.include_stop_str_in_output
        state.text = TextStream(texts, prompt, request.stops, request.marks, keeps_stop=keeps_stop)
    state.stats.warnings += request.unheld.warnings
    if left_out := request.num_left_out:
        state.stats.warnings.append(f"The context has no room for the oldest {left_out} of the extra files: left out.")
    if params.logprobs is not None:
        state.logprobs = []
    if params.prompt_logprobs is not None and choice == 0:
        state.prompt_logprobs = [None]
    return state


@dataclass(slots=True, eq=False, repr=False)
class SequenceStep:
    """One sequence's part of a step, from its rows in the target's forward to the verdict.

    Attributes:
        state: whose it is.
        num_scheduled_tokens: committed tokens that the target computes now, beginning at its cache's length.
        draft: the nodes after them; None while the prompt is not computed to its end.
        num_extra: rows of logits needed before the one that follows the last committed token, for prompt
            log-probabilities.
        logits: [num_extra + 1 + nodes, V] this sequence's rows; only where log-probabilities are requested.
        verdict: None if the draft is.
        top_tokens: [rows, k] of the same rows, where the drafter needs them.
        hidden_outputs: [rows, layers, H] of this sequence's last rows, likewise: of all of them if it needs all
        states.
        num_draft_tokens: nodes that the draft might have had; None where the policy was not consulted.
        reason: why this number; None for the rest of a prompt before drafts.
        bad_rows: of the rows that the verifier saw, those whose logits are NaN or infinite.
        dead_rows: of the same rows, those whose grammar leaves no token, and why.
        outcome, context: for the policy: the verdict before any cut, the cache's length before the step.
    """

    state: SequenceState
    num_scheduled_tokens: int
    draft: Draft | None
    num_extra: int = 0
    logits: Tensor | None = None
    verdict: Verdict | None = None
    top_tokens: Tensor | None = None
    hidden_outputs: Tensor | None = None
    num_draft_tokens: int | None = None
    reason: Reason | None = None
    outcome: DraftOutcome | None = None
    context: int = 0
    bad_rows: frozenset[int] = frozenset()
    dead_rows: Mapping[int, Exception] = field(default_factory=dict)

    @property
    def num_logits(self) -> int:
        """Return the number of rows of logits that this sequence takes from the step's."""
        return self.num_extra + (0 if self.draft is None else len(self.draft) + 1)

    def rows(self, needs: Needs) -> Rows:
        """Return this sequence's rows in the target's forward. needs: the drafter's."""
        cache = self.state.cache
        token_ids = self.state.sequence.token_ids
        draft = self.draft
        assert cache is not None
        resumes = (
            draft is not None and draft.hidden is not None and draft.first_layer <= min(needs.layers, default=2**31)
        )
        if not resumes:
            cache.drop()  # rows that a drafter fed for a draft that was not taken, or whose first layers are needed
        start = cache.length
        count = self.num_scheduled_tokens
        num_logits = self.num_logits
        num_hidden = None
        if needs.states:
            num_hidden = count + (0 if draft is None else len(draft))
        if draft is None or not len(draft):
            return Rows(cache, token_ids[start : start + count], None, num_logits, num_hidden_outputs=num_hidden)
        parents = None
        if not draft.is_chain:
            parents = [*range(-1, count - 1), *(count + parent for parent in draft.parents)]
        if isinstance(draft.token_ids, Tensor):
            tokens: Seq[int] | Tensor = torch.cat([draft.token_ids.new_tensor(token_ids[start:]), draft.token_ids])
        else:
            tokens = [*token_ids[start:], *draft.token_ids]
        if not resumes:
            return Rows(cache, tokens, parents, num_logits, num_hidden_outputs=num_hidden)
        return Rows(cache, tokens, None, num_logits, draft.hidden, draft.first_layer, num_hidden)

    def logits_rows(self) -> list[LogitsRow]:
        """Return the position of each row that the verifier reads."""
        assert self.draft is not None
        paths: list[list[int]] = [[]]
        for token_id, parent in zip(self.draft.ids, self.draft.parents, strict=True):
            paths.append([*paths[parent + 1], token_id])
        return [LogitsRow(self.state.sequence, path) for path in paths]

    def report_prompt(self) -> None:
        """Add the log-probabilities of the prompt's tokens that the step has computed."""
        state = self.state
        params = self.state.request.params
        assert state.cache is not None
        assert state.prompt_logprobs is not None
        first = state.cache.length + 1
        ids = state.request.prompt_token_ids[first : first + self.num_extra]
        state.prompt_logprobs += self.logprobs(list(range(self.num_extra)), ids, params.prompt_logprobs)

    def logprobs(self, rows: list[int], token_ids: list[int], num_top: int | None) -> list[TokenLogprob]:
        """Return the log-probabilities of tokens, each after one of this sequence's rows."""
        assert self.logits is not None
        assert num_top is not None
        return token_logprobs(self.logits[rows], token_ids, num_top)

    def count(self, chunk: StreamChunk, accepted: list[int], stats: StepStats) -> None:
        """Count this part of a step, for its sequence and for the step. accepted: nodes that were committed."""
        own = self.state.stats
        draft = self.draft
        if own.num_tokens == 0:
            own.time_first_token = perf_counter() - self.state.time_started
        own.num_tokens += len(chunk.token_ids)
        own.num_forwards += 1
        own.num_plain_forwards += not self.num_draft_tokens
        num_probes = 0 if draft is None else len(draft) - draft.num_candidates
        own.num_asked_tokens += max((self.num_draft_tokens or 0) - num_probes, 0)
        if self.reason is not None:
            decision = f"{'on' if self.num_draft_tokens else 'off'}: {self.reason}"
            own.decisions[decision] = own.decisions.get(decision, 0) + 1
        if draft is not None and len(draft):
            depths = [depth - 1 for depth in draft.depths[: draft.num_candidates]]
            # one more than was accepted, where the last accepted node has a child
            end = accepted[-1] if accepted else ROOT
            goes_on = len(chunk.token_ids) > len(accepted) and end in draft.parents[: draft.num_candidates]
            own.count_draft(depths, chunk.num_accepted_draft, chunk.num_accepted_draft + goes_on)
            if draft.sources:
                own.count_sources(draft.sources[: draft.num_candidates], accepted)
        stats.num_tokens += len(chunk.token_ids)
        stats.num_accepted_tokens += chunk.num_accepted_draft

    def report(self, needs: Needs) -> Step:
        """Return the report on this part of the step for the drafter, with what it needs."""
        state = self.state
        verdict = self.verdict
        hidden_outputs = self.hidden_outputs
        states = None
        assert state.cache is not None
        if verdict is not None:  # a copy: the policy reads it after the drafter
            verdict = Verdict(list(verdict.path), verdict.next_token)
        if needs.states and hidden_outputs is not None:
            start = self.num_scheduled_tokens
            num_logits = self.num_logits
            num_rows = start + (0 if self.draft is None else len(self.draft))
            if verdict is not None and verdict.path:
                states = hidden_outputs[[*range(start), *(start + node for node in verdict.path)]]
            else:
                states = hidden_outputs if num_rows == start else hidden_outputs[:start]
            if num_logits < num_rows:
                hidden_outputs = hidden_outputs[num_rows - num_logits :] if num_logits else None
        return Step(state.sequence, self.draft, verdict, state.cache.length, self.top_tokens, hidden_outputs, states)
