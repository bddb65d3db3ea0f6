"""From a sequence that has gone on, or has left, to what its user gets."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from forerun.engine.results import Choice, Generation, StepOutput, StreamChunk
from forerun.engine.sequence import SequenceState
from forerun.engine.text import Detokenizer, TokenTexts


def result(state: SequenceState, texts: TokenTexts | None) -> StepOutput:
    """The last output of a sequence that has left. Raises what decoding raises."""
    sequence, stats = state.sequence, state.stats
    chunk = state.pending or StreamChunk("", [], index=sequence.choice)
    chunk.finish_reason, chunk.stats = sequence.finish_reason, stats
    if state.time_started:
        stats.time_total = perf_counter() - state.time_started
    output, text = sequence.output_ids, ""
    if state.text is not None:
        if sequence.finish_reason == "abort":
            state.text.finish()
        text = state.text.text
        if state.request.stream:
            chunk.text = state.text.take()
    elif texts is not None:
        detokenizer = Detokenizer(texts, state.request.prompt_token_ids)
        text = detokenizer.push(output[:-1] if sequence.finish_reason == "stop" else output) + detokenizer.flush()
    choice = Choice(sequence.choice, text, output, state.logprobs, sequence.finish_reason, stats)
    return StepOutput(state.request.id, chunk, choice, state.prompt_logprobs if sequence.choice == 0 else None)


def failure(state: SequenceState, error: Exception) -> StepOutput:
    """The last output of a sequence that an error has ended."""
    chunk = StreamChunk("", [], finish_reason="abort", index=state.sequence.choice, stats=state.stats)
    return StepOutput(state.request.id, chunk, error=error)


def generation(prompt_token_ids: list[int], outputs: Iterable[StepOutput]) -> Generation:
    """The answer to a request, by the outputs of its choices, in whatever order they ended."""
    last = sorted((output for output in outputs if output.choice is not None), key=lambda output: output.chunk.index)
    choices = [output.choice for output in last if output.choice is not None]
    return Generation(prompt_token_ids, choices, last[0].prompt_logprobs)
