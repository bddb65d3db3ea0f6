"""What drafters have in common that ask others: together these need, hold and load what each of them does."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from forerun.drafters.ask import check_drafter
from forerun.drafters.base import Binding, Drafter, NamedModel, Traits
from forerun.errors import DrafterError, ModelLoadError
from forerun.types import Draft, Needs, Pool


class Several(Drafter):
    """The base of drafters that ask others.

    Args:
        parts: the others, with their names for messages and statistics.

    Raises:
        DrafterError: one of them is no drafter.

    Attributes:
        _called: a part in messages, {} standing for its name.
    """

    _called = "The drafter {}"

    def __init__(self, parts: Seq[tuple[str, Drafter]]) -> None:
        for _, drafter in parts:
            check_drafter(drafter)
        self._parts = tuple(parts)

    @property
    def needs(self) -> Needs:
        """What any of them needs."""
        needs = Needs()
        for _, drafter in self._parts:
            needs |= drafter.needs
        return needs

    @property
    def traits(self) -> Traits:
        """Those of all together."""
        return Traits.merged(type(self).__name__, [drafter.traits for _, drafter in self._parts])

    @property
    def nbytes(self) -> int:
        """Bytes that they hold together."""
        return sum(drafter.nbytes for _, drafter in self._parts)

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(dict.fromkeys(pool for _, drafter in self._parts for pool in drafter.pools))

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        return tuple(model for _, drafter in self._parts for model in drafter.models_to_load(target_name))

    def bind(self, binding: Binding) -> None:
        """Bind all of them. Raises what the one that cannot be bound raises, with its name."""
        for name, drafter in self._parts:
            try:
                drafter.bind(binding)
            except (DrafterError, ModelLoadError) as error:
                raise type(error)(f"{self._called.format(repr(name))} cannot be used: {error}") from error

    def reset(self) -> None:
        for _, drafter in self._parts:
            drafter.reset()


def signed(name: str, draft: Draft) -> Draft:
    """The draft with its drafter's name on every node, unless it has names of its own."""
    return draft if draft.sources else replace(draft, sources=(name,) * len(draft))
