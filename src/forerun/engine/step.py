"""One step: draft, one target forward, verify, commit. There is no prefill or decode phase."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from time import perf_counter

from torch import Tensor

from forerun.config import AUTO, EngineConfig
from forerun.drafters import Drafter
from forerun.drafters.base import Offer
from forerun.drafters.validation import check_tokens, name_of
from forerun.engine.drafting import Drafting
from forerun.engine.results import StreamChunk
from forerun.engine.scheduler import Schedule
from forerun.engine.sequence import SequenceState
from forerun.engine.stats import StepStats
from forerun.engine.verifying import Verifying
from forerun.engine.work import Work
from forerun.errors import DrafterError, NonFiniteError
from forerun.models import Forward, LanguageModel, Rows, identity
from forerun.models.non_finite import first_non_finite_tensor
from forerun.sampling import TokenLogprob, row_argmax, token_logprobs
from forerun.sampling.grammar.drafts import SOURCE
from forerun.speculation import (
    DraftOutcome,
    FixedPolicy,
    PolicyByRequest,
    SpeculationPolicy,
    StepCost,
    automatic_policy,
)
from forerun.types import Draft, Verdict
from forerun.utils.tree import ROOT
from forerun.verification import UnsoundProbsError

# What is said of a target that computes logits which are NaN or infinite.


class Diagnosis:
    """Why one target's logits are not finite. Its weights are looked through once, after the first such row."""

    def __init__(self, target: LanguageModel) -> None:
        self._target = target
        self._cause: str | None = None

    def error(self) -> NonFiniteError:
        """The error of a request whose next token would depend on such a row."""
        if self._cause is None:
            tensor = first_non_finite_tensor(self._target)
            if tensor is None:
                self._cause = (
                    "No such number was found in its weights. A wider number format may help: dtype='float32'."
                )
            else:
                self._cause = f"Its weights hold such numbers, first in {tensor}. Get them anew, or another model."
        return NonFiniteError(
            f"{self._target.name} computed logits that are NaN or infinite, from which no token can be chosen. "
            f"{self._cause}"
        )


_log = logging.getLogger(__name__)


