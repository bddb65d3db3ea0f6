"""The interface of drafters, and what they declare about themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from forerun.config import NumDraftTokens, SamplingParams
from forerun.errors import ForerunError
from forerun.models import LanguageModel
from forerun.models.loading.folder_source import FolderSource
from forerun.models.loading.source import find_source
from forerun.speculation import AutomaticPolicy, CostModel, DraftChooser, SpeculationPolicy, TrimmingPolicy
from forerun.types import Draft, Needs, Pool, Sequence, Step
from forerun.utils.json_file import Fields

if TYPE_CHECKING:
    from forerun.drafters.lookup.remembered.remembered_text import RememberedText

TRAINING_RECORD = "training.json"
"""In the folder of a head or model that forerun trained: how, and how good it is."""
Acceptance = tuple[tuple[float, ...], tuple[float, ...]]
"""Of greedy and of drawn drafts, the probability that the token at each position is accepted where those before it
were; empty where it is unknown. It is that of chains: of a tree, of the most probable path."""
UNKNOWN_ACCEPTANCE: Acceptance = ((), ())


def recorded_acceptance(name: str | Path) -> Acceptance:
    """Return what the record in the folder of a head or model says; unknown where it is missing, foreign or damaged.

    What counts is the first row at temperature 0, and the first above, of `measured` (`forerun bench acceptance`); else
    of `acceptance`, which the training of a draft model writes; else, of a head, what its training found on held-out
    answers. In older records, of drawn drafts that is only the overlap at all positions of a text.
    """
    with suppress(ForerunError):
        source = find_source(name)
        if isinstance(source, FolderSource):
            record = source.folder.read(TRAINING_RECORD)
            lists = (record.list_of(key, dict, []) for key in ("measured", "acceptance"))
            rows = [Fields.of(row, record.place, record.error) for row in next(filter(None, lists), [])]
            found = {row.number("temperature", low=0) > 0: _probs(row, "per_position") for row in reversed(rows)}
            if not rows and "held_out" in record:
                scores = record.fields("held_out")
                found[False] = _probs(scores, "per_position")
                drawn = ("per_position_at_temperature_1", "overlap_at_temperature_1")
                found[True] = next(filter(None, (_probs(scores, key) for key in drawn)), ())
            return found.get(False, ()), found.get(True, ())
    return UNKNOWN_ACCEPTANCE


def _probs(fields: Fields, key: str) -> tuple[float, ...]:
    """Return a list of probabilities; empty without one. Raises the fields' error for other values."""
    values = tuple(fields.list_of(key, float, []))
    if not all(0 <= value <= 1 for value in values):
        raise fields.wrong(key, "numbers in 0..1")
    return values


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a drafter that the engine takes into account.

    Attributes:
        cost_key: everything that drafting time depends on beside the target: the kind of drafter, its options and its
            draft model. Drafters with the same key share stored costs.
        fixed_length_draft: nodes of its drafts, where fewer would do it harm: an automatic K is this or 0. None: any
        number.
        reads_prediction: it uses `Sequence.prediction`.
        writes_cache: it feeds rows into `Sequence.cache`, so no other drafter may do so in the same step.
        estimates: drafting costs next to nothing, and its drafts have `accept_probs`: they are made in every step, and
            cut by what rows cost.
        follows: tokens of a sequence that it computes with, at most, before it first drafts for it; None: all.
        can_sleep: steps in which it does not draft may be kept from it. It still hears of `start`, `stop` and `rewind`.
        learns: it would learn from them.
        acceptance: as the record of its head or draft model tells it. A drafter that calls several leaves it to them.
        num_probes: nodes beside a draft that the target computes and never accepts. A fixed K does not count them.
        continues: its drafts may begin with tokens that it is given (`Drafter.begin_with`).
        remembers: it copies from answers of the past (`Binding.remembered`).
    """

    cost_key: tuple[str, ...] = ()
    fixed_length_draft: int | None = None
    reads_prediction: bool = False
    writes_cache: bool = False
    estimates: bool = False
    follows: int | None = None
    can_sleep: bool = False
    learns: bool = False
    acceptance: Acceptance = UNKNOWN_ACCEPTANCE
    num_probes: int = 0
    continues: bool = False
    remembers: bool = False

    def automatic_policy(self, costs: CostModel) -> SpeculationPolicy:
        """Make the policy that chooses K for such a drafter, by these costs."""
        if self.estimates:
            return TrimmingPolicy(costs, self.can_sleep, self.learns)
        return AutomaticPolicy(self.chooser(costs))

    def chooser(self, costs: CostModel | None) -> DraftChooser:
        """Make what weighs such a drafter, whose drafts take time, by these costs."""
        return DraftChooser(
            costs,
            self.fixed_length_draft,
            self.acceptance,
            follows=self.follows,
            can_sleep=self.can_sleep,
            continues=self.continues,
        )

    @classmethod
    def merged(cls, name: str, parts: Iterable[Traits]) -> Traits:
        """Combine the traits of the drafters that one drafter calls, each for a draft of the size that it can make.

        Its drafts are whole only if those of all parts are.
        """
        every = list(parts)
        fixed = [part.fixed_length_draft for part in every if part.fixed_length_draft is not None]
        return cls(
            (name, *(f"({' '.join(part.cost_key)})" for part in every)),
            max(fixed) if fixed and len(fixed) == len(every) else None,
            any(part.reads_prediction for part in every),
            any(part.writes_cache for part in every),
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """One of several drafters, among which requests may choose.

    Attributes:
        traits: its own.
        num_draft_tokens: K that it was loaded with; None: the engine's.
    """

    traits: Traits
    num_draft_tokens: NumDraftTokens | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """The target's side of the pair.

    Attributes:
        target: the model that verifies.
        tokenizer: the target's; None if it has none.
        seed: for the draws of the drafter; never the seed of the engine's noise, which must be independent.
        prefix_reuse: whether models that draft may take over what they computed for other requests of the same tenant.
        remembered: the target's answers of the past, which a drafter whose traits say `remembers` may copy; None where
            none are kept.
    """

    target: LanguageModel
    tokenizer: Any = None
    seed: int | None = None
    prefix_reuse: bool = True
    remembered: RememberedText | None = None


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that a drafter will load.

    Attributes:
        name: "bundled-draft", a folder, a file or a hub id.
        dtype: of its weights; None: as `models.inherited_dtype` has it.
        quantize: what its weights are kept in; None: as its files are.
        is_head: it is the folder of a head, or the target's own name for the head that its checkpoint carries, whose
            weights are kept as the target's are.
    """

    name: str | Path
    dtype: str | None = None
    quantize: str | None = None
    is_head: bool = False


