"""The folder in which forerun keeps what it fetches, measures and compiles for a user."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.utils.deferred import DeferredModule

if TYPE_CHECKING:
    import platformdirs
else:
    platformdirs = DeferredModule("platformdirs")

HOME_VARIABLE = "FORERUN_HOME"
"""Environment variable: the folder. Unset or empty: `forerun` in the user's cache folder."""
COSTS_STEM = "costs"
"""In that folder, how the names of files of measured costs begin."""
BELONGING_STEM = "belonging"
"""In that folder, how the names of files of the drafts that were found begin."""
PREFETCHING_STEM = "prefetching"
"""In that folder, how the names of files of prefetch distances begin."""
SELF_TESTS_STEM = "self-tests"
"""In that folder, how the names of files of passed self-tests begin."""
KERNELS_FOLDER = "kernels"
"""In that folder: compiled kernels."""
TOKENIZERS_FOLDER = "tokenizers"
"""In that folder: an empty file for each tokenizer that passed its trial."""


def home() -> Path | None:
    """Return FORERUN_HOME, else $XDG_CACHE_HOME/forerun, else ~/.cache/forerun, on macOS ~/Library/Caches/forerun, on
    Windows %LOCALAPPDATA%\\forerun\\Cache; it need not exist.

    None for a user without a home, where no variable says otherwise.
    A relative FORERUN_HOME counts from the working directory. A relative XDG_CACHE_HOME is ignored, as the XDG Base
    Directory Specification demands.
    """
    chosen = os.environ.get(HOME_VARIABLE)
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if base.is_absolute():
            return base / "forerun"
        if sys.platform in ("darwin", "win32"):
            return platformdirs.user_cache_path("forerun", appauthor=False)
        return Path.home() / ".cache" / "forerun"
    except RuntimeError:  # a user without a home
        return Path(chosen).absolute() if chosen else None
