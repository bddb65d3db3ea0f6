"""Drafting methods, one folder or file each, and the table of their names."""

from typing import TYPE_CHECKING

from forerun.drafters.registry import DRAFTERS as DRAFTERS, DrafterRow as DrafterRow
from forerun.utils.deferred import exporting

if TYPE_CHECKING:
    from forerun.drafters.base import Binding as Binding, Drafter as Drafter, Traits as Traits
    from forerun.drafters.block import Block as Block
    from forerun.drafters.build import (
        build_drafter as build_drafter,
        build_drafters as build_drafters,
        check_drafter_text as check_drafter_text,
        chosen_drafter as chosen_drafter,
        make_drafter as make_drafter,
    )
    from forerun.drafters.cross_vocab import CrossVocab as CrossVocab
    from forerun.drafters.draft_model import DraftModel as DraftModel, DraftTree as DraftTree
    from forerun.drafters.eagle import Eagle as Eagle, EagleTree as EagleTree
    from forerun.drafters.early_exit import EarlyExit as EarlyExit
    from forerun.drafters.hybrid.hybrid import Hybrid as Hybrid
    from forerun.drafters.lookup.lookahead import Lookahead as Lookahead
    from forerun.drafters.lookup.prediction import Prediction as Prediction
    from forerun.drafters.lookup.prompt_lookup import PromptLookup as PromptLookup
    from forerun.drafters.lookup.rest.drafter import Rest as Rest
    from forerun.drafters.lookup.suffix import Suffix as Suffix
    from forerun.drafters.lookup.token_recycling import Recycling as Recycling
    from forerun.drafters.medusa import Medusa as Medusa, MedusaTree as MedusaTree
    from forerun.drafters.mtp import Mtp as Mtp
    from forerun.drafters.staged import Staged as Staged

# Names are fetched on first use, so that the table can be read without loading torch.
_HOME_OF = {
    **dict.fromkeys(("Binding", "Drafter", "Traits"), "forerun.drafters.base"),
    **dict.fromkeys(("build_drafter", "build_drafters", "make_drafter"), "forerun.drafters.build"),
    **dict.fromkeys(("check_drafter_text", "chosen_drafter"), "forerun.drafters.build"),
    **{row.class_name: row.module for row in DRAFTERS.values()},
}
__getattr__ = exporting(__name__, _HOME_OF)
