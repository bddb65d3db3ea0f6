"""A draft model: a causal language model that shares the target's vocabulary, the named one or the target's default."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET
from forerun.drafters.base import Acceptance, Binding, NamedModel, recorded_acceptance
from forerun.drafters.models.base import BoundModel, DraftingModel, Learnable
from forerun.drafters.models.state import DraftState
from forerun.errors import ConfigError, DrafterError
from forerun.models import LanguageModel, check_quantization, find_tokenizer, inherited_dtype, load_draft_model
from forerun.utils.deferred import DeferredModule
from forerun.utils.vocabulary import Vocabulary, check_same_tokens

if TYPE_CHECKING:
    from forerun.drafters.models import learnable_draft
else:
    learnable_draft = DeferredModule("forerun.drafters.models.learnable_draft")

DRAFT_FOLLOWS = 1024
"""`Traits.follows` of draft models: the last tokens of a sequence with which a draft model begins."""


DRAFT_ACCEPTANCE: Acceptance = ((0.7, 0.87), (0.6, 0.8))
"""That of pairs of one family, of 0.5 to 8 B parameters, where no record says more."""


class SharedVocabulary:
    """The columns of a model that shares the target's vocabulary, perhaps padded to another size (`Columns`).

    Args:
        model_size: of the model's vocabulary. target_size: of the target's.
    """

    def __init__(self, model_size: int, target_size: int) -> None:
        self._model_size = model_size
        self._target_size = target_size

    @property
    def num_columns(self) -> int:
        return min(self._model_size, self._target_size)

    def widened(self, logits: Tensor) -> Tensor:
        missing = self._target_size - logits.shape[1]
        if missing > 0:
            return functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._target_size]

    def named(self, columns: Tensor) -> Tensor:
        return columns

    def names(self, columns: list[int]) -> list[int]:
        return columns

    def readable(self, token_ids: list[int]) -> list[int]:
        """Return the tokens; ids that only the target's padding has become token 0."""
        size = self._model_size
        if size >= self._target_size:
            return token_ids
        return [token_id if token_id < size else 0 for token_id in token_ids]


class DraftSource:
    """A requested draft model (`DraftModelSource`).

    Args:
        model: "bundled-draft", a folder, a hub id, or a loaded model; None means the bundled draft for the bundled
            target, and for other targets, with `quantize`, the target itself.
        dtype: of its weights; None takes the target's, or float32 where that is float64 and the draft is quantized.
        quantize: "int8" or "int4", what its weights are kept in; None: as its files are.

    Raises:
        ConfigError: there is no such quantization, or a loaded model is to be quantized.
    """

    def __init__(self, model: str | Path | LanguageModel | None, dtype: str | None, quantize: str | None) -> None:
        check_draft_quantization(quantize, model, dtype)
        self._model = model
        self._dtype = dtype
        self._quantize = quantize
        self._loaded: LanguageModel | None = None

    def to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        source = self.file(target_name)
        is_refused = source == target_name and self._model is None and self._quantize is None
        if is_refused or source is None:
            return ()
        return (NamedModel(source, self._dtype, self._quantize),)

    def file(self, target_name: str) -> str | Path | None:
        """Return the name that the model of a target of this name is read by; None if it was given as a loaded one."""
        source = self._model or (BUNDLED_DRAFT if target_name == BUNDLED_TARGET else target_name)
        return source if isinstance(source, (str, Path)) else None

    def read(self, binding: Binding) -> BoundModel:
        """Load the model and compare its vocabulary with the target's.

        Raises:
            ModelLoadError: it cannot be read.
            IncompatibleDrafterError: its vocabulary is another.
            DrafterError: none was named, and there is none for the target.
        """
        target = binding.target
        model, tokenizer = self._read(binding)
        acceptance = DRAFT_ACCEPTANCE
        for named in self.to_load(target.name):
            found = recorded_acceptance(named.name)
            acceptance = found if any(found) else acceptance
        check_same_tokens(
            Vocabulary(target.name, target.vocab_size, binding.tokenizer),
            Vocabulary(model.name, model.vocab_size, tokenizer),
        )
        columns = SharedVocabulary(model.vocab_size, target.vocab_size)
        return BoundModel(model, columns, acceptance=acceptance)

    def _read(self, binding: Binding) -> tuple[LanguageModel, Any]:
        """Return the draft model, and the tokenizer beside it, if there is one."""
        if self._model is not None and not isinstance(self._model, (str, Path)):
            return self._model, binding.tokenizer
        target = binding.target
        source = self._model or _unnamed(target.name, self._quantize)
        if self._loaded is None:
            self._loaded = load_draft_model(
                source,
                self._dtype or inherited_dtype(source, target.dtype, self._quantize),
                device=target.device,
                adapter=target.adapter if source == target.name else None,
                quantize=self._quantize,
            )
        return self._loaded, find_tokenizer(source)


class CausalDraftModel(DraftingModel[DraftState]):
    """A causal language model. What lies far before its first draft, or its next one, costs more to compute than it
    adds to the drafts' acceptance, and is skipped."""

    follows = DRAFT_FOLLOWS

    @property
    def learnable(self) -> Learnable | None:
        bound, binding = self.given
        source = self.source
        file = source.file(binding.target.name) if isinstance(source, DraftSource) else None
        return None if file is None else learnable_draft.LearnableDraft.of(bound, file)

    def prefill(self, states: Seq[DraftState], min_tokens: int, num_computed: Seq[int] | None = None) -> None:
        for index, state in enumerate(states):
            end = len(state.sequence.token_ids) - 1 if num_computed is None else num_computed[index]
            if end - state.shift - state.cache.length > DRAFT_FOLLOWS:
                state.skip_to(end - DRAFT_FOLLOWS)
        super().prefill(states, min_tokens, num_computed)


def draft_model(
    model: str | Path | LanguageModel | None, dtype: str | None, quantize: str | None, draft_vocab: int | None
) -> DraftingModel[DraftState]:
    """Return a draft model, which is loaded when it is bound. Arguments and errors as of `DraftSource` and
    `chosen_vocabulary`."""
    return CausalDraftModel(DraftSource(model, dtype, quantize), DraftState, draft_vocab)


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