class StepLoop:
    """The parts of a step, in the order in which the engine calls them: compute, apply, then
    the drafter is told, observe.

    `compute` changes nothing that a second try would notice; `apply` commits one sequence.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        config: EngineConfig,
        budget: SpeculationPolicy | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self.drafting = Drafting(drafter, target.vocab_size)
        self._needs = self.drafting.needs
        self._hears = self._needs.rows  # of the target's rows
        self._config = config
        self._budget = budget or _new_budget(config, target, drafter)  # None: there is no drafter, and was no grammar
        self._diagnosis = Diagnosis(target)
        self._verifying = Verifying(target, config)
        self._constrained: set[SequenceState] = set()  # sequences under a grammar

    def start(self, state: SequenceState) -> None:
        """A sequence enters."""
        if state.sequence.constraint is not None:
            if self._budget is None:
                self._budget = _budget_of_grammars(self._config, self._target)
            self._constrained.add(state)
        if self._drafter is not None:
            state.entered = True
            self._drafter.start(state.sequence)
            self.drafting.check_untouched([state])

    def stop(self, state: SequenceState) -> None:
        """A sequence leaves, however far it came. Its own result or error matters more than what the drafter raises."""
        self._constrained.discard(state)
        self._verifying.pipeline.stop(state.sequence)
        try:
            if self._budget is not None:
                self._budget.stop(state.sequence)
            if self._drafter is not None and state.entered:
                self._drafter.stop(state.sequence)
        except Exception:
            _log.exception("the drafter failed to let sequence %d go", state.sequence.id)
        state.entered = False  # after an interrupt it is told again

    def reset(self) -> None:
        """A step was interrupted: let the drafter drop what sequences share. None of them is in it at this moment."""
        if self._drafter is None:
            return
        try:
            self._drafter.reset()
        except Exception:
            _log.exception("%s failed to drop what sequences share", name_of(self._drafter))

    @property
    def budget(self) -> SpeculationPolicy | None:
        """How much may be drafted; None where nobody drafts: there is no drafter, and no grammar."""
        return self._budget if self._drafter is not None or self._constrained else None

    def compute(self, schedule: Schedule, stats: StepStats) -> list[Work]:
        """Draft, forward and verify; nothing is committed."""
        work = self._draft(schedule, stats)
        rows = [item.rows(self._needs) for item in work]
        started = perf_counter()
        result = self._target.forward(rows, self._needs.layers)
        computed = perf_counter()
        for item in work:
            if item.draft is not None and len(item.draft) and self._drafter is not None:
                # some lay on a device, and the forward has waited for them
                check_tokens(self._drafter, item.draft, self._target.vocab_size)
        if self._hears:
            self._hand_out(work, rows, result)
        try:
            self._verifying.verify(work, result.logits)
        except UnsoundProbsError as error:
            assert self._drafter is not None
            raise DrafterError(f"{name_of(self._drafter)} {error}") from None
        stats.time_target, stats.time_verify = computed - started, perf_counter() - computed
        stats.num_sequences = len(work)
        for row, item in zip(rows, work, strict=True):
            stats.num_rows += len(row.token_ids)
            stats.num_positions += row.cache.length
            stats.num_prompt_rows += item.num_scheduled_tokens if item.num_scheduled_tokens > 1 else 0
            stats.num_draft_tokens += 0 if item.draft is None else len(item.draft)
            if item.budget is not None and item.draft is not None and item.verdict is not None:
                item.outcome = DraftOutcome(item.state.sequence, item.budget, item.draft, item.verdict)
                item.context = row.cache.length
        return work

    def apply(self, item: Work, stats: StepStats) -> StreamChunk | None:
        """Commit what was verified, cut where the output ends. None while the prompt is computed."""
        state, verdict = item.state, item.verdict
        sequence, cache = state.sequence, state.cache
        assert cache is not None
        if item.num_extra and state.wants_prompt_logprobs:
            self._report_prompt(item)
        if verdict is None:
            cache.commit(range(item.num_scheduled_tokens))
            return None
        nodes = verdict.path
        rows = [0, *(node + 1 for node in nodes)]
        ids = item.draft.ids if item.draft is not None else []
        new_ids = [ids[node] for node in verdict.path]
        num_accepted = len(new_ids)
        new_ids.append(verdict.next_token)
        alive = next((at for at, row in enumerate(rows) if row in item.dead_rows), len(rows))
        if alive == 0:
            raise item.dead_rows[0]
        keep, reason = state.cut(new_ids[:alive])
        if keep < len(new_ids):
            # the last token kept is a draft token, and takes the place of the verdict's own
            num_accepted, new_ids, rows = keep, new_ids[:keep], rows[:keep]
            verdict = item.verdict = Verdict(verdict.path[: keep - 1], new_ids[-1])
        if not item.bad_rows.isdisjoint(rows):
            raise self._diagnosis.error()
        cache.commit([*range(item.num_scheduled_tokens - 1), *(item.num_scheduled_tokens - 1 + row for row in rows)])
        list.extend(sequence.token_ids, new_ids)  # `TokenIds`: nobody else may
        sequence.finish_reason = reason
        chunk = StreamChunk("", new_ids, num_accepted, index=sequence.choice)
        if item.draft is not None and item.draft.sources:
            chunk.sources = tuple([item.draft.sources[node] for node in nodes[:num_accepted]])
        if state.logprobs is not None:
            chunk.logprobs = self._report(item, [item.num_extra + row for row in rows], new_ids)
            state.logprobs += chunk.logprobs
        self._count(item, chunk, nodes[:num_accepted], stats)
        return chunk

    def observe(self, work: Seq[Work], stats: StepStats, time_rest: float) -> None:
        """Tell the budget what the step cost and gave. time_rest: what the engine took besides, in seconds."""
        budget = self.budget
        if budget is None:
            return
        outcomes = [item.outcome for item in work if item.outcome is not None]
        cost = StepCost(
            num_rows=stats.num_rows,
            num_prompt_rows=sum(item.num_scheduled_tokens for item in work if item.budget is None),
            context=sum(item.context for item in work),
            time_draft=stats.time_draft,
            time_target=stats.time_target,
            time_verify=stats.time_verify,
            time_rest=time_rest,
        )
        budget.observe(cost, outcomes)

    def _draft(self, schedule: Schedule, stats: StepStats) -> list[Work]:
        """What each turn computes, with the drafts of those that may have one."""
        all_rows = self._needs.prompt_rows and self._hears
        work = []
        for state, num_scheduled_tokens in schedule.undrafted:
            last = num_scheduled_tokens == state.num_uncomputed_tokens
            extra = num_scheduled_tokens - last if all_rows or state.wants_prompt_logprobs else 0
            work.append(Work(state, num_scheduled_tokens, Draft() if last else None, extra))
        ready, plan = schedule.drafting, schedule.plan
        if ready:
            started = perf_counter()
            drafts = self.drafting.ask(ready, plan)
            stats.time_draft = perf_counter() - started
            for state, draft, budget in zip(ready, drafts, plan.budgets, strict=True):
                reason = "request" if state.most_drafted == 0 else plan.reason
                work.append(Work(state, 1, draft, budget=budget, reason=reason))
            stats.reason = plan.reason
        return work

    def _hand_out(self, work: Seq[Work], rows: Seq[Rows], result: Forward) -> None:
        """Keep what the drafter wants to know of every row."""
        logits, hidden_outputs = result.logits, result.hidden_outputs
        count = min(self._needs.top_tokens, logits.shape[1])
        top: Tensor | None = None
        if count and len(logits):
            top = row_argmax(logits)[:, None] if count == 1 else logits.topk(count).indices
        at = hidden_output = 0
        for item, row in zip(work, rows, strict=True):
            end, last = at + item.num_logits, hidden_output + row.num_hidden_rows
            if top is not None and end > at:
                item.top_tokens = top[at:end]
            if hidden_outputs is not None and last > hidden_output:
                item.hidden_outputs = hidden_outputs[hidden_output:last]
            at, hidden_output = end, last

    def _report_prompt(self, item: Work) -> None:
        state = item.state
        assert state.cache is not None
        assert state.prompt_logprobs is not None
        first = state.cache.length + 1
        ids = state.request.prompt_token_ids[first : first + item.num_extra]
        state.prompt_logprobs += self._report(item, list(range(item.num_extra)), ids, prompt=True)

    def _report(self, item: Work, rows: list[int], token_ids: list[int], prompt: bool = False) -> list[TokenLogprob]:
        params = item.state.request.params
        num_top = params.prompt_logprobs if prompt else params.logprobs
        assert item.logits is not None
        assert num_top is not None
        return token_logprobs(item.logits[rows], token_ids, num_top)

    def _count(self, item: Work, chunk: StreamChunk, accepted: list[int], stats: StepStats) -> None:
        own = item.state.stats
        if own.num_tokens == 0:
            own.time_first_token = perf_counter() - item.state.time_started
        own.num_tokens += len(chunk.token_ids)
        own.num_forwards += 1
        own.num_plain_forwards += not item.budget
        if item.budget is not None:
            own.num_asked_tokens += item.budget
            decision = f"{'on' if item.budget else 'off'}: {item.reason}"
            own.decisions[decision] = own.decisions.get(decision, 0) + 1
        if item.draft is not None and len(item.draft):
            depths = [depth - 1 for depth in item.draft.depths[: item.draft.num_candidates]]
            # one more than was accepted, where the last accepted node has a child
            end = accepted[-1] if accepted else ROOT
            goes_on = len(chunk.token_ids) > len(accepted) and end in item.draft.parents[: item.draft.num_candidates]
            own.count_draft(depths, chunk.num_accepted_draft, chunk.num_accepted_draft + goes_on)
            if item.draft.sources:
                own.count_sources(item.draft.sources[: item.draft.num_candidates], accepted)
        stats.num_tokens += len(chunk.token_ids)
        stats.num_accepted_tokens += chunk.num_accepted_draft


def _new_budget(config: EngineConfig, target: LanguageModel, drafter: Drafter | None) -> SpeculationPolicy | None:
    if drafter is None:
        return None
    offers = drafter.offers
    if not offers:
        return _budget_of(Offer(drafter.traits), config, target)
    budgets = {name: _budget_of(offer, config, target) for name, offer in offers.items()}
    return PolicyByRequest(budgets, lambda sequence: drafter.chosen(sequence.params))


def _budget_of(offer: Offer, config: EngineConfig, target: LanguageModel) -> SpeculationPolicy:
    k, traits = config.num_draft_tokens, offer.traits
    if k == AUTO and offer.num_draft_tokens is not None:
        k = offer.num_draft_tokens
    if isinstance(k, int):
        return FixedPolicy(k)
    return automatic_policy(
        fixed_length_draft=traits.fixed_length_draft,
        cost_key=(identity(target), *traits.cost_key),
        catches_up=traits.catches_up,
    )


def _budget_of_grammars(config: EngineConfig, target: LanguageModel) -> SpeculationPolicy:
    """How many of the tokens that grammars force may be drafted, where there is no drafter."""
    if isinstance(config.num_draft_tokens, int):
        return FixedPolicy(config.num_draft_tokens)
    return automatic_policy(fixed_length_draft=None, cost_key=(identity(target), SOURCE))
