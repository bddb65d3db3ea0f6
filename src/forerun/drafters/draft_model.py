"""A small model of the same vocabulary drafts a chain (Leviathan et al., 2211.17192; Chen et al., 2302.01318), all at
once where it was tuned for that (PARD, 2504.18583), or a branching tree (Sequoia, 2402.12374; EAGLE-2, 2406.16858)."""

from __future__ import annotations

from pathlib import Path

from forerun.drafters.base import Binding
from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.growth.parallel import ParallelGrowth, masked_rows
from forerun.drafters.growth.tree import MIN_GAIN, WIDTH, TreeGrowth
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.models.draft_model import draft_model
from forerun.models import LanguageModel


class DraftModel(ModelDrafter):
    """Drafts chains with a causal language model that shares the target's vocabulary.

    Given a minimum acceptance probability, a chain ends where the probability that all of it is accepted, as measured
    for the draft model's probabilities, no longer exceeds it. A model whose configuration names a mask token
    (`pard_token`) computes all tokens of a chain in one forward.

    Args:
        model: "bundled-draft", a folder, a hub id, or a loaded model; None means the bundled draft, which belongs to
            the bundled target, and for other targets, with `quantize`, the target itself.
        dtype: of its weights; None takes the target's, or float32 where that is float64 and the draft
            is quantized.
        quantize: "int8" or "int4", what its weights are kept in; None: as its files are.
        draft_vocab: tokens that it can propose (1,000 or more), which are those of requests, special ones and for the
            rest the lowest ids, by the native kernels; 0 for all; None for 49,152 where they compute it and its
            vocabulary has more than twice as many. Of a model that was trained to propose some tokens, these come
            before the lowest ids, and None is for these and some of requests.

    Raises:
        ConfigError: an option is out of range.

    The model is loaded when an LLM takes the drafter (`bind`).
    """

    def __init__(
        self,
        model: str | Path | LanguageModel | None = None,
        *,
        dtype: str | None = None,
        quantize: str | None = None,
        draft_vocab: int | None = None,
    ) -> None:
        drafting_model = draft_model(model, dtype, quantize, draft_vocab)
        super().__init__("DraftModel", drafting_model, ChainGrowth(drafting_model))

    def bind(self, binding: Binding) -> None:
        """Read the model, and see how it drafts. Raises as `ModelDrafter.bind`."""
        super().bind(binding)
        if self.model.mask_token is not None:
            self.growth = ParallelGrowth(self.drafting_model, masked_rows)
            self.growth.seed(binding.seed)


class DraftTree(ModelDrafter):
    """Drafts trees with a causal language model that shares the target's vocabulary.

    A dynamic tree expands the most probable nodes, all of one depth in one forward, and keeps the best of all nodes. A
    static one has the shape that measured acceptance by depth and rank makes best. Drawn trees are always of such a
    shape, since a token that was drawn must not be dropped for what it is. A model that can draft in parallel computes
    token after token here, as it was trained to do too.

    Args:
        model: "bundled-draft", a folder, a hub id, or a loaded Model; None means the bundled draft, which belongs to
            the bundled target, and for other targets, with `quantize`, the target itself.
        shape: "dynamic" or "static".
        drawn: draw the children for requests without a seed above temperature 0; False takes the most probable ones.
        width: nodes expanded at one depth of a dynamic tree, and children looked at below each (1 or more).
        min_gain: accepted tokens that one more forward of the draft model must promise a dynamic tree (0 to below 1).
        dtype: of the model's weights; None takes the target's, or float32 where that is float64 and the draft
            is quantized.
        quantize: "int8" or "int4", what the model's weights are kept in; None: as its files are.
        draft_vocab: tokens that it can propose (1,000 or more; 0 for all), as in DraftModel.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        model: str | Path | LanguageModel | None = None,
        shape: str = "dynamic",
        drawn: bool = True,
        *,
        width: int = WIDTH,
        min_gain: float = MIN_GAIN,
        dtype: str | None = None,
        quantize: str | None = None,
        draft_vocab: int | None = None,
    ) -> None:
        drafting_model = draft_model(model, dtype, quantize, draft_vocab)
        growth = TreeGrowth(drafting_model, shape, drawn, width, min_gain)
        super().__init__("DraftTree", drafting_model, growth)
