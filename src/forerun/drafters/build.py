"""Builds drafters from what users give: a name, a folder or id, or an object."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from forerun.config import (
    AUTO,
    BUNDLED_DRAFT,
    BUNDLED_OTHER_VOCAB,
    BUNDLED_TARGET,
    DEFAULT_DRAFTER,
    NO_DRAFTER,
    NumDraftTokens,
)
from forerun.drafters.base import Binding, Drafter
from forerun.drafters.parse_text import hybrid_of, parse_drafter, split_spec
from forerun.drafters.registry import DRAFTERS
from forerun.drafters.validation import check_drafter
from forerun.errors import DrafterError, ForerunError
from forerun.models import LanguageModel
from forerun.models.loading.folder import GGUF_SUFFIX
from forerun.utils import fetch as store
from forerun.utils.deferred import DeferredModule
from forerun.utils.stores import find_stored

if TYPE_CHECKING:
    from forerun.drafters import belonging, third_party
    from forerun.drafters.hybrid import by_request
else:
    belonging = DeferredModule("forerun.drafters.belonging")  # what drafts alone reads no head
    third_party = DeferredModule("forerun.drafters.third_party")
    by_request = DeferredModule("forerun.drafters.hybrid.by_request")
Drafters: TypeAlias = str | Path | Drafter | Seq[str | Path | Drafter] | None


def build_drafter(spec: str | Path | Drafter) -> tuple[Drafter, NumDraftTokens | None]:
    """Build the drafter that a user named, not yet bound to a target, and return it with the K that the text names, or
    None.

    Args:
        spec: a name of the table, perhaps with options (NAME:key=value,key=value; num_draft_tokens=K is one of every
            drafter's); likewise the name of an installed package's drafter, or module:Class; the folder, .gguf file or
            hub id of a draft model; or a drafter.

    Raises:
        DrafterError: an unknown name or option; not a drafter.
        ConfigError: an option is out of range.
    """
    if isinstance(spec, str):
        name, _, _ = spec.partition(":")
        if name in DRAFTERS:
            return parse_drafter(spec, DRAFTERS[name].make)
        is_model = Path(spec).exists() or find_stored(spec) is not None
        if not is_model and (found := third_party.find_class(spec)) is not None:
            return parse_drafter(found[1], found[0])
    if isinstance(spec, (str, Path)):
        _check_source(spec)
        return DRAFTERS["draft-model"].make(spec), None
    if isinstance(spec, (Drafter, type)):
        check_drafter(spec)
        return spec, None
    raise DrafterError(
        f"drafter is {spec!r}, but must be one of {', '.join(DRAFTERS)}, the folder or id of a draft model, "
        "or an object whose class derives from forerun.Drafter."
    )


def build_drafters(specs: Seq[str | Path | Drafter | None]) -> by_request.ByRequest:
    """Build several drafters among which requests choose by name: that of the table or of the class.

    Raises:
        DrafterError, ConfigError: as `build_drafter`; two of them have one name, or one is no drafter at all.
    """
    drafters: dict[str, Drafter] = {}
    own_k: dict[str, NumDraftTokens] = {}
    for spec in specs:
        if spec is None or spec == NO_DRAFTER:
            raise DrafterError(
                f"None or {NO_DRAFTER!r} is in a list of drafters, but any request may ask for none of them "
                f"(SamplingParams.drafter={NO_DRAFTER!r}). Leave it out, or give it alone."
            )
        drafter, k = build_drafter(spec)
        class_name = type(drafter).__name__
        name = next((name for name, row in DRAFTERS.items() if row.class_name == class_name), class_name)
        if name in drafters:
            raise DrafterError(f"Two drafters are called {name!r}, but requests choose by name. Give one of each kind.")
        drafters[name] = drafter
        if k is not None:
            own_k[name] = k
    return by_request.ByRequest(drafters, own_k)


def make_drafter(spec: str | Path | Drafter, binding: Binding) -> tuple[Drafter, NumDraftTokens | None]:
    """Build a drafter and bind it to its target.

    Raises:
        DrafterError, ConfigError: as build_drafter; IncompatibleDrafterError: it does not fit the target.
        ModelLoadError: the draft model cannot be read.
    """
    drafter, num_draft_tokens = build_drafter(spec)
    drafter.bind(binding)
    return drafter, num_draft_tokens


def _check_source(spec: str | Path) -> None:
    """Raise DrafterError for a text that is neither a known name, nor a folder, nor like a hub id."""
    if (
        isinstance(spec, Path)
        or spec in (BUNDLED_DRAFT, BUNDLED_OTHER_VOCAB, *store.fetchable_names())
        or "/" in spec
        or "\\" in spec
        or spec.lower().endswith(GGUF_SUFFIX)
        or Path(spec).exists()
        or find_stored(spec) is not None
    ):
        return
    if spec == BUNDLED_TARGET:
        raise DrafterError(
            f"drafter is {spec!r}, which is the bundled target. Give the draft model that belongs to it: "
            f"{BUNDLED_DRAFT!r}."
        )
    near = get_close_matches(spec.partition(":")[0], DRAFTERS, 1)
    raise DrafterError(
        f"drafter is {spec!r}, which is neither a known name ({', '.join(DRAFTERS)}) nor a folder. "
        f"{f'Did you mean {near[0]}? ' if near else ''}"
        "Give one of the names, module:Class, or the folder, .gguf file or hub id (owner/name) of a draft model."
    )


def chosen_drafter(drafter: Drafters, target: LanguageModel | str | Path) -> str | Path | Drafter | None:
    """Resolve the drafter of a target; None for plain decoding. For AUTO this is `automatic_drafter`; for a list, a
    drafter from which requests choose.

    Args:
        target: or its name, before it is loaded. A hybrid without sources has those that there are for it.

    Raises:
        DrafterError, ConfigError: as `build_drafters`, of a list.
    """
    if isinstance(drafter, Seq) and not isinstance(drafter, str):
        if AUTO in drafter and automatic_drafter(_name(target)).startswith("hybrid:"):
            drafter = with_auto(drafter, found_for(drafter, target) or DEFAULT_DRAFTER)
        return build_drafters([chosen_drafter(each, target) for each in _several(drafter)])
    if drafter == NO_DRAFTER:
        return None
    if drafter == AUTO:
        return automatic_drafter(_name(target))
    is_hybrid = isinstance(drafter, str) and drafter.partition(":")[0] == "hybrid"
    return _with_sources(str(drafter), _name(target)) if is_hybrid else drafter


def _name(target: LanguageModel | str | Path) -> str:
    return str(target) if isinstance(target, (str, Path)) else target.name


def _with_sources(hybrid: str, target: str) -> str:
    """Return the text of a hybrid, with the sources that there are for the target if it has none."""
    options = split_spec(hybrid)[1]
    if target == BUNDLED_TARGET or "sources" in options:
        return hybrid
    return hybrid_of(DEFAULT_DRAFTER, *_best(target), **options)


def automatic_drafter(target: str) -> str:
    """Return what AUTO stands for: the bundled draft model for the bundled target, else suffix matches, in a hybrid
    with the best head or draft model on this machine that belongs to the target of this name."""
    if target == BUNDLED_TARGET:
        return "draft-model"
    best = _best(target)
    return hybrid_of(DEFAULT_DRAFTER, *best) if best else DEFAULT_DRAFTER


def _best(target: str) -> list[str]:
    """Return the text of the best that belongs to a target; empty if nothing does."""
    with suppress(ForerunError, OSError):  # the target is no model of a file or folder
        return [found.text for found in belonging.belonging(target)[:1]]
    return []


def _several(drafter: Drafters) -> list[str | Path | Drafter | None]:
    return [*drafter] if isinstance(drafter, Seq) and not isinstance(drafter, str) else [drafter]


def found_for(drafter: Drafters, target: LanguageModel | str | Path) -> str | None:
    """Return the hybrid that AUTO stands for; None if AUTO is not among the drafters, stands for something else, or
    another of them is a hybrid: requests choose by name."""
    several = _several(drafter)
    if AUTO not in several or any(_is_called(each, "hybrid") for each in several):
        return None
    text = automatic_drafter(_name(target))
    return text if text.startswith("hybrid:") else None


def with_auto(drafter: Drafters, auto: str) -> Drafters:
    """Return the drafter, or several, with this text in place of AUTO. Several have suffix matches once, alone too,
    since requests may name what AUTO was before something was found: those that are given, else the default ones."""
    if not isinstance(drafter, Seq) or isinstance(drafter, str):
        return auto if drafter == AUTO else drafter
    if AUTO not in drafter:
        return drafter
    suffix = next((each for each in drafter if _is_called(each, DEFAULT_DRAFTER)), DEFAULT_DRAFTER)
    if auto != DEFAULT_DRAFTER:
        return [*(auto if each == AUTO else each for each in drafter), *([] if suffix in drafter else [suffix])]
    others = [each for each in drafter if each is not suffix]
    return [suffix if each == AUTO else each for each in others]


def _is_called(drafter: str | Path | Drafter | None, name: str) -> bool:
    """Return whether requests choose the drafter by this name of the table."""
    if isinstance(drafter, str):
        return drafter.partition(":")[0] == name
    return type(drafter).__name__ == DRAFTERS[name].class_name


def check_drafter_text(drafter: Drafters, target: LanguageModel | str | Path) -> None:
    """Find what is wrong with a drafter's name or options, or those of several, before anything is loaded.

    Args:
        target: as of `chosen_drafter`.

    Raises:
        DrafterError, ConfigError: as `build_drafter` and `build_drafters`.
    """
    chosen = chosen_drafter(with_auto(drafter, DEFAULT_DRAFTER), target)
    if chosen is not None:
        build_drafter(chosen)
    several = _several(drafter)
    if AUTO in several and any(_is_called(each, DEFAULT_DRAFTER) for each in several):
        chosen_drafter(drafter, target)  # where AUTO is suffix matches, these are there twice
