"""Where drafts come from: one file per method, and a table of names."""

from forerun.drafters.base import Binding, Drafter, Traits
from forerun.drafters.cross_vocab import CrossVocab
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.draft_tree import DraftTree
from forerun.drafters.early_exit import EarlyExit
from forerun.drafters.hybrid import Hybrid
from forerun.drafters.lookahead import Lookahead
from forerun.drafters.prediction import Prediction
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.drafters.recycling import Recycling
from forerun.drafters.rest import Rest
from forerun.drafters.staged import Staged
from forerun.drafters.suffix import Suffix
from forerun.drafters.table import DRAFTERS, DrafterRow, build_drafter, make_drafter

__all__ = [
    "DRAFTERS",
    "Binding",
    "CrossVocab",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "DrafterRow",
    "EarlyExit",
    "Hybrid",
    "Lookahead",
    "Prediction",
    "PromptLookup",
    "Recycling",
    "Rest",
    "Staged",
    "Suffix",
    "Traits",
    "build_drafter",
    "make_drafter",
]
