"""What a drafter is told about the target it is to draft for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from forerun.models import Model


@dataclass(frozen=True, slots=True)
class Binding:
    """The target's side of the pair.

    Attributes:
        target: the model that verifies.
        tokenizer: the target's; None if it has none.
        seed: for the drafter's own draws; never the seed of the engine's noise, which must be independent.
    """

    target: Model
    tokenizer: Any = None
    seed: int | None = None


@runtime_checkable
class Bindable(Protocol):
    """A drafter that must see the target before its first sequence."""

    def bind(self, binding: Binding) -> None:
        """Load what is needed. Raises DrafterError or ModelLoadError if this target cannot be drafted for."""
