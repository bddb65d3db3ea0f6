"""Several drafters for one engine, of which each request has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

from forerun.config import NO_DRAFTER, NumDraftTokens, SamplingParams
from forerun.drafters.base import Drafter, Offer
from forerun.drafters.hybrid.members import CompositeDrafter, MemberStep, source_step, with_source
from forerun.drafters.validation import checked_drafts
from forerun.errors import DrafterError
from forerun.types import Draft, Sequence, Step


class ByRequest(CompositeDrafter):
    """Drafts for each request with the drafter that it names (`SamplingParams.drafter`).

    A request that names none has the first, or, if it has a prediction, the first that reads predictions.

    Args:
        drafters: by name.
        num_draft_tokens: name -> K of a drafter that has one of its own.

    Raises:
        DrafterError: there is none, or one of them is no drafter.
    """

    _kind = "ByRequest"

    def __init__(
        self, drafters: Mapping[str, Drafter], num_draft_tokens: Mapping[str, NumDraftTokens] | None = None
    ) -> None:
        if not drafters or NO_DRAFTER in drafters:
            raise DrafterError(f"There must be at least one drafter to choose, and none called {NO_DRAFTER!r}.")
        super().__init__(list(drafters.items()))
        self._drafters = dict(drafters)
        self._num_draft_tokens = num_draft_tokens or {}
        self._started: dict[Sequence, str] = {}  # the drafter that started it
        self._given: dict[Sequence, MemberStep] = {}

    @property
    def offers(self) -> Mapping[str, Offer]:
        return {
            name: Offer(drafter.traits, self._num_draft_tokens.get(name)) for name, drafter in self._drafters.items()
        }

    def chosen(self, params: SamplingParams) -> str | None:
        if params.drafter is not None:
            return None if params.drafter == NO_DRAFTER else params.drafter
        if params.prediction is not None:
            for name, drafter in self._drafters.items():
                if drafter.traits.reads_prediction:
                    return name
        return next(iter(self._drafters))

    def see_prices(self, prices: Seq[float]) -> None:
        for drafter in self._drafters.values():
            drafter.see_prices(prices)

    def start(self, sequence: Sequence) -> None:
        name = self.chosen(sequence.params)
        if name is not None:
            self._started[sequence] = name
            self._drafters[name].start(sequence)

    def stop(self, sequence: Sequence) -> None:
        self._given.pop(sequence, None)
        name = self._started.get(sequence)
        if name is None:
            return
        try:
            self._drafters[name].stop(sequence)
        finally:
            self._started.pop(sequence, None)

    def rewind(self, sequence: Sequence, length: int) -> None:
        self._given.pop(sequence, None)
        name = self._started.get(sequence)
        if name is not None:
            self._drafters[name].rewind(sequence, length)

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = [Draft.empty() for _ in sequences]
        for name, drafter in self._drafters.items():
            indices = [index for index, each in enumerate(sequences) if self._started.get(each) == name]
            wanted = [num_draft_tokens[index] for index in indices]
            if not any(wanted):
                continue
            made = checked_drafts(drafter, [sequences[index] for index in indices], wanted, min_acceptance_prob)
            for index, draft in zip(indices, made, strict=True):
                if len(draft):
                    drafts[index] = with_source(name, draft)
                    self._given[sequences[index]] = MemberStep(drafts[index], {0: (len(draft), draft)}, owner=0)
        return drafts

    def commit(self, steps: Seq[Step]) -> None:
        all_needs = self.needs
        steps_of: dict[str, list[Step]] = {}
        for step in steps:
            given = self._given.pop(step.sequence, None)
            given = None if given is None else given.of(step.draft)
            name = self._started.get(step.sequence)
            if name is not None:
                needs = self._drafters[name].needs
                steps_of.setdefault(name, []).append(source_step(step, given, 0, all_needs, needs))
        for name, its_steps in steps_of.items():
            self._drafters[name].commit(its_steps)
