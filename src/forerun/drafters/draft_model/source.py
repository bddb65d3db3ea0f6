"""Sources of draft models: the named one, or the default of the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET
from forerun.drafters.base import Binding, NamedModel
from forerun.errors import ConfigError, DrafterError
from forerun.models import LanguageModel, check_quantization, find_tokenizer, inherited_dtype, load_draft_model


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A requested draft model.

    Attributes:
        model: "bundled-draft", a folder, a hub id, or a loaded model; None means the bundled draft for the bundled
            target, and for other targets, with `quantize`, the target itself.
        dtype: of its weights; None takes the target's, or float32 where that is float64 and the draft is quantized.
        quantize: "int8" or "int4", what its weights are kept in; None: as its files are.
    """

    model: str | Path | LanguageModel | None
    dtype: str | None
    quantize: str | None

    def to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        """Return what `read` will read for a target of this name."""
        source = self.model or (BUNDLED_DRAFT if target_name == BUNDLED_TARGET else target_name)
        is_refused = source == target_name and self.model is None and self.quantize is None
        if is_refused or not isinstance(source, (str, Path)):
            return ()
        return (NamedModel(source, self.dtype, self.quantize),)

    def read(self, binding: Binding, model: LanguageModel | None) -> tuple[LanguageModel, Any]:
        """Return the draft model, and the tokenizer beside it, if there is one.

        Args:
            model: what was read before; None: nothing was.

        Raises:
            ModelLoadError: it cannot be read.
            DrafterError: none was named, and there is none for the target.
        """
        if self.model is not None and not isinstance(self.model, (str, Path)):
            return self.model, binding.tokenizer
        target = binding.target
        source = self.model or _unnamed(target.name, self.quantize)
        if model is None:
            model = load_draft_model(
                source,
                self.dtype or inherited_dtype(source, target.dtype, self.quantize),
                device=target.device,
                adapter=target.adapter if source == target.name else None,
                quantize=self.quantize,
            )
        return model, find_tokenizer(source)


def check_draft_quantization(
    quantize: str | None, model: str | Path | LanguageModel | None, dtype: str | None = None
) -> None:
    """Raise ConfigError if there is no such quantization, or if the draft model's weights have been read already."""
    check_quantization(quantize, dtype)
    if quantize is not None and isinstance(model, LanguageModel):
        raise ConfigError(
            f"quantize is {quantize!r}, but the draft model is a loaded one, and weights are quantized as they are "
            "read. Give its name, or load it with quantize."
        )


def _unnamed(target_name: str, quantize: str | None) -> str:
    """Return the draft model of a target for which none was named."""
    if target_name == BUNDLED_TARGET:
        return BUNDLED_DRAFT
    if quantize is not None:
        return target_name
    raise DrafterError(
        "A draft model without a name means the bundled draft, which belongs to the bundled target, not to "
        f"{target_name}. Pass the folder or id of a draft model: drafter='path/to/draft', or in a hybrid "
        "drafter='hybrid:sources=suffix+path/to/draft'; or let the target itself draft at 4 bits: "
        "drafter='draft-model:quantize=int4'."
    )
