"""The client's prediction of the output: it is copied while the output follows it.

Like OpenAI's Predicted Outputs; where the output leaves the prediction, the position at which it returns is searched.
"""

from __future__ import annotations

from bisect import bisect_left

from forerun.drafters.base import Traits
from forerun.drafters.lookup.copy_drafter import CopyDrafter, level_of
from forerun.types import Sequence

SOURCE = "prediction"
"""Name of the copies in statistics."""
PREDICTION_RATES = (0.6, 0.7, 0.85, 0.92, 0.96, 0.98, 0.99)
"""COPY_RATES for the client's prediction; no match at all is its beginning, or follows a replaced token."""
MAX_MATCH = 16
"""Tokens before a position that are compared at most."""
_CANDIDATES = 32
"""Positions of a prediction, on either side of the lost one, that are tried when the output has left it."""


class Follower:
    """Tracks the position of an output in its prediction.

    While the output's next token is the prediction's, the position moves on. Otherwise the position becomes the
    one after the longest suffix of the output that occurs in the prediction, of equally long ones the next ahead of
    the lost one, else the nearest behind. Where the last token does not occur nearby, it is taken for a replacement of
    the predicted token.

    Args:
        prediction: token ids.

    Attributes:
        at: index of the token that should come next.
        matched: how many tokens before `at` match the output's end; 0 at the beginning.
    """

    __slots__ = ("_positions_of", "at", "matched", "prediction")

    def __init__(self, prediction: list[int]) -> None:
        self.prediction = prediction
        self.at = 0
        self.matched = 0
        self._positions_of: dict[int, list[int]] = {}
        for position, token in enumerate(prediction[:-1]):  # after the last nothing follows
            self._positions_of.setdefault(token, []).append(position)

    def follow(self, output: list[int]) -> None:
        """Take in the last token of the output."""
        if self.at < len(self.prediction) and self.prediction[self.at] == output[-1]:
            self.at += 1
            self.matched += 1
            return
        found = self._find(output)
        if found is None:
            self.at = min(self.at + 1, len(self.prediction))
            self.matched = 0
        else:
            self.at, self.matched = found

    def _find(self, output: list[int]) -> tuple[int, int] | None:
        """Return the position after the best match of the output's end, and its length."""
        positions = self._positions_of.get(output[-1])
        if positions is None:
            return None
        middle = bisect_left(positions, self.at)
        nearest = positions[middle : middle + _CANDIDATES]
        nearest += positions[max(0, middle - _CANDIDATES) : middle][::-1]
        best = nearest[0]
        length = 0
        for position in nearest:
            matched = self._match(output, position, length)
            if matched > length:
                best = position
                length = matched
                if length == MAX_MATCH:
                    break
        return best + 1, length

    def _match(self, output: list[int], position: int, beyond: int) -> int:
        """Return how many tokens up to this position match the output's end; 0 if not more than `beyond`."""
        prediction = self.prediction
        end = len(output) - 1
        if beyond > position or beyond > end or prediction[position - beyond] != output[end - beyond]:
            return 0
        length = 1
        limit = min(position, end, MAX_MATCH - 1)
        while length <= limit and prediction[position - length] == output[end - length]:
            length += 1
        return length


class Prediction(CopyDrafter):
    """Copies from `Sequence.prediction`; for a sequence without one it drafts nothing. Chosen, never drawn.

    Every node names its source, so that `SequenceStats.sources["prediction"]` counts how many predicted tokens were
    accepted and how many were not.
    """

    @property
    def traits(self) -> Traits:
        return Traits(("Prediction",), reads_prediction=True, estimates=True)

    def __init__(self) -> None:
        super().__init__(PREDICTION_RATES, SOURCE)
        self._followers: dict[Sequence, tuple[Follower, list[int]]] = {}

    def start(self, sequence: Sequence) -> None:
        if sequence.prediction:
            self._followers[sequence] = Follower(sequence.prediction), []

    def stop(self, sequence: Sequence) -> None:
        super().stop(sequence)
        self._followers.pop(sequence, None)

    def _copy(self, sequence: Sequence, count: int) -> tuple[list[int], list[int]]:
        held = self._followers.get(sequence)
        if held is None:
            return [], []
        follower, output = held
        for token in sequence.token_ids[sequence.num_prompt + len(output) :]:
            output.append(token)
            follower.follow(output)
        token_ids = follower.prediction[follower.at : follower.at + count]
        return token_ids, [*map(level_of, range(follower.matched, follower.matched + len(token_ids)))]
