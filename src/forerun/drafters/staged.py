"""A drafter drafts for the draft model, which drafts for the target.

The inner loop is speculation like the outer one: the inner drafter's proposal goes through the draft model in one
forward, and the draft model keeps the tokens that it would have picked itself, greedily, with a seeded request's noise,
or by drawing from its distributions. So its chain, and the distributions of a drawn one, are those it would have
drafted alone, in fewer forwards. (Chen et al., Cascade Speculative Drafting, 2312.11462, and Sun et al., TriForce,
2404.11912.)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from forerun.config import AUTO
from forerun.drafters.base import Adaptable, Binding, Drafter, NamedModel, Traits
from forerun.drafters.build import build_drafter
from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.growth.growing_chain import GrowingChain
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.models.draft_model import draft_model
from forerun.drafters.registry import DRAFTERS
from forerun.drafters.validation import checked_drafts
from forerun.errors import DrafterError
from forerun.models import LanguageModel
from forerun.types import Draft, Needs, Pool, Sequence, Step


class Staged(ModelDrafter):
    """A draft model with a drafter of its state.

    The inner drafter drafts once for each draft, when all tokens are committed, so that it need not rewind. Where its
    proposal ends or fails, the draft model goes on alone.

    Args:
        model: the draft model, as in DraftModel.
        drafter: the inner one: a name of the table, perhaps with options, or a drafter. Not one that computes with the
            target's layers, since those are not the draft model's.
        dtype: of the draft model's weights; None takes the target's, or float32 where that is float64 and the draft
            is quantized.
        quantize: "int8" or "int4", what the draft model's weights are kept in; None: as its files are.
        draft_vocab: tokens that it can propose (1,000 or more; 0 for all), as in DraftModel.

    Raises:
        ConfigError: an option is out of range.
        DrafterError: the inner drafter is unknown, or of a kind that cannot serve here.
    """

    def __init__(
        self,
        model: str | Path | LanguageModel | None = None,
        drafter: str | Drafter = "prompt-lookup",
        *,
        dtype: str | None = None,
        quantize: str | None = None,
        draft_vocab: int | None = None,
    ) -> None:
        drafting_model = draft_model(model, dtype, quantize, draft_vocab)
        super().__init__("Staged", drafting_model, ChainGrowth(drafting_model, self._begin))
        self._inner, self._inner_k = _inner(drafter)

    @property
    def needs(self) -> Needs:
        return self._inner.needs

    @property
    def adaptable(self) -> Adaptable | None:
        """Return None: the inner drafter drafts for one model."""
        return None

    @property
    def traits(self) -> Traits:
        own = super().traits
        inner = self._inner.traits
        key = (*own.cost_key, f"inner K {self._inner_k}", *inner.cost_key)
        return replace(own, cost_key=key, reads_prediction=inner.reads_prediction)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the draft model's caches, and of the inner drafter."""
        return super().nbytes + self._inner.nbytes

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (*super().pools, *self._inner.pools)

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        return (*super().models_to_load(target_name), *self._inner.models_to_load(target_name))

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        # its text is the target's; another seed, so that its draws are not those of the draft model
        seed = None if binding.seed is None else binding.seed ^ 1
        self._inner.bind(Binding(self.model, binding.tokenizer, seed, binding.prefix_reuse))

    def start(self, sequence: Sequence) -> None:
        super().start(sequence)
        self._inner.start(sequence)

    def stop(self, sequence: Sequence) -> None:
        if sequence in self.drafting_model.states:
            self._inner.stop(sequence)
            super().stop(sequence)

    def commit(self, steps: Seq[Step]) -> None:
        super().commit(steps)
        self._inner.commit(steps)

    def rewind(self, sequence: Sequence, length: int) -> None:
        super().rewind(sequence, length)
        self._inner.rewind(sequence, length)

    def reset(self) -> None:
        super().reset()
        self._inner.reset()

    def _begin(self, chains: Seq[GrowingChain]) -> list[list[int]]:
        """Return the inner drafter's paths, with which the chains begin."""
        num_draft_tokens = []
        for chain in chains:
            most = chain.max_nodes - 1  # the draft model adds a token of its own
            num_draft_tokens.append(most if self._inner_k is None else min(most, self._inner_k))
        if not any(num_draft_tokens):
            return [[] for _ in chains]
        sequences = [chain.sequence for chain in chains]
        size = self.drafting_model.vocab_size
        drafts = checked_drafts(self._inner, sequences, num_draft_tokens, vocab_size=size)
        return [_proposed_tokens(draft) for draft in drafts]


def _proposed_tokens(draft: Draft) -> list[int]:
    """Return the tokens of the path that takes the first child everywhere: of siblings, drafters put the best one
    first."""
    return [draft.ids[node] for node in draft.first_path() if node < draft.num_candidates]


def _inner(drafter: str | Drafter) -> tuple[Drafter, int | None]:
    """Build the inner drafter, and return it with the number of tokens that it may propose if its text names one."""
    row = DRAFTERS.get(drafter.partition(":")[0]) if isinstance(drafter, str) else None
    if row is not None and row.kind in ("target", "head"):
        raise DrafterError(
            f"The inner drafter is {drafter!r}, which computes with the target's own layers or rows, and here "
            "the draft model is its target. Take one that reads text, such as prompt-lookup, or another draft model."
        )
    inner, num_draft_tokens = build_drafter(drafter)
    if isinstance(inner, ModelDrafter) and inner.drafting_model.reads_states:
        raise DrafterError(
            f"The inner drafter, {type(inner).__name__}, reads the target's hidden states, and here the draft model is "
            "its target. Take one that reads text, such as prompt-lookup."
        )
    if inner.traits.writes_cache:
        raise DrafterError(
            f"The inner drafter, {type(inner).__name__}, computes in the target's own cache, and here the draft model "
            "is its target. Take one that reads text, such as prompt-lookup."
        )
    return inner, None if num_draft_tokens == AUTO else num_draft_tokens
