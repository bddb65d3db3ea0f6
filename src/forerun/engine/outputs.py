"""From a sequence that has gone on, or has left, to what its user gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import perf_counter

from forerun.engine.results import Choice, Generation, StepOutput, StreamChunk
from forerun.engine.state import SequenceState
from forerun.engine.text import TextStream, TokenTexts


def shown(state: SequenceState, chunk: StreamChunk) -> StreamChunk:
    """The chunk with the text that may be shown now, if it is streamed."""
    if state.text is not None and state.request.stream:
        chunk.text = state.text.take()
    return chunk


def result(state: SequenceState, chunk: StreamChunk, texts: TokenTexts | None) -> StepOutput:
    """The last output of a sequence that has left. chunk: what its last step committed. Raises what decoding raises."""
    chunk.finish_reason, chunk.stats = state.sequence.finish_reason, state.stats
    prompt_logprobs = state.prompt_logprobs if state.sequence.choice == 0 else None
    if state.text is not None and state.sequence.finish_reason == "abort":
        state.text.finish()
    if state.time_started:
        state.stats.time_total = perf_counter() - state.time_started
    choice = _choice(state, texts)
    return StepOutput(state.request.id, shown(state, chunk), choice, prompt_logprobs)


def failure(state: SequenceState, error: Exception) -> StepOutput:
    """The last output of a sequence that an error has ended."""
    chunk = StreamChunk("", [], finish_reason="abort", index=state.sequence.choice, stats=state.stats)
    return StepOutput(state.request.id, chunk, error=error)


def put(output: StepOutput, state: SequenceState, outputs: deque[StepOutput]) -> None:
    """Append a sequence's last output and mark the sequence, with no line between where an interrupt could come."""
    state.has_left = outputs.append(output) is None  # type: ignore[func-returns-value]


def generation(prompt_token_ids: list[int], outputs: Iterable[StepOutput]) -> Generation:
    """The answer to a request, by the outputs of its choices, in whatever order they ended."""
    last = sorted((output for output in outputs if output.choice is not None), key=lambda output: output.chunk.index)
    choices = [output.choice for output in last if output.choice is not None]
    return Generation(prompt_token_ids, choices, last[0].prompt_logprobs)


def _choice(state: SequenceState, texts: TokenTexts | None) -> Choice:
    if state.text is not None:
        return state.choice(state.text.text)
    if texts is None:
        return state.choice("")
    output = state.sequence.output_ids
    if output and state.sequence.finish_reason == "stop":
        output.pop()
    text = TextStream(texts, state.request.prompt_token_ids)
    text.push(output)
    text.finish()
    return state.choice(text.text)
