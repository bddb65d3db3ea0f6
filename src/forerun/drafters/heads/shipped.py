"""Heads that come with forerun, found by the target's weights, whatever file or number format these come from."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from forerun.config import SHIPPED_HEADS
from forerun.drafters.heads.fingerprint import Fingerprint, FingerprintedTarget, same_target, target_fingerprint
from forerun.drafters.heads.folder import CONFIG, head_settings
from forerun.errors import UnsupportedModelError


def shipped_head(target: FingerprintedTarget, kind: str = "eagle") -> Path | None:
    """Return the folder of the shipped head that was trained for these weights; None if there is none.

    Args:
        kind: a folder of `SHIPPED_HEADS`, which holds one folder a target.

    Raises:
        ModelLoadError: a shipped head is damaged.
    """
    of_this_size = [
        (folder, fingerprint)
        for folder, fingerprint in _shipped(SHIPPED_HEADS / kind)
        if (parsed := Fingerprint.parse(fingerprint)) is not None and parsed.vocab_size == target.vocab_size
    ]
    if not of_this_size:
        return None
    try:
        wanted = target_fingerprint(target)
    except UnsupportedModelError:
        return None
    return next((folder for folder, fingerprint in of_this_size if same_target(fingerprint, wanted)), None)


@lru_cache
def _shipped(place: Path) -> tuple[tuple[Path, str], ...]:
    """Return the folders of heads, and the fingerprints of their targets."""
    folders = (folder for folder in sorted(place.glob("*")) if (folder / CONFIG).is_file())
    return tuple((folder, head_settings(folder).fields("target").string("fingerprint")) for folder in folders)
