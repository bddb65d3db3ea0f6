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
from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from forerun.drafters.base import Adaptable, Binding, Drafter, NamedModel, StepWatcher, Traits
from forerun.drafters.growth.base import Growth
from forerun.drafters.models.base import BoundModel, DraftingModel, Learnable
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
        self._watcher: StepWatcher | None = None
        self._needs = Needs()  # with a watcher, its own and the model's
        self._own_layers: list[int] | None = None  # places of the model's own layers; None: it is given all
        self._copies: dict[str | None, ModelDrafter] = {}  # by tenant, what drafts for its sequences from now on
        self._drafted_by: dict[Sequence, ModelDrafter] = {}  # of those that a copy drafts for

    @property
    def model(self) -> LanguageModel:
        """Return the model that drafts. Raises DrafterError before `bind`."""
        if not self.drafting_model.is_bound:
            raise DrafterError(f"This {type(self).__name__} is not bound to a target yet. Give it to LLM(drafter=...).")
        return self.drafting_model.model

    @property
    def needs(self) -> Needs:
        return self.drafting_model.needs if self._watcher is None else self._needs

    @property
    def adaptable(self) -> Adaptable | None:
        learnable = self.drafting_model.learnable if self.drafting_model.is_bound else None
        return None if learnable is None else AdaptableModel(self, learnable)

    def watch(self, watcher: StepWatcher, needs: Needs) -> None:
        """Report what is verified, as `Adaptable.watch` does."""
        own = self.drafting_model.needs
        self._watcher = watcher
        self._needs = own | needs
        if self._needs != own:
            self._own_layers = [self._needs.layers.index(layer) for layer in own.layers]

    def swap(self, tenant: str | None, bound: BoundModel | None) -> None:
        """Have another model of the same shapes draft for a tenant's sequences, as `Adaptable.swap` does."""
        if bound is None:
            self._copies.pop(tenant, None)
            return
        made: ModelDrafter = copy(self)
        made.drafting_model = self.drafting_model.with_model(bound)
        made.growth = self.growth.with_model(made.drafting_model)
        self._copies[tenant] = made

    @property
    def traits(self) -> Traits:
        drafting = self.drafting_model
        model = (identity(drafting.model),) if drafting.is_bound else ()
        key = (self._kind, *model, *drafting.options, *self.growth.options)
        return Traits(
            key,
            follows=drafting.follows,
            can_sleep=self._watcher is None,
            acceptance=drafting.acceptance,
            continues=self.growth.continues and drafting.has_own_caches and not drafting.reads_states,
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of the model's caches."""
        return self.drafting_model.nbytes + sum(each.drafting_model.nbytes for each in {*self._drafted_by.values()})

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
        made = self._copies.get(sequence.params.tenant) if self._copies else None
        if made is not None:
            self._drafted_by[sequence] = made
        (made or self).drafting_model.start(sequence)

    def begin_with(self, paths: Mapping[Sequence, Draft]) -> None:
        self.growth.begin_with(paths)
        for each in {*self._drafted_by.values()}:
            each.growth.begin_with(paths)

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        if not self._drafted_by:
            return self.growth.draft(sequences, num_draft_tokens, min_acceptance_prob)
        drafts = [Draft.empty() for _ in sequences]
        for drafter, places in self._by_drafter(sequences):
            wanted = [num_draft_tokens[place] for place in places]
            made = drafter.growth.draft([sequences[place] for place in places], wanted, min_acceptance_prob)
            for place, each in zip(places, made, strict=True):
                drafts[place] = each
        return drafts

    def commit(self, steps: Seq[Step]) -> None:
        if self._watcher is not None:
            self._watcher.see(steps)
            if self._own_layers is not None:
                steps = [self._own_part(step, self._own_layers) for step in steps]
        if not self._drafted_by:
            self.drafting_model.commit(steps)
            return
        for drafter, places in self._by_drafter([step.sequence for step in steps]):
            drafter.drafting_model.commit([steps[place] for place in places])

    def stop(self, sequence: Sequence) -> None:
        if self._watcher is not None:
            self._watcher.leave(sequence)
        self._drafted_by.pop(sequence, self).drafting_model.stop(sequence)

    def rewind(self, sequence: Sequence, length: int) -> None:
        if self._watcher is not None:
            self._watcher.leave(sequence, length)
        self._drafted_by.get(sequence, self).drafting_model.rewind(sequence, length)

    def _by_drafter(self, sequences: Seq[Sequence]) -> list[tuple[ModelDrafter, list[int]]]:
        """Return this drafter and its copies with the places of those of these sequences that they draft for."""
        places: dict[int, tuple[ModelDrafter, list[int]]] = {}
        for place, sequence in enumerate(sequences):
            drafter = self._drafted_by.get(sequence, self)
            places.setdefault(id(drafter), (drafter, []))[1].append(place)
        return list(places.values())

    def _own_part(self, step: Step, layers: list[int]) -> Step:
        """Return a step that is watched as the model itself would have been given it. layers: places of its own."""
        states = step.states
        states = states[:, layers] if self.drafting_model.needs.states and states is not None else None
        outputs = step.hidden_outputs[:, layers] if layers and step.hidden_outputs is not None else None
        return replace(step, states=states, hidden_outputs=outputs)


class AdaptableModel(Adaptable):
    """What of a drafter's model can go on learning.

    Args:
        learnable: of its model.
    """

    def __init__(self, drafter: ModelDrafter, learnable: Learnable) -> None:
        self._drafter = drafter
        self.learnable = learnable
        self.name = learnable.name
        self.target = drafter.drafting_model.given[1].target

    def watch(self, watcher: StepWatcher, needs: Needs) -> None:
        self._drafter.watch(watcher, needs)

    def tensors(self) -> dict[str, Tensor]:
        return self.learnable.tensors()

    def swap(self, tenant: str | None, tensors: Mapping[str, Tensor] | None) -> None:
        self._drafter.swap(tenant, None if tensors is None else self.learnable.changed(tensors))
