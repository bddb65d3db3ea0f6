"""Trained draft heads: their configuration, their tensors, and the folders that they lie in."""

from forerun.heads.block_config import BlockConfig, block_tensors
from forerun.heads.eagle_config import EagleConfig, eagle_tensors
from forerun.heads.folder import load_head, save_head
from forerun.heads.kinds import HeadConfig, head_tensors
from forerun.heads.stored import StoredHead
from forerun.heads.tensors import unset_tensors

__all__ = [
    "BlockConfig",
    "EagleConfig",
    "HeadConfig",
    "StoredHead",
    "block_tensors",
    "eagle_tensors",
    "head_tensors",
    "load_head",
    "save_head",
    "unset_tensors",
]
