"""The arms that tuning tries, the units they are tried on, and the trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from forerun.config import AUTO, NO_DRAFTER, NumDraftTokens


@dataclass(frozen=True, slots=True)
class TuningArm:
    """One way to decode.

    Attributes:
        drafter: its text, as LLM takes it; NO_DRAFTER is plain decoding.
        num_draft_tokens: K, or AUTO.
    """

    drafter: str
    num_draft_tokens: NumDraftTokens = AUTO

    def __str__(self) -> str:
        if self.drafter == NO_DRAFTER:
            return "plain"
        return self.drafter if self.is_auto else f"{self.drafter}, K={self.num_draft_tokens}"

    @property
    def is_auto(self) -> bool:
        """Return whether K is chosen step by step."""
        return self.num_draft_tokens == AUTO


PLAIN = TuningArm(NO_DRAFTER, 0)
LEAST_PROMPTS = 4
"""Two to choose by and two to measure on: with fewer there is no interval."""


Unit: TypeAlias = tuple[int, ...]
"""The numbers of prompts that one trial answers at once: as many as the level of load."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One arm on one unit.

    Attributes:
        seconds: wall-clock, prompts included; or of decoding alone, as `EngineTrials` counts them.
        num_tokens: generated in these seconds, of all its prompts.
        num_forwards: in these seconds. num_drafted, num_accepted: as in SequenceStats, summed.
        reached, accepted: by position of a draft.
        first_seconds: to the first token of the last of its prompts.
        same_text: the tokens are those of plain decoding; None: not compared.
    """

    seconds: float
    num_tokens: int
    num_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    first_seconds: float = 0.0
    same_text: bool | None = None

    @property
    def per_token(self) -> float:
        """Return the seconds per token."""
        return self.seconds / max(1, self.num_tokens)


class ArmFailedError(Exception):
    """An arm that cannot be tried, or that failed while it was.

    Attributes:
        reason: for the arm's row.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class OutOfTimeError(Exception):
    """The time was up during a trial."""


class Trials(Protocol):
    """Where arms are tried: engines and a clock, or a simulation of both."""

    def now(self) -> float:
        """Return the seconds since tuning began."""

    def run(self, arm: TuningArm, unit: Unit) -> Trial:
        """Run one trial. Raises ArmFailedError: this arm cannot go on, others can."""
