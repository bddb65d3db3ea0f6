"""The target of an LLM: loaded by its name, or handed in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How a target is loaded; see `LLM`."""

    dtype: str
    device: str
    adapter: str | Path | None
    quantize: str | None

    def open(
        self, target: str | Path | LanguageModel, drafter: Drafters, config: EngineConfig, tokenizer: Any
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
            self._check_loaded()
            return target, tokenizer
        self._check_memory(target, drafter, config)
        model = load_model(target, self.dtype, device=self.device, adapter=self.adapter, quantize=self.quantize)
        return model, tokenizer or find_tokenizer(target, self.adapter)

    def _check_memory(self, target: str | Path, drafter: Drafters, config: EngineConfig) -> None:
        """Plan the memory, log the plan, and refuse what does not fit. Whatever else is wrong is told by loading."""
        arguments: dict[str, Any] = {
            "dtype": self.dtype, "device": self.device, "adapter": self.adapter, "quantize": self.quantize
        }  # fmt: skip
        with suppress(ConfigError, ModelLoadError, DrafterError):
            _log.info("%s", MemoryPlan.of(target, drafter, config, **arguments))

    def _check_loaded(self) -> None:
        """Raise ConfigError where a loaded model is to be changed."""
        if self.adapter is not None:
            raise ConfigError(
                f"adapter is {str(self.adapter)!r}, but the target is a loaded model, and an adapter is merged before "
                "a model is. Give the target's name, or load it with its adapter."
            )
        if self.quantize is not None:
            raise ConfigError(
                f"quantize is {self.quantize!r}, but the target is a loaded model, and weights are quantised as they "
                "are read. Give the target's name, or load it with quantize."
            )
