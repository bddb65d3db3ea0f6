"""A drafter drafts for the draft model, which drafts for the target.

The inner loop is speculation like the outer one: what the inner drafter proposes goes through the draft model in one
forward, and the draft model keeps the tokens that it would have picked itself, greedily, with a seeded request's noise,
or by drawing from its own laws. So its chain, and the laws of a drawn one, are those it would have drafted alone, in
fewer forwards. (Chen et al., Cascade Speculative Drafting, 2312.11462, and Sun et al., TriForce, 2404.11912.)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from forerun.config import STAGED_INNER_DRAFTER
from forerun.drafters.binding import Bindable, Binding
from forerun.drafters.draft_model import Chain, DraftModel
from forerun.errors import DrafterError
from forerun.models import Model
from forerun.types import Draft, Drafter, Needs, Sequence, Step


class Staged(DraftModel):
    """A draft model with a drafter of its own.

    The inner drafter is asked once for each draft, when all tokens are committed: it need not be able to take tokens
    back. Where its proposal ends or fails, the draft model goes on alone.

    Args:
        model: the draft model, as in DraftModel.
        drafter: the inner one: a name of the table, perhaps with options, or a drafter. Not one that computes with the
            target's own layers, since those are not the draft model's.
        num_draft_tokens: K; None takes the engine's.
        dtype: of the draft model's weights; None takes the target's.

    Raises:
        DrafterError: the inner drafter is unknown, or of a kind that cannot serve here.
    """

    def __init__(
        self,
        model: str | Path | Model | None = None,
        drafter: str | Drafter = STAGED_INNER_DRAFTER,
        num_draft_tokens: int | None = None,
        *,
        dtype: str | None = None,
    ) -> None:
        super().__init__(model, num_draft_tokens, dtype=dtype)
        self._inner = _inner(drafter)
        self._inner_most: int | None = getattr(self._inner, "num_draft_tokens", None)
        self.needs: Needs = getattr(self._inner, "needs", Needs())
        self.reads_prediction: bool = getattr(self._inner, "reads_prediction", False)

    @property
    def nbytes(self) -> int:
        """Bytes of the draft model's caches, and of the inner drafter."""
        inner: int = getattr(self._inner, "nbytes", 0)
        return super().nbytes + inner

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        if isinstance(self._inner, Bindable):
            # its text is the target's; a seed of its own, so that its draws are not those of the draft model
            seed = None if binding.seed is None else binding.seed ^ 1
            self._inner.bind(Binding(self.model, binding.tokenizer, seed))

    def start(self, sequence: Sequence) -> None:
        super().start(sequence)
        self._inner.start(sequence)

    def stop(self, sequence: Sequence) -> None:
        if sequence in self._owned:
            super().stop(sequence)
            self._inner.stop(sequence)

    def commit(self, steps: Seq[Step]) -> None:
        super().commit(steps)
        self._inner.commit(steps)

    def rewind(self, sequence: Sequence, length: int) -> None:
        super().rewind(sequence, length)
        self._inner.stop(sequence)
        self._inner.start(sequence)

    def _prepare(self, chains: list[Chain]) -> None:
        super()._prepare(chains)
        budgets = []
        for chain in chains:
            most = chain.budget - 1  # the draft model adds a token of its own
            budgets.append(most if self._inner_most is None else min(most, self._inner_most))
        if any(budgets):
            drafts = self._inner.draft([chain.sequence for chain in chains], budgets)
            for chain, draft in zip(chains, drafts, strict=True):
                chain.proposed = _first_path(draft)


def _first_path(draft: Draft) -> list[int]:
    """The tokens of the path that takes the first child everywhere: drafters put what they think most of first."""
    tokens: list[int] = draft.token_ids.tolist()
    path: list[int] = []
    node = -1
    for i, parent in enumerate(draft.parents.tolist()[: draft.num_candidates]):
        if parent == node:
            path.append(tokens[i])
            node = i
    return path


def _inner(drafter: str | Drafter) -> Drafter:
    from forerun.drafters.table import DRAFTERS, build_drafter  # the table has a row for this module

    row = DRAFTERS.get(drafter.partition(":")[0]) if isinstance(drafter, str) else None
    if row is not None and row.kind == "target":
        raise DrafterError(
            f"The inner drafter is {drafter!r}, which computes with the target's own layers or rows, and here "
            "the draft model is its target. Take one that reads text, such as prompt-lookup, or another draft model."
        )
    inner = build_drafter(drafter)
    if getattr(inner, "writes_cache", False):
        raise DrafterError(
            f"The inner drafter, {type(inner).__name__}, computes in the target's own cache, and here the draft model "
            "is its target. Take one that reads text, such as prompt-lookup."
        )
    return inner
