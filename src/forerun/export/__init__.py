"""Models and heads as folders: in the formats of other programs, and quantised."""

from forerun.export.files import Exported
from forerun.export.head import export_head
from forerun.export.hf import export_hf
from forerun.export.quantised import export_quantised
from forerun.export.vllm import ExportedHead, export_vllm

__all__ = ["Exported", "ExportedHead", "export_head", "export_hf", "export_quantised", "export_vllm"]
