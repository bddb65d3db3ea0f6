"""Models as folders: in the formats of other programs, and quantised."""

from forerun.export.files import Exported
from forerun.export.hf import export_hf
from forerun.export.quantised import export_quantised

__all__ = ["Exported", "export_hf", "export_quantised"]
