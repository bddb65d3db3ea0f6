"""Which sequences have not drafted for a while, and how many tokens their drafter has not computed with since."""

from __future__ import annotations

from forerun.types import Sequence


class Pauses:
    """The first draft after a pause, or of a sequence, may cost more than the next ones.

    A drafter that computes with the tokens before has to catch up with them.
    """

    __slots__ = ("_came", "_lengths", "_steps")

    def __init__(self) -> None:
        self._steps: dict[Sequence, int] = {}  # the last step in which it drafted, or the one before it came
        self._lengths: dict[Sequence, int] = {}  # its tokens when it drafted last
        self._came = 0

    def __len__(self) -> int:
        """Sequences that are followed."""
        return len(self._steps)

    def come(self, sequence: Sequence, step: int) -> None:
        """It takes part from the next step on; nothing happens if it does already."""
        if sequence not in self._steps:
            self._steps[sequence] = step
            self._came += len(sequence.token_ids)

    def tokens_that_came(self) -> int:
        """Those of the sequences that have come since this was asked."""
        count, self._came = self._came, 0
        return count

    def drafted(self, sequence: Sequence, step: int) -> None:
        """It has been asked for a draft in this step."""
        self._steps[sequence] = step
        self._lengths[sequence] = len(sequence.token_ids)

    def stop(self, sequence: Sequence) -> None:
        """It leaves."""
        self._steps.pop(sequence, None)
        self._lengths.pop(sequence, None)

    def last(self, sequence: Sequence) -> int:
        """The last step in which it drafted, or the one before it came."""
        return self._steps[sequence]

    def has_paused(self, sequence: Sequence, step: int) -> bool:
        """Whether it has been there without a draft until this step."""
        return step > self._steps.get(sequence, step) + 1

    def lag(self, sequence: Sequence, step: int) -> int:
        """Tokens that have come since it drafted, with a pause until this step; all of them if it never has."""
        if sequence not in self._lengths:
            return len(sequence.token_ids)
        return max(len(sequence.token_ids) - self._lengths[sequence], 1) if self.has_paused(sequence, step) else 0
