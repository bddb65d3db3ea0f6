"""The table of drafters by name. A new drafter is one file, one row here, one test.

Rows name their classes, which are imported when they are used: this module loads neither PyTorch nor Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forerun.config import AUTO, BUNDLED_TARGET, DEFAULT_DRAFTER, SHIPPED_HEADS
from forerun.drafters.parse_text import K_OPTION, hybrid_of, quoted, split_spec, text_of
from forerun.errors import DrafterError

if TYPE_CHECKING:
    from forerun.drafters.base import Drafter


@dataclass(frozen=True, slots=True)
class DrafterRow:
    """One entry of the table.

    Attributes:
        class_path: "module:Class" below forerun.drafters, a public name of forerun. All options of the class have
            defaults; it receives the target in `bind`.
        kind: "model" if it runs a model of its own, "head" if it runs a few layers over the target's hidden states,
            "target" if it uses the target's own layers or rows, "lookup" if it only reads text.
        description: one line for people.
        needed_option: the option without which it serves only those targets for which something is shipped; None if it
            serves any.
        with_draft_model: its text where a command was given a draft model for all drafters, "{}" standing for the
            model; None if it does not take one.
        may_be_silent: rightly it proposes nothing that the target accepts on the bundled prompts.
        with_head: its text for a target that an EAGLE head is shipped for; None if it does not take one.
        shipped: the folder of `SHIPPED_HEADS` with its heads, which it finds by itself. Empty: without its option it
            serves the bundled target.
    """

    class_path: str
    kind: Literal["model", "head", "target", "lookup"]
    description: str
    needed_option: str | None = None
    with_draft_model: str | None = None
    may_be_silent: bool = False
    with_head: str | None = None
    shipped: str = ""

    @property
    def module(self) -> str:
        """Return the full name of the class's module."""
        return "forerun.drafters." + self.class_path.partition(":")[0]

    @property
    def class_name(self) -> str:
        """Return the class's public name."""
        return self.class_path.partition(":")[2]

    def serves(self, model: str) -> bool:
        """Return whether the drafter serves a target of this name without any option."""
        if self.needed_option is None:
            return True
        if not self.shipped:
            return model == BUNDLED_TARGET
        return shipped_folder(model, self.shipped) is not None

    def drafting_with(self, model: str) -> str | None:
        """Return its text with this draft model; None if it does not take one."""
        text = self.with_draft_model
        return text and text.format(model if text == "{}" else quoted(model))

    @property
    def make(self) -> Callable[..., Drafter]:
        """Import and return the class. Calling it may raise DrafterError or ConfigError."""
        drafter: Callable[..., Drafter] = getattr(import_module(self.module), self.class_name)
        return drafter


