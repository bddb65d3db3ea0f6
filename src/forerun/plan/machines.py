"""Machines by what bounds a step: memory, bandwidth, arithmetic; and what was measured beside these bounds.

The table has the vendors' figures: bandwidth of the memory, and dense 16-bit arithmetic of the matrix units with sums
in 32 bits. A real step reaches neither, so what follows from them alone is a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from forerun.errors import ConfigError

HERE = "here"
"""The name that stands for the machine on which forerun runs, which is measured."""
GB, TERA = 1e9, 1e12


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
        memory: bytes; None: not told.
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
        """By figures: GB, GB/s, TFLOP/s."""
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
    """One of the table. Raises ConfigError for any other name."""
    wanted = name.lower().replace(" ", "-")
    if wanted not in ACCELERATORS:
        near = get_close_matches(wanted, ACCELERATORS, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"machine is {name!r}, which is not in the table. {hint}Give {HERE!r} (this machine, measured), one of "
            f"{', '.join(ACCELERATORS)}, or its figures with --bandwidth and --flops."
        )
    return ACCELERATORS[wanted]
