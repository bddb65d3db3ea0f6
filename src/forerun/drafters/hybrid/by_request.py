"""Several drafters for one engine, of which each request has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

from forerun.config import NO_DRAFTER, NumDraftTokens, SamplingParams
from forerun.drafters.base import Drafter, Offer
from forerun.drafters.hybrid.members import MemberStep, Several, signed, source_step
from forerun.drafters.validation import ask
from forerun.errors import DrafterError
from forerun.types import Draft, Sequence, Step


class ByRequest(Several):
    """Drafts for each request with the drafter that it names (`SamplingParams.drafter`).

    A request that names none has the first, or, if it has a prediction, the first that reads predictions.

    Args:
        drafters: by name.
        num_draft_tokens: name -> K of a drafter that has one of its own.

    Raises:
        DrafterError: there is none, or one of them is no drafter.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter], num_draft_tokens: Mapping[str, NumDraftTokens] | None = None
    ) -> None:
        if not drafters or NO_DRAFTER in drafters:
            raise DrafterError(f"There must be at least one drafter to choose, and none called {NO_DRAFTER!r}.")
        super().__init__(list(drafters.items()))
        self._drafters = dict(drafters)
        self._num_draft_tokens = num_draft_tokens or {}
        self._started: dict[Sequence, str] = {}  # the drafter that has been told of it
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
            whole = drafter.traits.fixed_length_draft or 1
            places = [place for place, each in enumerate(sequences) if self._started.get(each) == name]
            wanted = [num_draft_tokens[place] if num_draft_tokens[place] >= whole else 0 for place in places]
            if not any(wanted):
                continue
            made = ask(drafter, [sequences[place] for place in places], wanted, min_acceptance_prob)
            for place, draft in zip(places, made, strict=True):
                if len(draft):
                    drafts[place] = self._signed(name, sequences[place], draft)
        return drafts

    def _signed(self, name: str, sequence: Sequence, draft: Draft) -> Draft:
        """As `signed`, and kept until the step's verdict."""
        found = signed(name, draft)
        self._given[sequence] = MemberStep(found, {0: (len(draft), draft)}, owner=0)
        return found

    def commit(self, steps: Seq[Step]) -> None:
        all_needs = self.needs
        told: dict[str, list[Step]] = {}
        for step in steps:
            given = self._given.pop(step.sequence, None)
            if given is not None and given.draft is not step.draft:
                given = None
            name = self._started.get(step.sequence)
            if name is not None:
                needs = self._drafters[name].needs
                told.setdefault(name, []).append(source_step(step, given, 0, all_needs, needs))
        for name, its_steps in told.items():
            self._drafters[name].commit(its_steps)
