"""What is said of a target that computes logits which are NaN or infinite."""

from __future__ import annotations

from forerun.errors import NonFiniteError
from forerun.models import LanguageModel
from forerun.models.non_finite import first_non_finite_tensor


class Diagnosis:
    """Why one target's logits are not finite. Its weights are looked through once, after the first such row."""

    def __init__(self, target: LanguageModel) -> None:
        self._target = target
        self._cause: str | None = None

    def error(self) -> NonFiniteError:
        """The error of a request whose next token would depend on such a row."""
        if self._cause is None:
            tensor = first_non_finite_tensor(self._target)
            if tensor is None:
                self._cause = (
                    "No such number was found in its weights. A wider number format may help: dtype='float32'."
                )
            else:
                self._cause = f"Its weights hold such numbers, first in {tensor}. Get them anew, or another model."
        return NonFiniteError(
            f"{self._target.name} computed logits that are NaN or infinite, from which no token can be chosen. "
            f"{self._cause}"
        )
