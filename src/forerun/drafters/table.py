"""The drafters by name. A new one is one file, one row here, one test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun.config import BUNDLED_DRAFT, HYBRID_MODES, HYBRID_SOURCES, NumDraftTokens
from forerun.drafters.base import Binding, Drafter
from forerun.drafters.cross_vocab.cross_vocab import CrossVocab
from forerun.drafters.hybrid.hybrid import Hybrid
from forerun.drafters.model.draft_model import DraftModel
from forerun.drafters.model.draft_tree import DraftTree
from forerun.drafters.model.staged import Staged
from forerun.drafters.parse_text import K_OPTION, option_types, parse_drafter
from forerun.drafters.target.early_exit import EarlyExit
from forerun.drafters.target.lookahead import Lookahead
from forerun.drafters.target.recycling import Recycling
from forerun.drafters.text.prediction import Prediction
from forerun.drafters.text.prompt_lookup import PromptLookup
from forerun.drafters.text.rest import Rest
from forerun.drafters.text.suffix import Suffix
from forerun.errors import DrafterError


@dataclass(frozen=True, slots=True)
class DrafterRow:
    """One entry of the table.

    Attributes:
        make: builds the drafter from its options, all of which have defaults; what it needs to know of the target it
            learns in `bind`. It may raise DrafterError or ConfigError.
        kind: "model" if it runs a model of its own, "target" if it uses the target's own layers or rows, "lookup" if
            it only reads text.
        description: one line for people.
        asks: the option without which it serves the bundled target only; None if it serves any.
    """

    make: Callable[..., Drafter]
    kind: Literal["model", "target", "lookup"]
    description: str
    asks: str | None = None

    @property
    def options(self) -> list[str]:
        """Names of the options that a text may set: NAME:key=value,key=value."""
        return [*option_types(self.make), K_OPTION]


def _cross_vocab(model: str | None = None, drafter: str = "draft-model", mode: str = "auto") -> Drafter:
    """drafter: a name of the table, of a drafter that runs a model."""
    names = [name for name, row in DRAFTERS.items() if row.asks == "model" and name != "cross-vocab"]
    if drafter not in names:
        raise DrafterError(f"'cross-vocab' wraps a drafter that runs a model ({', '.join(names)}), not {drafter!r}.")
    return CrossVocab(model, DRAFTERS[drafter].make, mode)


def _hybrid(sources: str = HYBRID_SOURCES, mode: str = HYBRID_MODES[0]) -> Drafter:
    """sources: names of the table with + between, in the order in which they are asked."""
    names = [name.strip() for name in sources.split("+")]
    if len(set(names)) < len(names) or "hybrid" in names or "" in names:
        raise DrafterError(
            f"sources is {sources!r}, but must be different names with + between, and none of them 'hybrid', "
            f"such as {HYBRID_SOURCES}."
        )
    return Hybrid([build_drafter(name)[0] for name in names], mode, names)


DRAFTERS: Mapping[str, DrafterRow] = {
    "draft-model": DrafterRow(DraftModel, "model", "a smaller model of the same vocabulary drafts a chain", "model"),
    "draft-tree": DrafterRow(
        DraftTree, "model", "a smaller model of the same vocabulary drafts a branching tree", "model"
    ),
    "staged": DrafterRow(Staged, "model", "a draft model that has a drafter of its own", "model"),
    "cross-vocab": DrafterRow(_cross_vocab, "model", "a draft model with another tokenizer", "model"),
    "prompt-lookup": DrafterRow(PromptLookup, "lookup", "copies what followed the last tokens earlier in the sequence"),
    "rest": DrafterRow(Rest, "lookup", "looks up in a corpus on disk what followed the last tokens there", "index"),
    "suffix": DrafterRow(Suffix, "lookup", "copies what most often followed the longest match of any length"),
    "lookahead": DrafterRow(Lookahead, "target", "n-grams that the target makes in passing, by Jacobi iteration"),
    "recycling": DrafterRow(Recycling, "target", "a tree of what the target thought probable after each token before"),
    "early-exit": DrafterRow(EarlyExit, "target", "the target's first layers draft, the others verify"),
    "prediction": DrafterRow(Prediction, "lookup", "copies the client's own guess of the output"),
    "hybrid": DrafterRow(_hybrid, "model", "several drafters, each asked where it pays by measured figures", "sources"),
}


def build_drafter(spec: str | Path | Drafter) -> tuple[Drafter, NumDraftTokens | None]:
    """The drafter that a user asked for, not yet bound to a target, and the K that the text asks for, if it does.

    Args:
        spec: a name of the table, perhaps with options (NAME:key=value,key=value; num_draft_tokens=K is one of every
            drafter's); the folder or hub id of a draft model; or a drafter.

    Raises:
        DrafterError: an unknown name or option; not a drafter.
        ConfigError: an option is out of range.
    """
    if isinstance(spec, str):
        name, _, _ = spec.partition(":")
        if name in DRAFTERS:
            return parse_drafter(spec, DRAFTERS[name].make)
    if isinstance(spec, (str, Path)):
        _check_place(spec)
        return DraftModel(spec), None
    if isinstance(spec, Drafter):
        return spec, None
    raise DrafterError(
        f"drafter is {spec!r}, but must be one of {', '.join(DRAFTERS)}, the folder or id of a draft model, "
        "or an object whose class derives from forerun.Drafter."
    )


def make_drafter(spec: str | Path | Drafter, binding: Binding) -> tuple[Drafter, NumDraftTokens | None]:
    """`build_drafter`, and bound to its target.

    Raises:
        DrafterError, ConfigError: as build_drafter; IncompatibleDrafterError: it does not fit the target.
        ModelLoadError: the draft model cannot be read.
    """
    drafter, num_draft_tokens = build_drafter(spec)
    drafter.bind(binding)
    return drafter, num_draft_tokens


def _check_place(spec: str | Path) -> None:
    """A word that is neither a name of the table, nor a folder, nor like a hub id, is most likely misspelt."""
    if isinstance(spec, Path) or spec == BUNDLED_DRAFT or "/" in spec or "\\" in spec or Path(spec).exists():
        return
    raise DrafterError(
        f"drafter is {spec!r}, which is neither a known name ({', '.join(DRAFTERS)}) nor a folder. "
        "Give one of the names, or the folder or hub id (owner/name) of a draft model."
    )
