"""An EAGLE head drafts chains (Li et al., 2401.15077; EAGLE-3: 2503.01840), or trees that grow where it is confident
(EAGLE-2: 2406.16858)."""

from __future__ import annotations

from pathlib import Path

from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.growth.tree import MIN_GAIN, WIDTH, TreeGrowth
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.models.eagle.drafting import eagle_head
from forerun.drafters.models.heads.config import HeadConfig, StoredHead


class Eagle(ModelDrafter):
    """Drafts chains with a head that reads the target's hidden states. Its tokens are picked as a draft model's are.

    Args:
        model: folder of the head, or a head that was read; None takes the one that comes with forerun for the target.
        draft_vocab: tokens that it can propose (1,000 or more; 0 for all), as in DraftModel, of a head that could
            propose every token.

    Raises:
        ConfigError: draft_vocab is out of range.
    """

    def __init__(
        self, model: str | Path | StoredHead[HeadConfig] | None = None, *, draft_vocab: int | None = None
    ) -> None:
        head = eagle_head(model, draft_vocab)
        super().__init__("Eagle", head, ChainGrowth(head))


class EagleTree(ModelDrafter):
    """Drafts trees with a head that reads the target's hidden states. They grow as a draft model's do.

    Args:
        model: folder of the head, or a head that was read; None takes the one that comes with forerun for the target.
        shape: "dynamic" or "static".
        drawn: draw the children for requests without a seed above temperature 0; False takes the most probable ones.
        width: nodes expanded at one depth of a dynamic tree, and children looked at below each (1 or more).
        min_gain: accepted tokens that one more forward of the head must promise a dynamic tree (0 to below 1).
        draft_vocab: tokens that it can propose (1,000 or more; 0 for all), as in Eagle.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        model: str | Path | StoredHead[HeadConfig] | None = None,
        shape: str = "dynamic",
        drawn: bool = True,
        *,
        width: int = WIDTH,
        min_gain: float = MIN_GAIN,
        draft_vocab: int | None = None,
    ) -> None:
        head = eagle_head(model, draft_vocab)
        super().__init__("EagleTree", head, TreeGrowth(head, shape, drawn, width, min_gain))
