"""What the engine asks of its drafter and tells it; an engine without one is served too."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter

from forerun.drafters import Drafter
from forerun.drafters.validation import check_drafter, checked_drafts, name_of
from forerun.engine.sequence import SequenceState
from forerun.engine.stats import StepStats
from forerun.engine.work import Work
from forerun.errors import DrafterError
from forerun.sampling.grammar.drafts import forced_tokens, with_grammar
from forerun.speculation import DraftPlan
from forerun.types import Draft, Needs, Sequence, Step, Verdict


class Drafting:
    """The drafter as the step loop sees it.

    Raises:
        DrafterError: what was given is no drafter.
    """

    def __init__(self, drafter: Drafter | None, vocab_size: int) -> None:
        if drafter is not None:
            check_drafter(drafter)
        self.drafter = drafter
        self.needs = Needs() if drafter is None else drafter.needs
        self._vocab_size = vocab_size

    def ask(self, ready: Seq[SequenceState], plan: DraftPlan) -> Seq[Draft]:
        """The drafts; where nobody may draft, the drafter is not called.

        Of a sequence whose grammar forces as many tokens as it may draft, nobody else is asked.
        """
        budgets = plan.budgets
        if not any(budgets):
            return [Draft.empty()] * len(ready)
        sequences = [state.sequence for state in ready]
        if all(sequence.constraint is None for sequence in sequences):
            return self._ask(ready, sequences, plan, budgets)
        forced = forced_tokens(sequences, budgets)
        rest = [0 if len(tokens) >= budget else budget for tokens, budget in zip(forced, budgets, strict=True)]
        drafts = list(self._ask(ready, sequences, plan, rest))
        for index, sequence in enumerate(sequences):
            if sequence.constraint is not None:
                drafts[index] = with_grammar(sequence, forced[index], drafts[index], budgets[index])
        return drafts

    def _ask(
        self, ready: Seq[SequenceState], sequences: Seq[Sequence], plan: DraftPlan, budgets: Seq[int]
    ) -> Seq[Draft]:
        if self.drafter is None or not any(budgets):
            return [Draft.empty()] * len(ready)
        try:
            return checked_drafts(self.drafter, sequences, budgets, plan.min_acceptance_prob, self._vocab_size)
        finally:
            self.check_untouched(ready)

    def tell(self, work: Seq[Work], stats: StepStats) -> dict[SequenceState, Exception]:
        """Report what was committed; the sequences for which the drafter failed."""
        if self.drafter is None or not work:
            return {}
        started = perf_counter()
        failed: dict[SequenceState, Exception] = {}
        states = [item.state for item in work]
        steps = []
        for item in work:
            state, verdict, hidden_outputs, hidden = item.state, item.verdict, item.hidden_outputs, None
            assert state.cache is not None
            if verdict is not None:  # a copy: the policy reads it after the drafter
                verdict = Verdict(list(verdict.path), verdict.next_token)
            if self.needs.states and hidden_outputs is not None:
                path, owed = [] if verdict is None else verdict.path, item.num_scheduled_tokens
                hidden = (
                    hidden_outputs[[*range(owed), *(owed + node for node in path)]] if path else hidden_outputs[:owed]
                )
                hidden_outputs = hidden_outputs[len(hidden_outputs) - item.num_logits :] if item.num_logits else None
            length = state.cache.length
            steps.append(Step(state.sequence, item.draft, verdict, length, item.top_tokens, hidden_outputs, hidden))
        try:
            self.drafter.commit(steps[:])
            self.check_untouched(states)
        except Exception:
            for state, step in zip(states, steps, strict=True):
                try:
                    self.drafter.commit([step])
                    self.check_untouched([state])
                except Exception as error:
                    failed[state] = error
        stats.time_draft += perf_counter() - started
        return failed

    def check_untouched(self, states: Seq[SequenceState]) -> None:
        touched = [state for state in states if not state.is_untouched()]
        if touched and self.drafter is not None:
            raise DrafterError(
                f"{name_of(self.drafter)} changed a sequence, which is the engine's. Its attributes are for reading; "
                "keep what belongs to the drafter elsewhere."
            )