class StepWatcher(Protocol):
    """Sees what the target has verified of the sequences of a drafter."""

    def see(self, steps: Seq[Step]) -> None:
        """See steps, with the states that `Adaptable.watch` was asked for, as `Drafter.commit` does."""

    def leave(self, sequence: Sequence, length: int = 0) -> None:
        """See that a sequence has left; or, with a length, that its tokens from there on have been replaced."""


class Adaptable(ABC):
    """What of a drafter can go on learning while it drafts: some tensors of its model. Tenants may have copies of it
    with tensors of their own.

    Attributes:
        name: the model that drafts, for messages.
        target: that it drafts for.
    """

    name: str
    target: LanguageModel

    @abstractmethod
    def watch(self, watcher: StepWatcher, needs: Needs) -> None:
        """Report what is verified from now on, with these states of the target. Called before the first sequence."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that may change, as they were loaded, in float32, by name."""

    @abstractmethod
    def swap(self, tenant: str | None, tensors: Mapping[str, Tensor] | None) -> None:
        """Have a copy with these tensors draft for the sequences of a tenant that start from now on; None: the drafter
        as it was loaded. Any thread may call this; sequences that have started keep what drafts for them."""


class Drafter(ABC):
    """Proposes tokens. The engine treats all drafters alike, by what they declare here.

    A new drafter implements the four abstract methods, and overrides further methods as needed.
    """

    @property
    def needs(self) -> Needs:
        """Return which of the target's outputs the drafter needs in `Step`."""
        return Needs()

    @property
    def traits(self) -> Traits:
        """Return what the engine takes into account; complete after `bind`. A drafter that says nothing of itself has
        the costs of its class."""
        return Traits((type(self).__name__,))

    @property
    def offers(self) -> Mapping[str, Offer]:
        """Return the drafters among which a request may choose by name; complete after `bind`. Empty for a single
        drafter."""
        return {}

    def chosen(self, params: SamplingParams) -> str | None:
        """Return which of the offers drafts for a request; None if none does, or if there are none."""
        return None

    def reads_prediction(self, params: SamplingParams) -> bool:
        """Return whether the request's drafter uses its prediction."""
        offers = self.offers
        if not offers:
            return self.traits.reads_prediction
        name = self.chosen(params)
        return name is not None and offers[name].traits.reads_prediction

    @property
    def nbytes(self) -> int:
        """Return the bytes held beside the weights of its models."""
        return 0

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Return the page pools of the draft models; complete after `bind`."""
        return ()

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        """Return the models that `bind` will load for a target of this name, without those that are loaded already."""
        return ()

    @property
    def adaptable(self) -> Adaptable | None:
        """Return what of it can go on learning while it drafts; complete after `bind`. None: nothing."""
        return None

    @property
    def members(self) -> tuple[Drafter, ...]:
        """Return the drafters that it calls, or itself: those whose costs are measured."""
        return (self,)

    def see_prices(self, prices: Seq[float]) -> None:  # noqa: B027 - most drafters need not weigh anything
        """See, before `draft`, what the step costs in seconds, by the rows that drafts add to it."""

    def begin_with(self, paths: Mapping[Sequence, Draft]) -> None:  # noqa: B027 - for those whose traits say `continues`
        """See, before `draft`, the chains with which the next drafts of these sequences begin. They were chosen by a
        rule that does not depend on the target's randomness, and count as tokens of the draft."""

    def bind(self, binding: Binding) -> None:  # noqa: B027 - most drafters need nothing of the target
        """See the target before the first sequence, and load what is needed.

        Raises:
            DrafterError, ModelLoadError: this target cannot be drafted for.
        """

    @abstractmethod
    def start(self, sequence: Sequence) -> None:
        """Register a sequence whose prompt has not been computed yet."""

    @abstractmethod
    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        """Return one draft for each sequence.

        Args:
            num_draft_tokens: nodes of each draft at most, probes included; 0 for no draft. Nodes deeper than
                `sequence.room` are cut off (children of the last committed token have depth 1): a chain of more
                tokens is work in vain.
            min_acceptance_prob: a node is useful only if the probability that it and all above it are accepted exceeds
                this; a drafter
                that can tell stops there. In a drawn chain, the token at which it stops is kept.
        """

    @abstractmethod
    def commit(self, steps: Seq[Step]) -> None:
        """Take in that the target has computed a prompt chunk or verified a draft."""

    @abstractmethod
    def stop(self, sequence: Sequence) -> None:
        """Free the state of a sequence that leaves."""

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Forget what was learned of the tokens from `length` on, which have been replaced."""
        self.stop(sequence)
        self.start(sequence)

    def reset(self) -> None:  # noqa: B027 - most drafters share nothing between sequences
        """Drop what sequences share. A step was interrupted, and it may be half written; no sequence is in now."""


class OneByOne(Drafter):
    """The base of drafters that draft for each sequence by itself."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        return [
            self._draft(sequence, max_nodes, min_acceptance_prob)
            if min(max_nodes, sequence.room) > 0
            else Draft.empty()
            for sequence, max_nodes in zip(sequences, num_draft_tokens, strict=True)
        ]

    @abstractmethod
    def _draft(self, sequence: Sequence, max_nodes: int, min_acceptance_prob: float) -> Draft:
        """Return a draft of 1 to `max_nodes` nodes for a sequence whose output has room for at least one token."""
