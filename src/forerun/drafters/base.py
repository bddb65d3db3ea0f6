"""What a drafter must implement, and what it declares about itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config import NumDraftTokens, SamplingParams
from forerun.models import LanguageModel
from forerun.types import Draft, Needs, Pool, Sequence, Step


@dataclass(frozen=True, slots=True)
class Traits:
    """What the engine must know of a drafter to treat it rightly.

    Attributes:
        cost_key: everything that drafting time depends on beside the target, such as class, options and draft model.
            Drafters with the same key share stored costs.
        fixed_length_draft: nodes of its drafts, where fewer would do it harm: an automatic K is this or 0. None: any
        number.
        reads_prediction: it uses `Sequence.prediction`.
        writes_cache: it feeds rows into `Sequence.cache`, so no other drafter may do so in the same step.
        catches_up: it computes with a sequence's tokens when it first drafts for it, or before: time that would be
            saved if it never did.
    """

    cost_key: tuple[str, ...] = ()
    fixed_length_draft: int | None = None
    reads_prediction: bool = False
    writes_cache: bool = False
    catches_up: bool = False

    @classmethod
    def merged(cls, name: str, parts: Iterable[Traits]) -> Traits:
        """Those of a drafter that asks others, each for a draft of the size that it can make.

        Its drafts are whole only if those of all parts are.
        """
        every = list(parts)
        whole = [part.fixed_length_draft for part in every if part.fixed_length_draft is not None]
        return cls(
            (name, *(f"({' '.join(part.cost_key)})" for part in every)),
            max(whole) if whole and len(whole) == len(every) else None,
            any(part.reads_prediction for part in every),
            any(part.writes_cache for part in every),
            any(part.catches_up for part in every),
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
    """

    target: LanguageModel
    tokenizer: Any = None
    seed: int | None = None
    prefix_reuse: bool = True


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that a drafter will load.

    Attributes:
        name: "bundled-draft", a folder, a file or a hub id.
        dtype: of its weights; None: as `models.inherited_dtype` has it.
        quantize: what its weights are kept in; None: as its files are.
        is_head: it is the folder of a head, whose weights are kept as the target's are.
    """

    name: str | Path
    dtype: str | None = None
    quantize: str | None = None
    is_head: bool = False


class Drafter(ABC):
    """Proposes tokens. The engine never asks which drafter it has: all it needs to know is declared here.

    A new drafter implements the four abstract methods, and overrides what else does not fit it.
    """

    @property
    def needs(self) -> Needs:
        """What it wants to know of the target's rows, told in `Step`."""
        return Needs()

    @property
    def traits(self) -> Traits:
        """What the engine must know of it; complete after `bind`."""
        return Traits((type(self).__name__,))

    @property
    def offers(self) -> Mapping[str, Offer]:
        """The drafters among which a request may choose by name; complete after `bind`. Empty: it is one alone."""
        return {}

    def chosen(self, params: SamplingParams) -> str | None:
        """Which of its offers drafts for a request; None: none does, or there are none."""
        return None

    def reads_prediction(self, params: SamplingParams) -> bool:
        """Whether the request's drafter uses its prediction."""
        offers = self.offers
        if not offers:
            return self.traits.reads_prediction
        name = self.chosen(params)
        return name is not None and offers[name].traits.reads_prediction

    @property
    def nbytes(self) -> int:
        """Bytes it holds beside its models' weights."""
        return 0

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of pages of models that it has beside the target; complete after `bind`."""
        return ()

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        """The models that `bind` will load for a target of this name; none that are loaded already."""
        return ()

    def bind(self, binding: Binding) -> None:  # noqa: B027 - most drafters need nothing of the target
        """See the target before the first sequence, and load what is needed.

        Raises:
            DrafterError, ModelLoadError: this target cannot be drafted for.
        """

    @abstractmethod
    def start(self, sequence: Sequence) -> None:
        """A sequence enters, its prompt not yet computed."""

    @abstractmethod
    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        """One draft for each sequence.

        Args:
            num_draft_tokens: nodes of each draft at most, probes included; 0 asks for none. No node is deeper than
                `sequence.room` (children of the last committed token have depth 1).
            min_acceptance_prob: a node is wanted only if the chance that it and all above it are accepted exceeds
                this; a drafter
                that can tell stops there. Of a drawn chain, a token that was looked at to decide is kept.
        """

    @abstractmethod
    def commit(self, steps: Seq[Step]) -> None:
        """The target has computed a prompt chunk or verified a draft."""

    @abstractmethod
    def stop(self, sequence: Sequence) -> None:
        """The sequence leaves; its state is freed."""

    def rewind(self, sequence: Sequence, length: int) -> None:
        """The sequence's tokens from `length` on have been replaced by others: forget what was learned of them."""
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
            self._draft(sequence, budget, min_acceptance_prob) if min(budget, sequence.room) > 0 else Draft.empty()
            for sequence, budget in zip(sequences, num_draft_tokens, strict=True)
        ]

    @abstractmethod
    def _draft(self, sequence: Sequence, budget: int, min_acceptance_prob: float) -> Draft:
        """A draft of at most `budget` nodes, at least 1, for a sequence with room for one."""
