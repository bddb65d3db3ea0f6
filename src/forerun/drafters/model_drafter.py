"""Drafters that propose with a model: a model that drafts x a growth.

A model that drafts (`models/base.py`) says which states of the target it reads, how it is fed, what its columns mean in
the target's tokens, and whose cache it writes. A growth (`growth/base.py`) says how nodes are chosen; a chain can begin
with a path that somebody else gave. All drafters:

    drafter        model                      growth               reads of the target       cache
    draft-model    draft model                chain, or parallel   -                         own
    draft-tree     draft model                tree                 -                         own
    staged         draft model                chain from a path    -                         own
    cross-vocab    of another vocabulary      its inner drafter's  -                         own
    eagle          EAGLE head                 chain                states of some layers     own
    eagle-tree     EAGLE head                 tree                 states of some layers     own
    mtp            MTP layer                  chain                states of its last layer  own
    block          block head                 parallel             states of some layers     own
    medusa         Medusa heads               chain from a path    its last state            none
    medusa-tree    Medusa heads               tree, all at once    its last state            none
    early-exit     the target's first layers  chain                -                         the target's
    recycling      -                          looks up             its most probable tokens  -
    lookahead      -                          looks up             its rows                  -
    suffix         -                          looks up             -                         -
    prompt-lookup  -                          looks up             -                         -
    rest           -                          looks up             -                         -
    prediction     -                          looks up             -                         -
    hybrid         other drafters             theirs, or merged    what these read           theirs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from forerun.drafters.base import Binding, Drafter, NamedModel, Traits
from forerun.drafters.growth.base import Growth
from forerun.drafters.models.base import DraftingModel
from forerun.errors import DrafterError
from forerun.models import LanguageModel, identity
from forerun.types import Draft, Needs, Pool, Sequence, Step


class ModelDrafter(Drafter):
    """Proposes with a model.

    Attributes:
        drafting_model: which states of the target it reads, how it is fed, what its columns mean, whose cache it
            writes.
        growth: how nodes are chosen.

    Args:
        kind: the first part of `Traits.cost_key`, by which stored costs are found.
    """

    def __init__(self, kind: str, drafting_model: DraftingModel[Any], growth: Growth) -> None:
        self._kind = kind
        self.drafting_model = drafting_model
        self.growth = growth

    @property
    def model(self) -> LanguageModel:
        """Return the model that drafts. Raises DrafterError before `bind`."""
        if not self.drafting_model.is_bound:
            raise DrafterError(f"This {type(self).__name__} is not bound to a target yet. Give it to LLM(drafter=...).")
        return self.drafting_model.model

    @property
    def needs(self) -> Needs:
        return self.drafting_model.needs

    @property
    def traits(self) -> Traits:
        drafting = self.drafting_model
        model = (identity(drafting.model),) if drafting.is_bound else ()
        key = (self._kind, *model, *drafting.options, *self.growth.options)
        return Traits(
            key,
            follows=drafting.follows,
            can_sleep=True,
            acceptance=drafting.acceptance,
            continues=self.growth.continues and drafting.has_own_caches and not drafting.reads_states,
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of the model's caches."""
        return self.drafting_model.nbytes

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self.drafting_model.pools

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        return self.drafting_model.models_to_load(target_name)

    def bind(self, binding: Binding) -> None:
        """Read the model and fit it to the target.

        Raises:
            ModelLoadError: the model cannot be read.
            IncompatibleDrafterError: it is not for this target.
            DrafterError: no model was named, and there is none for the target.
        """
        self.drafting_model.bind(binding)
        self.growth.seed(binding.seed)

    def start(self, sequence: Sequence) -> None:
        self.drafting_model.start(sequence)

    def begin_with(self, paths: Mapping[Sequence, Draft]) -> None:
        self.growth.begin_with(paths)

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        return self.growth.draft(sequences, num_draft_tokens, min_acceptance_prob)

    def commit(self, steps: Seq[Step]) -> None:
        self.drafting_model.commit(steps)

    def stop(self, sequence: Sequence) -> None:
        self.drafting_model.stop(sequence)

    def rewind(self, sequence: Sequence, length: int) -> None:
        self.drafting_model.rewind(sequence, length)
