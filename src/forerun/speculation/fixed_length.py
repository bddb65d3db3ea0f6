"""The automatic policy of drafters whose drafts have a fixed length.

A window that is computed in one step makes the drafts of later steps (Lookahead), so single steps with and without it
cannot be compared. Such a drafter is given all its nodes for some consecutive steps, and none for others, and whichever
gave more tokens per second is continued.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.speculation.policy import DraftOutcome, DraftPlan, Reason, SpeculationPolicy, StepCost
from forerun.types import Sequence

WHOLE_STEPS = 12
"""Consecutive drafting steps after which drafting is compared with plain decoding."""
WHOLE_PLAIN_STEPS = 3
"""Plain steps before the first drafts."""
WHOLE_PAUSE, WHOLE_MAX_PAUSE = 192, 6144
"""Plain steps before drafting is tried again; doubled each time that it was slower, up to the second number."""
WHOLE_LOSS = 3.0
"""Plain steps' time that drafting steps may lose before they are compared sooner."""
WHOLE_DECAY = 0.96
"""Weight that earlier tokens and seconds keep at each later step of the same kind."""


@dataclass(slots=True)
class _Arm:
    """Drafting or plain decoding: decayed sums of tokens and seconds."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = self.tokens * WHOLE_DECAY + tokens
        self.seconds = self.seconds * WHOLE_DECAY + seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Load:
    """Both arms at batches of about one size.

    Attributes:
        left: steps for which the present one is continued.
        pause: plain steps after the next trial that drafting loses.
        lost: plain steps' time that the present trial has lost.
    """

    arms: tuple[_Arm, _Arm] = field(default_factory=lambda: (_Arm(), _Arm()))
    drafting: bool = False
    left: int = WHOLE_PLAIN_STEPS
    pause: int = WHOLE_PAUSE
    lost: float = 0.0

    def add(self, drafting: bool, tokens: int, sequences: int, seconds: float) -> None:
        """Add a step. A trial that loses too much ends early."""
        self.arms[drafting].add(tokens, seconds)
        plain = self.arms[False].rate
        if drafting and self.drafting and plain:
            self.lost += (seconds * plain - tokens) / sequences
            if self.lost > WHOLE_LOSS:
                self.left = 0

    def decide(self) -> None:
        """Choose the next arm, and for how many steps, after the present one has had its steps."""
        plain, drafted = self.arms
        self.lost = 0.0
        if not self.drafting:
            self.drafting, self.left = True, WHOLE_STEPS
        elif drafted.rate >= plain.rate:
            self.pause, self.left = WHOLE_PAUSE, WHOLE_STEPS
        else:  # twice as long until the next trial, each time that drafting was slower
            self.drafting, self.left = False, self.pause
            self.pause = min(2 * self.pause, WHOLE_MAX_PAUSE)


class FixedLengthPolicy(SpeculationPolicy):
    """All nodes or none, the same for all sequences of a step.

    Args:
        num_nodes: nodes of a draft.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._loads: dict[int, _Load] = {}
        self._drafting = False

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        load = self._load(len(sequences))
        if load.left == 0:
            load.decide()
        load.left -= 1
        self._drafting = load.drafting
        num_draft_tokens = [self._num_nodes if load.drafting and sequence.room > 0 else 0 for sequence in sequences]
        return DraftPlan(num_draft_tokens, reason=self._reason(load, any(num_draft_tokens)))

    def observe(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:
        if cost.num_prompt_rows or not outcomes:
            return
        tokens = sum(len(outcome.verdict.path) + 1 for outcome in outcomes)
        self._load(len(outcomes)).add(self._drafting, tokens, len(outcomes), cost.seconds)

    def _reason(self, load: _Load, drafts: bool) -> Reason:
        plain, drafted = load.arms
        if not load.drafting:
            return "no gain" if drafted.seconds else "measuring"
        if not drafts:
            return "no room"
        return "gain" if drafted.rate >= plain.rate and drafted.seconds else "probe"

    def _load(self, batch: int) -> _Load:
        """Return the load of batches of about this size. A new one begins plain for as long as that of the next smaller
        ones, where drafting has lost: in a larger batch, whose rows cost more, it would lose more."""
        size = batch.bit_length()
        if size not in self._loads:
            smaller = max((other for other in self._loads if other < size), default=None)
            load = self._loads[size] = _Load()
            if smaller is not None:
                plain, drafted = self._loads[smaller].arms
                if drafted.seconds and drafted.rate < plain.rate:
                    load.left = load.pause
        return self._loads[size]
