"""Where drafts come from: one file per method, and a table of names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forerun.drafters.registry import DRAFTERS as DRAFTERS, DrafterRow as DrafterRow

if TYPE_CHECKING:
    from forerun.drafters.base import Binding as Binding, Drafter as Drafter, Traits as Traits
    from forerun.drafters.build import (
        build_drafter as build_drafter,
        build_drafters as build_drafters,
        check_drafter_text as check_drafter_text,
        chosen_drafter as chosen_drafter,
        make_drafter as make_drafter,
    )
    from forerun.drafters.registry import *  # noqa: F403

# Names are fetched on first use, so that the table can be read without loading torch.
_HOME_OF = {
    **dict.fromkeys(("Binding", "Drafter", "Traits"), "base"),
    **dict.fromkeys(("build_drafter", "build_drafters", "make_drafter"), "build"),
    **dict.fromkeys(("check_drafter_text", "chosen_drafter"), "build"),
    **{row.class_name: row.home.partition(":")[0] for row in DRAFTERS.values()},
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'forerun.drafters' has no attribute {name!r}")
    value = getattr(import_module(f"forerun.drafters.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
