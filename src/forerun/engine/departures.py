"""How sequences leave a step or the engine: with tokens, with a result, with an error; what they held is given back."""

from __future__ import annotations

import logging
from collections import deque

import torch

from forerun.engine.memory import CacheMemory
from forerun.engine.outputs import failure, result
from forerun.engine.results import StepOutput
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import SequenceState
from forerun.engine.step import StepLoop
from forerun.engine.text import TokenTexts
from forerun.errors import DeviceError
from forerun.utils.device import device_error

# What becomes of an engine whose device has failed, or has no memory left for a step.

_log = logging.getLogger(__name__)


class DeviceFaults:
    """Tells errors of the device from all others, and remembers that it has failed.

    Args:
        device: where target and drafter compute.

    Attributes:
        failure: the reason for which nothing can be computed any more, with its remedy; None: all is well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.failure: str | None = None

    def own(self, error: Exception) -> Exception:
        """The error as forerun's own, where it is the device's."""
        if self.failure is not None:
            return DeviceError(self.failure)  # whatever it says, it comes of that
        found = device_error(error, self._device)
        if found is None or found is error:
            return error
        if isinstance(found, DeviceError):
            self.failure = str(found)
            _log.error("%s", found, exc_info=error)
        found.__cause__ = error.with_traceback(None)  # whose frames hold the tensors for which there is no memory
        return found

    def check(self) -> None:
        """Raise DeviceError if the device has failed."""
        if self.failure is not None:
            raise DeviceError(self.failure)


class Departures:
    """Puts what comes of sequences among the engine's outputs, and lets go of those that are finished.

    Every method may be interrupted and called again.

    Args:
        faults: of the device, which is asked of every error.

    Attributes:
        outputs: what came of the steps.
    """

    def __init__(
        self, loop: StepLoop, scheduler: Scheduler, memory: CacheMemory, texts: TokenTexts | None, faults: DeviceFaults
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
        if state.sequence.finish_reason is not None:
            self.end(state)
            return
        if state.request.stream:
            if state.text is not None:
                chunk.text = state.text.take()
            self.outputs.append(StepOutput(state.request.id, chunk))
        state.pending, state.changing = None, False

    def fail(self, state: SequenceState, error: Exception) -> None:
        """End the sequence with this error, or with what it says of the device."""
        error = self._faults.own(error)
        state.error, state.sequence.finish_reason = error, "abort"
        self.end(state)

    def fail_all(self) -> None:
        """End every sequence of the engine: its device has failed."""
        for state in list(self._scheduler):
            self.fail(state, DeviceError(self._faults.failure or ""))

    def rollback(self, state: SequenceState) -> None:
        """Go on from the last commit: the interrupted step's, if it came to that, or the one before."""
        try:
            if state.cache is not None:
                state.cache.drop()
                if state.cache.length:
                    self._loop.start(state)
                else:  # its layers may be half allocated: it enters anew with the next step
                    self.release(state)
            self.deliver(state)
        except Exception as error:
            self.fail(state, error)

    def end(self, state: SequenceState) -> None:
        """The sequence leaves: with what its last step has committed, or nothing, or with its error. What it held is
        given back first, and only then is its last output there, once, however often this is called."""
        self.release(state)
        self._scheduler.remove(state)
        if state.has_left:
            return
        try:
            output = result(state, self._texts) if state.error is None else failure(state, state.error)
        except Exception as error:  # of a tokenizer that cannot decode it
            output = failure(state, error)
        # in one line, between whose parts no interrupt can come
        state.has_left = self.outputs.append(output) is None  # type: ignore[func-returns-value]

    def release(self, state: SequenceState) -> None:
        """Free all that the sequence holds; its pages stay adoptable."""
        self._memory.hand_on(state)
        self._loop.stop(state)
        if state.cache is not None:
            state.cache.free()
            state.cache = state.sequence.cache = None
