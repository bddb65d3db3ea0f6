"""The kinds of heads: the shape of each, its tensors, and the name of its form on disk."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.heads.block_config import BlockConfig, block_tensors
from forerun.heads.eagle_config import EagleConfig, eagle_tensors

HeadConfig = EagleConfig | BlockConfig

FORMATS: Mapping[str, type[HeadConfig]] = {"forerun-eagle": EagleConfig, "forerun-block": BlockConfig}
"""What "format" says in config.json of forerun's form."""


def head_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every trained tensor of a head by name, with its shape."""
    return eagle_tensors(config) if isinstance(config, EagleConfig) else block_tensors(config)


def format_of(config: HeadConfig) -> str:
    """The name of its form."""
    return next(name for name, kind in FORMATS.items() if isinstance(config, kind))
