"""Trained draft heads: their configuration, their tensors, and the folders that they lie in."""

from forerun.heads.block_config import BlockConfig
from forerun.heads.config import HeadConfig
from forerun.heads.eagle_config import EagleConfig
from forerun.heads.folder import is_head, load_head, save_head
from forerun.heads.medusa_config import MedusaConfig
from forerun.heads.stored import StoredHead
from forerun.heads.tensors import unset_tensors

__all__ = [
    "BlockConfig",
    "EagleConfig",
    "HeadConfig",
    "MedusaConfig",
    "StoredHead",
    "is_head",
    "load_head",
    "save_head",
    "unset_tensors",
]
