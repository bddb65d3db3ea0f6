"""A plan: memory, seconds, tokens and money of a target with a draft on a machine, by the predictor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from forerun.config import DEFAULT_DTYPE
from forerun.errors import ConfigError
from forerun.lab.plan.machines import Machine, Placed, roofline_costs
from forerun.lab.plan.options import PRECISIONS, PlanOptions
from forerun.lab.plan.shapes import ModelShape
from forerun.speculation.predictor import ChainAcceptance, CostsByK, SpeedPrediction

MEASURED, GIVEN, CALIBRATED, BOUND = "measured", "given", "calibrated", "bound"
"""Where the seconds come from: steps of these models in the engine here; the user; a roofline with costs of layers,
rows and steps that were measured here; a roofline alone."""
_FULL = 4.0


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes. None: unknown, or absent.

    Attributes:
        draft_share: what draft weights and cache add to the target's.
    """

    target_weights: float
    target_cache: float | None
    draft_weights: float | None
    draft_cache: float | None
    available: float | None

    @property
    def total(self) -> float:
        """Return the sum of all that is known."""
        parts = (self.target_weights, self.target_cache, self.draft_weights, self.draft_cache)
        return sum(part or 0.0 for part in parts)

    @property
    def draft_share(self) -> float:
        """Return the draft's memory as a share of the target's."""
        target = self.target_weights + (self.target_cache or 0.0)
        return ((self.draft_weights or 0.0) + (self.draft_cache or 0.0)) / target


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """A prediction of memory, costs and speeds.

    Attributes:
        source: MEASURED, GIVEN, CALIBRATED or BOUND.
        batch: sequences of a step, each of which gives a step's tokens.
        price: of an hour.
    """

    target: ModelShape
    draft: ModelShape | None
    machine: str
    source: str
    memory: MemoryEstimate
    costs: CostsByK
    prediction: SpeedPrediction
    batch: int
    price: float | None

    @property
    def plain_speed(self) -> float:
        """Return the tokens per second of plain decoding, of all sequences."""
        return self.batch / self.costs.plain

    @property
    def best_speed(self) -> float:
        """Return the tokens per second at the best K; those of plain decoding where no K is faster."""
        best = self.prediction.best
        return self.plain_speed if best is None else self.batch * best.tokens / best.seconds

    def per_million(self, speed: float) -> float | None:
        """Return the price of a million tokens at so many a second."""
        return None if self.price is None else self.price * 1e6 / (3600 * speed)

    def as_object(self) -> dict[str, Any]:
        """Return the object that is printed as JSON."""
        best = self.prediction.best
        return {
            "target": asdict(self.target),
            "draft": None if self.draft is None else asdict(self.draft),
            "machine": self.machine,
            "source": self.source,
            "memory": asdict(self.memory) | {"total": self.memory.total, "draft_share": self.memory.draft_share},
            "costs": asdict(self.costs),
            "plain_tokens_per_second": self.plain_speed,
            "best_tokens_per_second": self.best_speed,
            "best_num_draft_tokens": 0 if best is None else best.num_draft_tokens,
            "break_even_acceptance": self.prediction.break_even,
            "by_num_draft_tokens": [asdict(each) for each in self.prediction.by_k],
            "plain_per_million_tokens": self.per_million(self.plain_speed),
            "best_per_million_tokens": self.per_million(self.best_speed),
        }


def make_plan(
    target: ModelShape,
    draft: ModelShape | None,
    machine: Machine,
    acceptance: ChainAcceptance,
    options: PlanOptions,
    costs: CostsByK | None = None,
) -> SpeculationPlan:
    """Predict memory, seconds and speeds.

    Args:
        draft: a draft model or head; None: drafting without a model.
        costs: measured in the engine here; None: by the roofline.

    Raises:
        ConfigError: a number format is not known.
    """
    if options.precision is not None:
        target = _in_format(target, options.precision)
        draft = None if draft is None else _in_format(draft, options.precision)
    cache = min(max(target.weight_bytes, PRECISIONS[DEFAULT_DTYPE]), _FULL)
    placed = Placed(target, machine, cache, options.tensor_parallel, options.synchronisation)
    beside = None if draft is None else Placed(draft, machine, cache)
    source = BOUND if machine.overheads is None else CALIBRATED
    if costs is not None:
        source = MEASURED
    if options.step_ms:
        source = GIVEN
        costs = given_costs(options.step_ms)
    costs = costs or roofline_costs(placed, beside, options.batch, options.context, options.most)
    positions = options.batch * options.context
    memory = MemoryEstimate(
        placed.weights,
        placed.cache(positions),
        None if beside is None else beside.weights,
        None if beside is None else beside.cache(positions),
        None if machine.memory is None else machine.memory * options.tensor_parallel,
    )
    prediction = SpeedPrediction.of(costs, acceptance.gains(costs.most))
    if options.step_ms:
        prediction = replace(
            prediction, by_k=tuple(e for e in prediction.by_k if e.num_draft_tokens in options.step_ms)
        )
    return SpeculationPlan(target, draft, machine.name, source, memory, costs, prediction, options.batch, options.price)


def given_costs(step_ms: Mapping[int, float]) -> CostsByK:
    """Return the costs of steps of which some are known; others lie on a line between. step_ms: K -> milliseconds."""
    points = sorted(step_ms)
    steps = np.interp(range(points[-1] + 1), points, [step_ms[k] / 1000 for k in points]).tolist()
    nothing = [0.0] * len(steps)
    return CostsByK(steps[0], steps, nothing, nothing)


def _in_format(shape: ModelShape, precision: str) -> ModelShape:
    """Return the shape with its weights in another number format. Raises ConfigError if it is not known."""
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision is {precision!r}, but must be one of {', '.join(PRECISIONS)}.")
    return replace(shape, number_format=precision, weight_bytes=PRECISIONS[precision])
