"""Machines by what bounds a step (memory, bandwidth, arithmetic), overheads measured beside them, and forwards' times.

The table has the vendors' figures: bandwidth of the memory, and dense 16-bit arithmetic of the matrix units with sums
in 32 bits. A real step reaches neither, so what follows from them alone is a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from forerun.errors import ConfigError
from forerun.lab.plan.shapes import ModelShape
from forerun.speculation.predictor import CostsByK

HERE = "here"
"""The name that stands for the machine on which forerun runs, which is measured."""
GB = 1e9
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds beside the bounds, as measured.

    Attributes:
        layer: of each layer of a forward.
        layer_row: of each layer and row.
        step: the engine's part of a step.
        token: the drafter's and the engine's part of a draft token, its forward apart.
    """

    layer: float = 0.0
    layer_row: float = 0.0
    step: float = 0.0
    token: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """One device.

    Attributes:
        memory: bytes; None: unknown.
        bandwidth: bytes a second, of weights that take so many bytes together.
        flops: operations a second.
        overheads: None: nothing was measured, and what follows is a bound.
    """

    name: str
    memory: float | None
    bandwidth: Callable[[float], float]
    flops: float
    overheads: Overheads | None = None

    @classmethod
    def of(cls, name: str, memory: float | None, bandwidth: float, flops: float) -> Machine:
        """Create a machine from figures in GB, GB/s and TFLOP/s."""
        nbytes = None if memory is None else memory * GB
        return cls(name, nbytes, lambda _: bandwidth * GB, flops * TERA)


_FIGURES: Mapping[str, tuple[float, float, float]] = {
    "b200": (192, 8000, 2250),
    "h200": (141, 4800, 989),
    "h100": (80, 3350, 989),
    "h100-pcie": (80, 2000, 756),
    "a100-80gb": (80, 2039, 312),
    "a100-40gb": (40, 1555, 312),
    "mi300x": (192, 5300, 1307),
    "l40s": (48, 864, 362),
    "l4": (24, 300, 121),
    "a10": (24, 600, 125),
    "v100": (32, 900, 125),
    "t4": (16, 320, 65),
    "rtx4090": (24, 1008, 165),
    "rtx3090": (24, 936, 71),
}
"""GB, GB/s, TFLOP/s."""
ACCELERATORS: Mapping[str, Machine] = {name: Machine.of(name, *figures) for name, figures in _FIGURES.items()}


def accelerator(name: str) -> Machine:
    """Look up a machine of the table. Raises ConfigError for any other name."""
    key = name.lower().replace(" ", "-")
    if key not in ACCELERATORS:
        near = get_close_matches(key, ACCELERATORS, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"machine is {name!r}, which is not in the table. {hint}Give {HERE!r} (this machine, measured), one of "
            f"{', '.join(ACCELERATORS)}, or its figures with --bandwidth and --flops."
        )
    return ACCELERATORS[key]


FLOPS_OF_PRODUCT = 2
"""A multiplication and an addition."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A model on a machine, and the time of its forwards by the roofline and the machine's overheads.

    Attributes:
        cache_bytes: of each number of keys and values.
        devices: among which weights, cache and arithmetic are shared evenly.
        synchronisation: seconds of a forward in which these wait for each other.
    """

    shape: ModelShape
    machine: Machine
    cache_bytes: float = 2.0
    devices: int = 1
    synchronisation: float = 0.0

    @property
    def weights(self) -> float:
        """Return the bytes of all weights."""
        return self.shape.parameters * self.shape.weight_bytes

    def cache(self, positions: int) -> float | None:
        """Return the bytes of so many positions; None where the shape does not say."""
        numbers = self.shape.cache_numbers
        return None if numbers is None else numbers * self.cache_bytes * positions

    def forward(self, rows: int, batch: int, context: int) -> float:
        """Return the seconds of one forward.

        Args:
            rows: of each sequence.
            context: positions in each sequence's cache.
        """
        machine = self.machine
        shape = self.shape
        every = rows * batch
        weights = shape.read(every) * shape.weight_bytes
        read = weights + (self.cache(batch * context) or 0.0)
        products = shape.multiplied * every + shape.attention_products * context * every
        bound = max(read / machine.bandwidth(self.weights / self.devices), FLOPS_OF_PRODUCT * products / machine.flops)
        costs = machine.overheads or Overheads()
        layers = (shape.layers or 0) * (costs.layer + costs.layer_row * every)
        return bound / self.devices + self.synchronisation + layers


def roofline_costs(target: Placed, draft: Placed | None, batch: int, context: int, most: int) -> CostsByK:
    """Return the costs of a step with chains of up to `most` tokens from a draft model or head; without one, drafting
    costs only what was measured of the engine."""
    costs = target.machine.overheads or Overheads()
    one = 0.0 if draft is None else draft.forward(1, batch, context)

    def drafting(count: int) -> float:
        passes = min(count, 1) if draft is not None and draft.shape.one_pass else count
        return passes * one + count * costs.token

    counts: Sequence[int] = range(most + 1)
    return CostsByK(
        target.forward(1, batch, context) + costs.step,
        [target.forward(count + 1, batch, context) for count in counts],
        [drafting(count) for count in counts],
        [costs.step for _ in counts],
    )
