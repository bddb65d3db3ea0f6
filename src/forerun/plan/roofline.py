"""How long a forward takes at least: what it reads over the bandwidth, or what it computes over the arithmetic.

Beside that stands what was measured of layers, rows and the engine; where nothing was, the times are bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.plan.machines import Machine, Overheads
from forerun.plan.predictor import StepCosts
from forerun.plan.shapes import ModelShape

FLOPS_OF_PRODUCT = 2
"""A multiplication and an addition."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A model on a machine.

    Attributes:
        weight_bytes: of each of its weights.
        cache_bytes: of each number of keys and values.
        devices: among which weights, cache and arithmetic are shared evenly.
        synchronisation: seconds of a forward in which these wait for each other.
    """

    shape: ModelShape
    machine: Machine
    weight_bytes: float = 2.0
    cache_bytes: float = 2.0
    devices: int = 1
    synchronisation: float = 0.0

    @property
    def weights(self) -> float:
        """Bytes of all weights."""
        return self.shape.parameters * self.weight_bytes

    def cache(self, positions: int) -> float | None:
        """Bytes of so many positions; None where the shape does not tell."""
        numbers = self.shape.cache_numbers
        return None if numbers is None else numbers * self.cache_bytes * positions

    def forward(self, rows: int, batch: int, context: int) -> float:
        """Seconds of one forward.

        Args:
            rows: of each sequence.
            context: positions in each sequence's cache.
        """
        machine, shape, every = self.machine, self.shape, rows * batch
        weights = shape.read(every) * self.weight_bytes
        read = weights + (self.cache(batch * context) or 0.0)
        products = shape.multiplied * every + shape.mixing * context * every
        bound = max(read / machine.bandwidth(self.weights / self.devices), FLOPS_OF_PRODUCT * products / machine.flops)
        costs = machine.overheads or Overheads()
        layers = (shape.layers or 0) * (costs.layer + costs.layer_row * every)
        return bound / self.devices + self.synchronisation + layers


def roofline_costs(target: Placed, draft: Placed | None, batch: int, context: int, most: int) -> StepCosts:
    """The costs of a step with chains of up to `most` tokens from a draft model or head; without one, drafting costs
    nothing but what was measured of the engine."""
    costs = target.machine.overheads or Overheads()
    one = 0.0 if draft is None else draft.forward(1, batch, context)

    def drafting(count: int) -> float:
        passes = min(count, 1) if draft is not None and draft.shape.one_pass else count
        return passes * one + count * costs.token

    counts: Sequence[int] = range(most + 1)
    return StepCosts(
        target.forward(1, batch, context) + costs.step,
        [target.forward(count + 1, batch, context) for count in counts],
        [drafting(count) for count in counts],
        [costs.step for _ in counts],
    )
