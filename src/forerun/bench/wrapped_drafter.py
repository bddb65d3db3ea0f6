"""A drafter that another one works for: what a bench measures or prices passes through it."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters import Drafter, Traits
from forerun.types import Draft, Needs, Pool, Sequence as Tokens, Step


class WrappedDrafter(Drafter):
    """Does what `drafter`, which is bound already, does. A bench overrides what it looks at.

    Attributes:
        drafter: that does the work.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    @property
    def needs(self) -> Needs:
        return self.drafter.needs

    @property
    def traits(self) -> Traits:
        return self.drafter.traits

    @property
    def nbytes(self) -> int:
        return self.drafter.nbytes

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self.drafter.pools

    def start(self, sequence: Tokens) -> None:
        self.drafter.start(sequence)

    def draft(self, sequences: Sequence[Tokens], budgets: Sequence[int], price: float = 0.0) -> list[Draft]:
        return self.drafter.draft(sequences, budgets, price)

    def commit(self, steps: Sequence[Step]) -> None:
        self.drafter.commit(steps)

    def stop(self, sequence: Tokens) -> None:
        self.drafter.stop(sequence)

    def rewind(self, sequence: Tokens, length: int) -> None:
        self.drafter.rewind(sequence, length)

    def reset(self) -> None:
        self.drafter.reset()
