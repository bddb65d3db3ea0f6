"""Models in the formats of other programs."""

from forerun.export.hf import Exported, export_hf

__all__ = ["Exported", "export_hf"]
