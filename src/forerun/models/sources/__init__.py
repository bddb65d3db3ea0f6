"""Where models come from: Transformers folders and GGUF files, behind one contract."""

from forerun.models.sources.base import ModelSource
from forerun.models.sources.find import find_source

__all__ = ["ModelSource", "find_source"]
