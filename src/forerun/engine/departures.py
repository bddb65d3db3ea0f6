"""How sequences leave a step or the engine: with tokens, with a result, with an error; what they held is given back."""

from __future__ import annotations

import logging
from collections import deque

from forerun.engine.device_faults import DeviceFaults
from forerun.engine.memory import Memory
from forerun.engine.outputs import failure, put, result, shown
from forerun.engine.results import StepOutput, StreamChunk
from forerun.engine.scheduler import Scheduler
from forerun.engine.state import SequenceState
from forerun.engine.step import StepLoop
from forerun.engine.text import TokenTexts
from forerun.errors import DeviceError

_log = logging.getLogger(__name__)


class Departures:
    """Puts what comes of sequences among the engine's outputs, and lets go of those that are finished.

    Every method may be interrupted and called again.

    Args:
        faults: of the device, which is asked of every error.

    Attributes:
        outputs: what came of the steps.
    """

    def __init__(
        self, loop: StepLoop, scheduler: Scheduler, memory: Memory, texts: TokenTexts | None, faults: DeviceFaults
    ) -> None:
        self.outputs: deque[StepOutput] = deque()
        self._loop, self._scheduler, self._memory, self._texts = loop, scheduler, memory, texts
        self._faults = faults

    def deliver(self, state: SequenceState) -> None:
        """Put what the step has committed among the outputs; a sequence that is finished leaves."""
        chunk = state.pending
        if chunk is None:
            return
        state.changing = True
        if state.sequence.finish_reason is None:
            if state.request.stream:
                self.outputs.append(StepOutput(state.request.id, shown(state, chunk)))
            state.pending, state.changing = None, False
            return
        self.leave(state)
        self._finish(state, chunk)

    def _finish(self, state: SequenceState, chunk: StreamChunk) -> None:
        """Put the choice, which has left, among the outputs; or the error of a tokenizer that cannot decode it."""
        try:
            output = result(state, chunk, self._texts)
        except Exception as error:
            output = failure(state, error)
        put(output, state, self.outputs)

    def fail(self, state: SequenceState, error: Exception) -> None:
        """End the sequence with this error, or with what it says of the device."""
        error = self._faults.own(error)
        state.error, state.sequence.finish_reason = error, "abort"
        self.end(state)

    def fail_all(self) -> None:
        """End every sequence of the engine: its device has failed."""
        for state in list(self._scheduler):
            self.fail(state, DeviceError(self._faults.failure or ""))

    def take_back(self, state: SequenceState) -> None:
        """Go on from the last commit: the interrupted step's, if it came to that, or the one before."""
        try:
            if state.cache is not None:
                state.cache.drop()
                if state.cache.length:
                    self._loop.start(state)
                else:  # its layers may be half allocated: it enters anew with the next step
                    self.let_go(state)
            self.deliver(state)
        except Exception as error:
            self.fail(state, error)

    def end(self, state: SequenceState) -> None:
        """The sequence leaves before it is finished, with an error or without."""
        self.leave(state)
        if state.has_left:
            return
        if state.error is None:
            self._finish(state, StreamChunk("", [], index=state.sequence.choice))
        else:
            put(failure(state, state.error), state, self.outputs)

    def leave(self, state: SequenceState) -> None:
        """The sequence is gone from the engine, however often this is called."""
        self.release(state)
        self._scheduler.remove(state)

    def release(self, state: SequenceState) -> None:
        """Free all that the sequence holds; its pages stay adoptable."""
        self._memory.hand_on(state)
        self.stop(state)
        self.let_go(state)

    def let_go(self, state: SequenceState) -> None:
        """Free the sequence's cache."""
        if state.cache is not None:
            state.cache.free()
            state.cache = state.sequence.cache = None

    def stop(self, state: SequenceState) -> None:
        """The drafter and what draws tokens forget the sequence."""
        try:
            self._loop.stop(state)
        except Exception:
            # the sequence is gone either way, and its own result or error matters more
            _log.exception("the drafter failed to let sequence %d go", state.sequence.id)
