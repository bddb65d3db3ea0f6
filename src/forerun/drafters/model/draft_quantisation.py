"""What a draft model's weights may be kept in."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ConfigError
from forerun.models import LanguageModel, check_quantisation


def check_draft_quantisation(
    quantize: str | None, model: str | Path | LanguageModel | None, dtype: str | None = None
) -> None:
    """Raises ConfigError where there is no such quantisation, or the draft model's weights have been read."""
    check_quantisation(quantize, dtype)
    if quantize is not None and isinstance(model, LanguageModel):
        raise ConfigError(
            f"quantize is {quantize!r}, but the draft model is a loaded one, and weights are quantised as they are "
            "read. Give its name, or load it with quantize."
        )
