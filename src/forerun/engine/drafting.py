"""What the engine asks of its drafter and tells it; an engine without one is served too."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from forerun.drafters import Drafter
from forerun.drafters.ask import ask, check_drafter, check_tokens, name_of
from forerun.engine.grammar_drafts import forced_tokens, with_grammar
from forerun.engine.state import SequenceState
from forerun.engine.work import Work
from forerun.errors import DrafterError
from forerun.policy import Plan
from forerun.types import Draft, Needs, Sequence, Step, Verdict

_log = logging.getLogger(__name__)


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

    def start(self, state: SequenceState) -> None:
        """A sequence enters."""
        if self.drafter is not None:
            state.entered = True
            self.drafter.start(state.sequence)
            self._check_untouched([state])

    def stop(self, state: SequenceState) -> None:
        """A sequence leaves, if it has entered."""
        if self.drafter is None or not state.entered:
            return
        try:
            self.drafter.stop(state.sequence)
        except Exception:
            state.entered = False
            raise
        state.entered = False  # after an interrupt it is told again

    def reset(self) -> None:
        """A step was interrupted: let the drafter drop what sequences share. None of them is in it at this moment."""
        if self.drafter is None:
            return
        try:
            self.drafter.reset()
        except Exception:
            _log.exception("%s failed to drop what sequences share", name_of(self.drafter))

    def ask(self, ready: Seq[SequenceState], plan: Plan) -> Seq[Draft]:
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

    def _ask(self, ready: Seq[SequenceState], sequences: Seq[Sequence], plan: Plan, budgets: Seq[int]) -> Seq[Draft]:
        if self.drafter is None or not any(budgets):
            return [Draft.empty()] * len(ready)
        try:
            return ask(self.drafter, sequences, budgets, plan.price, self._vocab_size)
        finally:
            self._check_untouched(ready)

    def check_tokens(self, draft: Draft) -> None:
        """Look at tokens that lay on a device, now that the forward has waited for them."""
        if self.drafter is not None:
            check_tokens(self.drafter, draft, self._vocab_size)

    def tell(self, work: Seq[Work]) -> dict[SequenceState, Exception]:
        """Report what was committed; the sequences for which the drafter failed."""
        if self.drafter is None or not work:
            return {}
        failed: dict[SequenceState, Exception] = {}
        states = [item.state for item in work]
        steps = [_step(item, self.needs) for item in work]
        try:
            self.drafter.commit(steps[:])
            self._check_untouched(states)
        except Exception:
            for state, step in zip(states, steps, strict=True):
                try:
                    self.drafter.commit([step])
                    self._check_untouched([state])
                except Exception as error:
                    failed[state] = error
        return failed

    def error(self, error: Exception) -> DrafterError:
        """The error of a draft that its verification refused."""
        assert self.drafter is not None
        return DrafterError(f"{name_of(self.drafter)} {error}")

    def _check_untouched(self, states: Seq[SequenceState]) -> None:
        touched = [state for state in states if not state.is_untouched()]
        if touched and self.drafter is not None:
            raise DrafterError(
                f"{name_of(self.drafter)} changed a sequence, which is the engine's. Its attributes are for reading; "
                "keep what belongs to the drafter elsewhere."
            )


def _step(item: Work, needs: Needs) -> Step:
    assert item.state.cache is not None
    verdict = item.verdict
    if verdict is not None:
        verdict = Verdict(list(verdict.path), verdict.next_token)  # a copy: the policy reads it after the drafter
    length = item.state.cache.length
    taps, states = item.taps, None
    if needs.states and taps is not None:
        path = [] if verdict is None else verdict.path
        owed = item.num_owed
        states = taps[[*range(owed), *(owed + node for node in path)]] if path else taps[:owed]
        taps = taps[len(taps) - item.num_logits :] if item.num_logits else None
    return Step(item.state.sequence, item.draft, verdict, length, item.top_tokens, taps, states)
