"""How a request's tokens are picked, which decides how they are drafted."""

from __future__ import annotations

from enum import Enum

from forerun.types import Sequence


class Picking(Enum):
    """How a request's tokens are picked."""

    GREEDY = "greedy"
    SEEDED = "with the noise that the target adds too"
    DRAWN = "drawn from the draft model's distributions"


def picking_of(sequence: Sequence) -> Picking:
    """How a request's tokens are picked."""
    params = sequence.params
    return Picking.GREEDY if params.greedy else Picking.DRAWN if params.seed is None else Picking.SEEDED
