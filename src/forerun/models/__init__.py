"""Language models: Transformers' weights with forerun's attention, linear layers and row layout."""

from forerun.models.base import Exactness, Forward, LanguageModel, Rows, StandIn, identity, number_format
from forerun.models.loading.load import (
    find_tokenizer,
    inherited_dtype,
    load_draft_model,
    load_model,
    load_tokenizer,
    load_transformers_model,
)
from forerun.models.model import Model
from forerun.models.weight_plan import check_quantization

__all__ = [
    "Exactness",
    "Forward",
    "LanguageModel",
    "Model",
    "Rows",
    "StandIn",
    "check_quantization",
    "find_tokenizer",
    "identity",
    "inherited_dtype",
    "load_draft_model",
    "load_model",
    "load_tokenizer",
    "load_transformers_model",
    "number_format",
]
