"""The models: Transformers' weights under forerun's attention, packed linear layers and row layout."""

from forerun.models.loading import load_model, load_tokenizer
from forerun.models.model import Exactness, Model
from forerun.models.rows import Rows

__all__ = ["Exactness", "Model", "Rows", "load_model", "load_tokenizer"]
