"""What is said of a draft model whose logits are no numbers."""

from __future__ import annotations

import logging

from forerun.models import LanguageModel
from forerun.models.non_finite import first_non_finite_tensor

_log = logging.getLogger(__name__)


def report_non_finite(model: LanguageModel) -> None:
    """Log that nothing is drafted from such logits, and where in the weights they come from, if they do."""
    tensor = first_non_finite_tensor(model)
    where = "" if tensor is None else f" (its weights hold such numbers, first in {tensor})"
    _log.warning(
        "The draft model %s computed logits that are NaN or infinite%s. Nothing is drafted from these; the target's "
        "text is not affected. Take another draft model.",
        model.name,
        where,
    )
