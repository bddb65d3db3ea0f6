"""Drafters that only read tokens, for programs whose target forerun never sees: their options and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from forerun.config import DEFAULT_DRAFTER, HYBRID_SOURCES
from forerun.drafters import DRAFTERS, Binding, Drafter, build_drafter
from forerun.drafters.parse_text import K_OPTION, split_spec
from forerun.errors import ConfigError, DrafterError
from forerun.fields import check_options, described, documented, option
from forerun.models import Exactness, Forward, LanguageModel, Rows
from forerun.types import Cache, Needs


@documented
@dataclass(frozen=True, slots=True)
class LookupOptions:
    """How drafts are found in a program that verifies chains.

    None stands for the default of every field.
    """

    drafter: str = option(
        DEFAULT_DRAFTER, "A drafter that only reads tokens: prompt-lookup, suffix, rest, or a hybrid of them."
    )
    price: float = option(
        0.0,
        "A token is drafted while the chance that it and all before it are accepted is above this; 0 drafts K tokens "
        "wherever there are so many.",
        low=0,
        high=1,
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LookupOptions:
        """Options by name. Raises ConfigError for a name that is none, and for a value out of range."""
        names = described(LookupOptions)
        for name in given:
            if name not in names:
                raise ConfigError(f"forerun has no option {name!r} here, but: {', '.join(names)}.")
        return cls(**given)


class UnseenTarget(LanguageModel):
    """A target that another program computes: its name and its sizes, and no forward.

    Args:
        vocab_size: width of its logits. context_length: positions that it computes.
    """

    def __init__(self, name: str, vocab_size: int, context_length: int) -> None:
        super().__init__(
            name=name,
            vocab_size=vocab_size,
            context_length=context_length,
            eos_token_ids=frozenset(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            num_parameters=0,
            exactness=Exactness(False, "another program computes it"),
        )

    def new_cache(self) -> Cache:
        """Raises DrafterError."""
        self._refuse()

    def forward(self, batch: Seq[Rows], layers: Seq[int] = ()) -> Forward:
        """Raises DrafterError."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise DrafterError(f"{self.name} is computed by another program, and no drafter can compute with it.")


def lookup_drafter(text: str, target: LanguageModel, tokenizer: Any = None) -> Drafter:
    """The drafter of a text, bound to such a target.

    Args:
        tokenizer: the target's, by which an index is compared; None where there is none.

    Raises:
        DrafterError, ConfigError: as `build_drafter`; it runs a model, or wants to know more than tokens.
        IncompatibleDrafterError: its corpus holds tokens of another tokenizer.
    """
    for name in _names(text):
        if name in DRAFTERS and DRAFTERS[name].kind != "lookup":
            raise _refusal(text, f"is a {DRAFTERS[name].kind} drafter ({name})")
    drafter, k = build_drafter(text)
    if k is not None:
        raise ConfigError(
            f"drafter is {text!r}, but here the program that verifies sets the number of draft tokens. Leave out "
            f"{K_OPTION}."
        )
    traits = drafter.traits
    wants = {
        "loads a model": bool(drafter.models_to_load(target.name)),
        "reads what the target computes": drafter.needs != Needs(),
        "computes in the target's cache": traits.writes_cache,
        "reads a prediction, which requests here do not carry": traits.reads_prediction,
    }
    for what, applies in wants.items():
        if applies:
            raise _refusal(text, what)
    drafter.bind(Binding(target, tokenizer))
    return drafter


def _names(text: str) -> list[str]:
    """Of the drafter, or of the sources of a hybrid."""
    name = text.partition(":")[0]
    if name != "hybrid":
        return [name]
    sources = split_spec(text)[1].get("sources", HYBRID_SOURCES)
    return [source.strip() for source in sources.split("+")]


def _refusal(text: str, what: str) -> DrafterError:
    return DrafterError(
        f"drafter is {text!r}, which {what}, but here drafts are made of the tokens alone. Take suffix, prompt-lookup, "
        "rest, or a hybrid of them; models and heads are exported: forerun export vllm."
    )
