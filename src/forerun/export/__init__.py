"""Models and heads as folders: in the formats of other programs, and quantised."""

from forerun.export.files import Exported
from forerun.export.head import export_head
from forerun.export.hf import export_hf
from forerun.export.llama_cpp import ExportedGguf, export_llama_cpp
from forerun.export.quantised import export_quantised
from forerun.export.vllm import ExportedForVllm, export_vllm
from forerun.export.vllm_draft import export_vllm_draft

__all__ = [
    "Exported",
    "ExportedForVllm",
    "ExportedGguf",
    "export_head",
    "export_hf",
    "export_llama_cpp",
    "export_quantised",
    "export_vllm",
    "export_vllm_draft",
]
