"""Medusa heads draft chains, or trees of the shape that their accuracies make best (Cai et al., 2401.10774).

Each head has a distribution of its own, independent of the others, so that a drawn chain or tree is drawn from a
product of known distributions. Heads in Hydra's order (2402.05109) read the tokens drafted so far, and draft one after
another.
"""

from __future__ import annotations

from pathlib import Path

from forerun.drafters.base import Binding
from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.growth.heads_tree import HeadsTreeGrowth
from forerun.drafters.growth.tree import MIN_GAIN, WIDTH
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.models.heads.config import HeadConfig, StoredHead
from forerun.drafters.models.medusa.drafting import MedusaHeads

_PRIOR_WEIGHT = 16.0
"""Trials that a stored accuracy counts as, beside those of the running engine, of which about the last fifty count."""


class Medusa(ModelDrafter):
    """Drafts chains with heads that read the target's last state, all tokens in one pass.

    They draft no more tokens than there are heads.

    Args:
        model: folder of the heads, or heads that were read.
    """

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None = None) -> None:
        heads = MedusaHeads(model)
        super().__init__("Medusa", heads, ChainGrowth(heads, heads.first_tokens))


class MedusaTree(ModelDrafter):
    """Drafts trees with heads that read the target's last state.

    A static tree has the shape that is best by the accuracies stored with the heads, and by those measured since.

    Args:
        model: folder of the heads, or heads that were read.
        shape: "dynamic" or "static".
        drawn: draw the children for requests without a seed above temperature 0; False takes the most probable ones.
        width: nodes expanded at one depth of a dynamic tree, and children looked at below each (1 or more).
        min_gain: accepted tokens that one more depth must promise a dynamic tree (0 to below 1).

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        model: str | Path | StoredHead[HeadConfig] | None = None,
        shape: str = "static",
        drawn: bool = True,
        *,
        width: int = WIDTH,
        min_gain: float = MIN_GAIN,
    ) -> None:
        self._heads = MedusaHeads(model)
        self._tree_growth = HeadsTreeGrowth(self._heads, shape, drawn, width, min_gain)
        super().__init__("MedusaTree", self._heads, self._tree_growth)

    def bind(self, binding: Binding) -> None:
        """Bind the heads, and start from the acceptance that was stored with them."""
        super().bind(binding)
        config = self._heads.heads.config
        if config.accuracies:
            self._tree_growth.start_from(config.accuracies, config.num_heads, _PRIOR_WEIGHT)
