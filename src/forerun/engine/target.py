"""The target of an LLM: loaded by its name, or handed in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from forerun.config import MEMORY_LOG, EngineConfig
from forerun.drafters import Drafter
from forerun.engine.memory_plan import MemoryPlan
from forerun.errors import ConfigError, DrafterError, ModelLoadError
from forerun.models import LanguageModel, find_tokenizer, load_model

_log = logging.getLogger(MEMORY_LOG)
Drafters = str | Path | Drafter | Sequence[str | Path | Drafter] | None


def open_target(
    target: str | Path | LanguageModel,
    drafter: Drafters,
    config: EngineConfig,
    tokenizer: Any,
    *,
    dtype: str,
    device: str,
    adapter: str | Path | None,
    quantize: str | None,
) -> tuple[LanguageModel, Any]:
    """The model and its tokenizer: the one that is given, else that which lies beside the model.

    Raises:
        ConfigError, ModelLoadError, NotEnoughMemoryError: as `LLM`.
    """
    if isinstance(target, nn.Module):
        raise ConfigError(
            f"the target is a {type(target).__name__} of another library's in memory. Give its name or folder, or "
            "generate with it: custom_generate=forerun.integrations.transformers.Speculative()."
        )
    if not isinstance(target, (str, Path)):
        _check_loaded(adapter, quantize)
        return target, tokenizer
    with suppress(ConfigError, ModelLoadError, DrafterError):  # whatever else is wrong is told by loading
        plan = MemoryPlan.of(target, drafter, config, dtype=dtype, device=device, adapter=adapter, quantize=quantize)
        _log.info("%s", plan)
    model = load_model(target, dtype, device=device, adapter=adapter, quantize=quantize)
    return model, tokenizer or find_tokenizer(target, adapter)


def _check_loaded(adapter: str | Path | None, quantize: str | None) -> None:
    """Raise ConfigError where a loaded model is to be changed."""
    if adapter is not None:
        raise ConfigError(
            f"adapter is {str(adapter)!r}, but the target is a loaded model, and an adapter is merged before a model "
            "is. Give the target's name, or load it with its adapter."
        )
    if quantize is not None:
        raise ConfigError(
            f"quantize is {quantize!r}, but the target is a loaded model, and weights are quantised as they are read. "
            "Give the target's name, or load it with quantize."
        )
