"""Where drafts come from: one file per method, and a table of names."""

from forerun.drafters.base import Binding, Drafter, Traits
from forerun.drafters.cross_vocab.cross_vocab import CrossVocab
from forerun.drafters.hybrid.hybrid import Hybrid
from forerun.drafters.model.draft_model import DraftModel
from forerun.drafters.model.draft_tree import DraftTree
from forerun.drafters.model.staged import Staged
from forerun.drafters.table import DRAFTERS, DrafterRow, build_drafter, make_drafter
from forerun.drafters.target.early_exit import EarlyExit
from forerun.drafters.target.lookahead import Lookahead
from forerun.drafters.target.recycling import Recycling
from forerun.drafters.text.prediction import Prediction
from forerun.drafters.text.prompt_lookup import PromptLookup
from forerun.drafters.text.rest import Rest
from forerun.drafters.text.suffix import Suffix

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
