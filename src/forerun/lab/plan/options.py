"""The options of `forerun plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun.config import DEFAULT_DTYPE
from forerun.errors import ConfigError
from forerun.utils.fields import Checked, option

PRECISIONS: Mapping[str, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5625,
}
"""Bytes of a weight; of int4 with a scale of 16 bits for each 32 weights."""
MOST = 16
"""Largest K that is looked at."""
USUAL_SYNCHRONISATION = (1.0, 5.0)
"""Milliseconds of a forward that devices wait for each other, as a rule."""


@dataclass(frozen=True, slots=True)
class PlanOptions(Checked):
    """The number formats, sizes and devices to plan for."""

    precision: str | None = option(
        None,
        f"Of all weights: {', '.join(PRECISIONS)}.",
        metavar="FORMAT",
        default_text=f"as the files have quantized weights, else {DEFAULT_DTYPE}",
    )
    batch: int = option(1, "Sequences that are decoded together.", low=1)
    context: int = option(2048, "Positions of each sequence: prompt and answer.", low=1)
    tensor_parallel: int = option(1, "Devices among which the target is shared; the draft is on one of them.", low=1)
    sync_ms: float | None = option(
        None,
        f"Milliseconds of each of the target's forwards that these devices wait for each other; "
        f"{USUAL_SYNCHRONISATION[0]:g} to {USUAL_SYNCHRONISATION[1]:g} are usual.",
        low=0,
        default_text=f"{USUAL_SYNCHRONISATION[0]:g}, where there are several",
    )
    step_ms: Mapping[int, float] = option(
        {},
        "Milliseconds of a step with K draft tokens, measured elsewhere: 0=MS is plain decoding.",
        metavar="K=MS",
        default_text="computed",
    )
    price: float | None = option(None, "Price of an hour of all devices together.", low=0, default_text="not counted")

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        given = self.step_ms
        if given and (0 not in given or min(given) < 0 or len(given) < 2 or not all(ms > 0 for ms in given.values())):
            raise ConfigError(
                f"step_ms is {dict(given)}, but must be milliseconds above 0 of a plain step, 0=MS, and of steps with "
                "drafts, K=MS."
            )

    @property
    def most(self) -> int:
        """Return the largest K that is looked at."""
        return max(self.step_ms or (MOST,))

    @property
    def synchronisation(self) -> float:
        """Return the seconds of a forward in which devices wait for each other."""
        if self.tensor_parallel == 1:
            return 0.0
        return (USUAL_SYNCHRONISATION[0] if self.sync_ms is None else self.sync_ms) / 1000