DRAFTERS: Mapping[str, DrafterRow] = {
    "draft-model": DrafterRow(
        "draft_model:DraftModel",
        "model",
        "a smaller model of the same vocabulary drafts a chain",
        "model",
        "{}",
    ),
    "draft-tree": DrafterRow(
        "draft_model:DraftTree",
        "model",
        "a smaller model of the same vocabulary drafts a branching tree",
        "model",
        "draft-tree:model={}",
    ),
    "staged": DrafterRow(
        "staged:Staged", "model", "a draft model that has a drafter of its own", "model", "staged:model={}"
    ),
    "cross-vocab": DrafterRow("cross_vocab:CrossVocab", "model", "a draft model with another tokenizer", "model"),
    "eagle": DrafterRow(
        "eagle:Eagle",
        "head",
        "a head reads the target's hidden states and drafts a chain",
        "model",
        shipped="eagle",
    ),
    "eagle-tree": DrafterRow(
        "eagle:EagleTree",
        "head",
        "a head reads the target's hidden states and drafts a branching tree",
        "model",
        shipped="eagle",
    ),
    "block": DrafterRow(
        "block:Block",
        "head",
        "a head reads the target's hidden states and drafts a whole block in one pass",
        "model",
        shipped="block",
    ),
    "medusa": DrafterRow(
        "medusa:Medusa",
        "head",
        "heads read the target's last state and draft a chain in one pass",
        "model",
        shipped="medusa",
    ),
    "medusa-tree": DrafterRow(
        "medusa:MedusaTree",
        "head",
        "heads read the target's last state and draft a tree in one pass",
        "model",
        shipped="medusa",
    ),
    "mtp": DrafterRow(
        "mtp:Mtp",
        "head",
        "the multi-token-prediction layer of the target's checkpoint drafts a chain",
        "model",
        shipped="mtp",
    ),
    "prompt-lookup": DrafterRow(
        "lookup.prompt_lookup:PromptLookup", "lookup", "copies what followed the last tokens earlier in the sequence"
    ),
    "rest": DrafterRow(
        "lookup.rest.drafter:Rest",
        "lookup",
        "looks up in a corpus on disk what followed the last tokens there",
        "index",
    ),
    "suffix": DrafterRow(
        "lookup.suffix:Suffix", "lookup", "copies what most often followed the longest match of any length"
    ),
    "lookahead": DrafterRow(
        "lookup.lookahead:Lookahead",
        "target",
        "n-grams harvested from the target's own forward passes by Jacobi iteration",
    ),
    "recycling": DrafterRow(
        "lookup.token_recycling:Recycling", "target", "a tree of the most probable tokens that the target gave earlier"
    ),
    "early-exit": DrafterRow("early_exit:EarlyExit", "target", "the target's first layers draft, the others verify"),
    "prediction": DrafterRow("lookup.prediction:Prediction", "lookup", "copies the client's prediction of the output"),
    "hybrid": DrafterRow(
        "hybrid.hybrid:Hybrid",
        "model",
        "several drafters, each used where measurements show that it pays",
        "sources",
        "hybrid:sources=suffix+{}",
        with_head="hybrid:sources=suffix+eagle",
    ),
}


def takes_draft_model(drafter: str) -> bool:
    """Return whether `with_draft_model` gives it a draft model. Raises DrafterError: its text is malformed."""
    if drafter.partition(":")[0] not in ("hybrid", *_takers()):
        return drafter.partition(":")[0] in (AUTO, DEFAULT_DRAFTER)
    name, options = split_spec(drafter)
    return ("sources" if name == "hybrid" else "model") not in options


def _takers() -> list[str]:
    """Return the drafters that run a draft model which they are given."""
    return [each for each, row in DRAFTERS.items() if (row.kind, row.needed_option) == ("model", "model")]


def with_draft_model(drafter: str, model: str, draft_vocab: int | None = None) -> str:
    """Return the text of a drafter that is given a draft model: AUTO and suffix matches become hybrids with it, and
    drafters that take one take it.

    Args:
        draft_vocab: tokens that the draft model can propose; None: its default.

    Raises:
        DrafterError: it takes none, or has one, or takes no such number; the model is the name of a drafter.
    """
    if model.partition(":")[0] in DRAFTERS:
        raise DrafterError(f"The draft model is {model!r}, which is a drafter. Give it as --drafter, or give a model.")
    name, options = split_spec(drafter)
    own = {"model": model} | ({} if draft_vocab is None else {"draft_vocab": str(draft_vocab)})
    source = model if draft_vocab is None else text_of("draft-model", own)
    if name in (AUTO, DEFAULT_DRAFTER):
        of_engine = {key: options.pop(key) for key in (K_OPTION,) if key in options}
        return hybrid_of(text_of(DEFAULT_DRAFTER, options), source, **of_engine)
    if name == "hybrid" and "sources" not in options:
        return hybrid_of(DEFAULT_DRAFTER, source, **options)
    if takes_draft_model(drafter):
        if draft_vocab is not None and "draft_vocab" not in signature(DRAFTERS[name].make).parameters:
            raise DrafterError(f"--draft-vocab is {draft_vocab}, but {name} has no such option. Leave it out.")
        return text_of(name, {**own, **options})
    raise DrafterError(
        f"drafter is {drafter!r}, which takes no other draft model, but {model!r} is given too. Give one of them, or "
        f"with the draft model {', '.join([DEFAULT_DRAFTER, *_takers()])}."
    )


def shipped_folder(model: str, kind: str) -> Path | None:
    """Return the folder of the head of a kind that is shipped for the target of this name; None if there is none."""
    return next((folder for folder in (SHIPPED_HEADS / kind).glob("*") if folder.name == model), None)
