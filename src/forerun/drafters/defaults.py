"""Which drafter a target gets, by what was asked for: AUTO, a list, none."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from forerun.config import AUTO, BUNDLED_TARGET, DEFAULT_DRAFTER, NO_DRAFTER
from forerun.drafters.base import Drafter
from forerun.drafters.build import build_drafter, build_drafters
from forerun.models import LanguageModel

_OF_BUNDLED = "draft-model"


def chosen_drafter(
    drafter: str | Path | Drafter | Seq[str | Path | Drafter] | None, target: LanguageModel | str | Path
) -> str | Path | Drafter | None:
    """What was asked for; None for plain decoding. For AUTO the fastest as measured (docs/methods.md) of those that
    serve the target without options. For a list, the drafter that has them all, from which requests choose.

    A head that is shipped for the target is not taken: its hybrid with suffix matches accepts more tokens a step than
    suffix matches alone, and was not measured to be faster (docs/training.md).

    Args:
        target: or its name, before it is loaded.

    Raises:
        DrafterError, ConfigError: as `build_drafters`, of a list.
    """
    if isinstance(drafter, Seq) and not isinstance(drafter, str):
        return build_drafters([chosen_drafter(each, target) for each in drafter])
    if drafter == NO_DRAFTER:
        return None
    if drafter != AUTO:
        return drafter
    name = str(target) if isinstance(target, (str, Path)) else target.name
    return _OF_BUNDLED if name == BUNDLED_TARGET else DEFAULT_DRAFTER


def check_drafter_text(
    drafter: str | Path | Drafter | Seq[str | Path | Drafter] | None, target: LanguageModel | str | Path
) -> None:
    """Find what is wrong with a drafter's name or options, or those of several, before anything is loaded.

    Args:
        target: as of `chosen_drafter`.

    Raises:
        DrafterError, ConfigError: as `build_drafter` and `build_drafters`.
    """
    chosen = chosen_drafter(drafter, target)
    if chosen is not None:
        build_drafter(chosen)
