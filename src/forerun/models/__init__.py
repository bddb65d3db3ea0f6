"""The models: Transformers' weights under forerun's attention, packed linear layers and row layout."""

from forerun.models.base import Exactness, Forward, LanguageModel, Rows, StandIn, identity
from forerun.models.loading import load_model, load_tokenizer
from forerun.models.model import Model

__all__ = [
    "Exactness",
    "Forward",
    "LanguageModel",
    "Model",
    "Rows",
    "StandIn",
    "identity",
    "load_model",
    "load_tokenizer",
]
