"""The drafters by name. A new one is one file, one row here, one test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET
from forerun.drafters.binding import Bindable, Binding
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.errors import DrafterError
from forerun.types import Drafter


@dataclass(frozen=True, slots=True)
class DrafterRow:
    """One entry of the table.

    Attributes:
        make: builds the drafter for a target; it may raise DrafterError.
        kind: "model" if it runs a model of its own, "lookup" if it only reads text.
        description: one line for people.
    """

    make: Callable[[Binding], Drafter]
    kind: Literal["model", "lookup"]
    description: str


def _bundled_draft(binding: Binding) -> Drafter:
    if binding.target.name != BUNDLED_TARGET:
        raise DrafterError(
            f"'draft-model' alone means the bundled draft, which belongs to the bundled target, not to "
            f"{binding.target.name}. Pass the folder or id of a draft model: drafter='path/to/draft'."
        )
    return DraftModel(BUNDLED_DRAFT)


DRAFTERS: Mapping[str, DrafterRow] = {
    "draft-model": DrafterRow(_bundled_draft, "model", "a smaller model of the same vocabulary drafts a chain"),
    "prompt-lookup": DrafterRow(
        lambda _: PromptLookup(), "lookup", "copies what followed the last tokens earlier in the sequence"
    ),
}


def make_drafter(spec: str | Path | Drafter | None, binding: Binding) -> Drafter | None:
    """The drafter that a user asked for, ready to draft for this target.

    Args:
        spec: None (plain decoding), a name of the table, the folder or hub id of a draft model, or a drafter.

    Raises:
        DrafterError: unknown name; not a drafter; IncompatibleDrafterError: another vocabulary.
        ModelLoadError: the draft model cannot be read.
    """
    if spec is None:
        return None
    drafter: Drafter
    if isinstance(spec, str) and spec in DRAFTERS:
        drafter = DRAFTERS[spec].make(binding)
    elif isinstance(spec, (str, Path)):
        _check_place(spec)
        drafter = DraftModel(spec)
    elif all(callable(getattr(spec, name, None)) for name in ("start", "draft", "commit", "stop")):
        drafter = spec
    else:
        raise DrafterError(
            f"drafter is {spec!r}, but must be one of {', '.join(DRAFTERS)}, the folder or id of a draft model, "
            "or an object with start, draft, commit and stop."
        )
    if isinstance(drafter, Bindable):
        drafter.bind(binding)
    return drafter


def _check_place(spec: str | Path) -> None:
    """A word that is neither a name of the table, nor a folder, nor like a hub id, is most likely misspelt."""
    if isinstance(spec, Path) or spec == BUNDLED_DRAFT or "/" in spec or "\\" in spec or Path(spec).exists():
        return
    raise DrafterError(
        f"drafter is {spec!r}, which is neither a known name ({', '.join(DRAFTERS)}) nor a folder. "
        "Give one of the names, or the folder or hub id (owner/name) of a draft model."
    )
