"""A step of the engine, from top to bottom: schedule, draft, forward, verify, commit, learn, deliver."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from forerun.config import AUTO, MAX_NUM_DRAFT_TOKENS, EngineConfig
from forerun.drafters import Drafter
from forerun.drafters.base import Offer, Traits
from forerun.drafters.validation import check_tokens, checked_drafts, name_of
from forerun.engine.kv_cache_manager import KVCacheManager
from forerun.engine.results import StepOutput, StepStats, StreamChunk
from forerun.engine.scheduler import Schedule, Scheduler
from forerun.engine.sequence import SequenceState, SequenceStep
from forerun.engine.text import TokenTexts
from forerun.engine.verifying import Verifying
from forerun.errors import DrafterError, NonFiniteError, UnsoundProbsError
from forerun.models import Forward, LanguageModel, identity
from forerun.sampling import row_top
from forerun.sampling.grammar import SOURCE, forced_tokens, with_grammar
from forerun.speculation import (
    DraftOutcome,
    DraftPlan,
    FixedPolicy,
    PolicyByRequest,
    Reason,
    SpeculationPolicy,
    StepCost,
    drafter_costs,
)
from forerun.types import Draft, Needs, Sequence, Verdict
from forerun.utils.device import DeviceFaults

if TYPE_CHECKING:
    from forerun.drafters.lookup.remembered.remembered_text import RememberedText

_log = logging.getLogger(__name__)
_NO_NEEDS = Needs()
READ_AT_ONCE = 8
"""Pages of prompts that a step reads from the disk where others wait for it: 8 take about 30 ms of a small model."""


class StepLoop:
    """Takes the running sequences one forward further, step by step, and lets go of those that end.

    Until all verdicts are there, a step changes nothing that a second try would notice. Then sequence after sequence is
    committed. An interrupt leaves `under_way` filled, and `Engine` recovers its sequences.

    Args:
        policy: decides how much is drafted; None: the policy that `config` and the drafter choose.
        texts: decodes outputs; None without a tokenizer.
        clock: seconds, by which the scheduler learns how long steps take.

    Attributes:
        scheduler: the sequences, waiting and running.
        outputs: of the steps, until they are taken from the front.
        under_way: the sequences of the present step; after it, of one cut short.
        last_step: figures of the last step.
        faults: whether the device has failed.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        config: EngineConfig,
        policy: SpeculationPolicy | None,
        memory: KVCacheManager,
        texts: TokenTexts | None,
        clock: Callable[[], float],
        remembered: RememberedText | None = None,
    ) -> None:
        self._target, self._drafter, self._config = target, drafter, config
        self._memory, self._texts, self._clock = memory, texts, clock
        self._remembered = remembered
        self._needs = _NO_NEEDS if drafter is None else drafter.needs
        self._is_asleep = False  # the drafter is not told of the present step
        self._rests = False  # nor the policy of its outcomes
        self._policy = policy or _new_policy(config, target, drafter)  # None: no drafter, and no grammar so far
        self._verifying = Verifying(target, config)
        self._constrained: set[SequenceState] = set()  # sequences under a grammar
        self.scheduler = Scheduler(config, target, memory)
        self.faults = DeviceFaults(target.device)
        self.outputs: deque[StepOutput] = deque()
        self.under_way: list[SequenceState] = []
        self.last_step = StepStats()

    @property
    def policy(self) -> SpeculationPolicy | None:
        """Return the policy that decides how much is drafted; None without a drafter and without grammars."""
        return self._policy if self._drafter is not None or self._constrained else None

    def run(self) -> None:
        """Take every running sequence one forward further."""
        started = self._clock()
        schedule = self._schedule()
        if schedule is not None:
            with torch.inference_mode():
                self.last_step = stats = self._step(schedule)
            stats.time_total = self._clock() - started
            self.scheduler.share.observe(stats)
        self.under_way = []

    def _step(self, schedule: Schedule) -> StepStats:
        """Run one step of these sequences. If it fails for all, run each alone: only the cause of the error ends."""
        stats = StepStats()
        started = perf_counter()
        try:
            work = self._draft(schedule, stats)
            if self._drafter is not None and self._policy is not None:
                self._is_asleep, self._rests = self._policy.is_asleep, self._policy.rests
                self._needs = _NO_NEEDS if self._is_asleep else self._drafter.needs
            result = self._forward(work, stats)
            self._verify(work, result, stats)
        except Exception as error:
            return self._each_alone(schedule, self.faults.own(error))
        done = self._commit(work, stats)
        failed = self._tell_drafter(done, stats)
        known = stats.time_draft + stats.time_target + stats.time_verify
        self.observe(done, stats, perf_counter() - started - known)
        for item in done:
            item.state.stats.add_times(stats)
            if item.state in failed:
                self.fail(item.state, failed[item.state])
            else:
                self.deliver(item.state)
        return stats

    def _each_alone(self, schedule: Schedule, error: Exception) -> StepStats:
        """Run a step that has failed for all of these sequences again, each alone, unless the device has failed."""
        states = schedule.states
        for state in states:
            if state.cache is not None:
                state.cache.drop()
        stats = StepStats()
        if len(states) == 1 or self.faults.failure is not None:
            for state in states:
                self.fail(state, error)
        else:
            for alone in schedule.split():
                stats.add(self._step(alone))
        return stats

    # Schedule

    def _schedule(self) -> Schedule | None:
        """Preempt, admit and start sequences, and plan the step of those that run; None where nothing is to be done."""
        scheduler, now = self.scheduler, perf_counter()
        self.under_way = list(scheduler.running)
        while (state := scheduler.preempted()) is not None:
            self.release(state)
            if state.wants_prompt_logprobs:
                state.prompt_logprobs = [None]
            state.stats.num_preemptions += 1
            scheduler.requeue(state)
        scheduler.admit()
        self.under_way = list(scheduler.running)
        unread = READ_AT_ONCE
        others_run = any(state.cache is not None for state in self.under_way)
        for state in self.under_way:
            if state.cache is None:
                state.time_started = state.time_started or now
                try:
                    if others_run:
                        num_pages, more = self._memory.read(state, unread)
                        unread -= num_pages
                        if more:
                            continue  # it reads on in the next step
                    self._memory.begin(state)
                    self.start(state)
                except Exception as error:
                    self.fail(state, error)
        if not scheduler.running:
            return None
        schedule = scheduler.plan(self.policy)
        if schedule.undrafted or schedule.drafting:
            return schedule
        for state in list(scheduler.running):  # other caches hold the pages of the target's pool, perhaps for ever
            self.fail(state, self._memory.shortage())
        return None

    def start(self, state: SequenceState) -> None:
        """Prepare for the steps of a sequence that enters."""
        if state.sequence.constraint is not None:
            if self._policy is None:
                traits = Traits(cost_key=(SOURCE,))  # of the tokens that grammars force, without a drafter
                self._policy = _policy_of(Offer(traits), self._config, self._target)
            self._constrained.add(state)
        if self._drafter is not None:
            state.entered = True
            offer = self._drafter.offers.get(self._drafter.chosen(state.sequence.params) or "")
            traits = self._drafter.traits if offer is None else offer.traits
            asked = state.request.params.num_draft_tokens
            if state.most_drafted and asked is not None:
                state.most_drafted = with_probes(asked, traits)
            self._drafter.start(state.sequence)
            self._check_untouched([state])

    # Draft

    def _draft(self, schedule: Schedule, stats: StepStats) -> list[SequenceStep]:
        """Make the sequences' parts of the step, with the drafts of those that may have one."""
        all_rows = self._needs.prompt_rows and self._needs.rows
        work = []
        for state, num_scheduled_tokens in schedule.undrafted:
            last = num_scheduled_tokens == state.num_uncomputed_tokens
            extra = num_scheduled_tokens - last if all_rows or state.wants_prompt_logprobs else 0
            draft = Draft() if last else None
            work.append(SequenceStep(state, num_scheduled_tokens, draft, extra, reason=self._unused(state)))
        ready, plan = schedule.drafting, schedule.plan
        if ready:
            drafts: Seq[Draft] = [Draft() for _ in ready]
            if any(plan.num_draft_tokens):
                started = perf_counter()
                drafts, plan = self._drafts(ready, plan)
                stats.time_draft = perf_counter() - started
            for index, (state, draft, k) in enumerate(zip(ready, drafts, plan.num_draft_tokens, strict=True)):
                told = "request" if state.most_drafted == 0 else plan.reason_of(index)
                reason = self._unused(state) or told
                work.append(SequenceStep(state, 1, draft, num_draft_tokens=k, reason=reason))
            stats.reason = plan.reason
        return work

    def _unused(self, state: SequenceState) -> Reason | None:
        """Return why nothing can be drafted for a sequence: no drafter is used, and its grammar forces no tokens."""
        if self._drafter is not None or state.sequence.constraint is not None:
            return None
        return "no drafter" if self._config.num_draft_tokens else "fixed"

    def _drafts(self, ready: Seq[SequenceState], plan: DraftPlan) -> tuple[Seq[Draft], DraftPlan]:
        """Return the drafts of these sequences, with the tokens that their grammars force, and the plan as it was kept.

        The drafter is not called for a sequence whose grammar forces as many tokens as it may draft. The policy cuts
        what the drafter gave; forced tokens cost nothing to find, and are drafted however little it keeps.
        """
        assert self._policy is not None
        most, sequences = plan.num_draft_tokens, [state.sequence for state in ready]
        forced = forced_tokens(sequences, most)
        unforced = [0 if len(tokens) >= k else k for tokens, k in zip(forced, most, strict=True)]
        drafts = self._call_drafter(ready, sequences, plan, unforced)
        kept = self._policy.trim(plan, sequences, drafts)
        drafts = [draft.first(k) for draft, k in zip(drafts, kept.num_draft_tokens, strict=True)]
        if not self._constrained:
            return drafts, kept
        counts = list(kept.num_draft_tokens)
        reasons = dict(kept.own_reasons)
        for index, sequence in enumerate(sequences):
            if sequence.constraint is None:
                counts[index] = 0 if self._drafter is None else counts[index]
                continue
            drafts[index] = with_grammar(sequence, forced[index], drafts[index], most[index])
            if len(drafts[index]) > counts[index]:
                counts[index] = len(drafts[index])
                reasons[index] = plan.reason_of(index)
        reason = kept.reason if any(kept.num_draft_tokens) or not any(counts) else plan.reason
        return drafts, replace(kept, num_draft_tokens=counts, reason=reason, own_reasons=reasons)

    def _call_drafter(
        self, ready: Seq[SequenceState], sequences: Seq[Sequence], plan: DraftPlan, num_draft_tokens: Seq[int]
    ) -> Seq[Draft]:
        if self._drafter is None or not any(num_draft_tokens):
            return [Draft() for _ in ready]
        if plan.prices is not None:
            self._drafter.see_prices(plan.prices)
        try:
            return checked_drafts(
                self._drafter, sequences, num_draft_tokens, plan.min_acceptance_prob, self._target.vocab_size
            )
        finally:
            self._check_untouched(ready)

    def _check_untouched(self, states: Seq[SequenceState]) -> None:
        """Restore the sequences that the drafter has changed. Raises DrafterError if there are any."""
        touched = [state for state in states if not state.is_untouched()]
        if touched and self._drafter is not None:
            raise DrafterError(
                f"{name_of(self._drafter)} changed a sequence, which is the engine's. Its attributes are for reading; "
                "keep what belongs to the drafter elsewhere."
            )

    # Forward

    def _forward(self, work: Seq[SequenceStep], stats: StepStats) -> Forward:
        """Compute the rows of all sequences, committed tokens and drafts together."""
        rows = [item.rows(self._needs) for item in work]
        started = perf_counter()
        result = self._target.forward(rows, self._needs.layers)
        stats.time_target = perf_counter() - started
        stats.num_experts = result.num_experts
        stats.num_sequences = len(work)
        first = 0
        for row, item in zip(rows, work, strict=True):
            length = row.cache.length
            stats.num_rows += len(row.token_ids)
            stats.num_positions += length
            stats.num_prompt_rows += item.num_scheduled_tokens if item.num_scheduled_tokens > 1 else 0
            stats.num_draft_tokens += 0 if item.draft is None else len(item.draft)
            item.context = 0 if item.num_draft_tokens is None else length
            if result.hidden_outputs is not None:
                end = first + row.num_hidden_rows
                if end > first:
                    item.hidden_outputs = result.hidden_outputs[first:end] if len(rows) > 1 else result.hidden_outputs
                first = end
        return result

    # Verify

    def _verify(self, work: Seq[SequenceStep], result: Forward, stats: StepStats) -> None:
        """Decide how far each draft is accepted, and which token follows."""
        started, drafter, logits = perf_counter(), self._drafter, result.logits
        if drafter is not None:
            for item in work:
                if item.draft is not None and len(item.draft):
                    # some lay on a device, and the forward has waited for them
                    check_tokens(drafter, item.draft, self._target.vocab_size)
        if self._needs.top_tokens and len(logits):
            top, first = row_top(logits, min(self._needs.top_tokens, logits.shape[1])), 0
            for item in work:
                end = first + item.num_logits
                if end > first:
                    item.top_tokens = top[first:end] if len(work) > 1 else top
                first = end
        try:
            self._verifying.verify(work, logits)
        except UnsoundProbsError as error:
            assert drafter is not None
            raise DrafterError(f"{name_of(drafter)} {error}") from None
        for item in () if self._rests else work:
            if item.num_draft_tokens is not None and item.draft is not None and item.verdict is not None:
                item.outcome = DraftOutcome(item.state.sequence, item.num_draft_tokens, item.draft, item.verdict)
        stats.time_verify = perf_counter() - started

    # Commit

    def _commit(self, work: Seq[SequenceStep], stats: StepStats) -> list[SequenceStep]:
        """Commit the sequences one by one, end those that fail, and return the parts of the others."""
        done = []
        for item in work:
            state = item.state
            try:
                state.changing = True
                chunk = self._committed(item, stats)
                state.pending, state.changing = chunk, False
                if not state.prompt_is_shared and chunk is not None:
                    self._memory.publish(state)
                    self.scheduler.prompt_computed(state)
                    state.prompt_is_shared = True
            except Exception as error:
                self.fail(state, error)
            else:
                done.append(item)
        return done

    def _committed(self, item: SequenceStep, stats: StepStats) -> StreamChunk | None:
        """Commit the verified tokens of one sequence, cut where the output ends.

        Returns:
            The committed tokens; None while the prompt is computed.
        """
        state, verdict = item.state, item.verdict
        sequence, cache, params = state.sequence, state.cache, state.request.params
        assert cache is not None
        if item.num_extra and state.wants_prompt_logprobs:
            item.report_prompt()
        if verdict is None:
            cache.commit(range(item.num_scheduled_tokens))
            self._memory.mark(state)
            return None
        nodes = verdict.path
        rows = [0, *(node + 1 for node in nodes)]
        ids = item.draft.ids if item.draft is not None else []
        new_ids = [*(ids[node] for node in nodes), verdict.next_token]
        num_accepted = len(nodes)
        alive = next((at for at, row in enumerate(rows) if row in item.dead_rows), len(rows))
        if alive == 0:
            raise item.dead_rows[0]
        keep, reason = state.cut(new_ids[:alive])
        if keep < len(new_ids):
            # the last token kept is a draft token, and replaces the verdict's own
            num_accepted, new_ids, rows = keep, new_ids[:keep], rows[:keep]
            verdict = item.verdict = Verdict(nodes[: keep - 1], new_ids[-1])
        if not item.bad_rows.isdisjoint(rows):
            raise NonFiniteError(self._verifying.non_finite_message)
        cache.commit([*range(item.num_scheduled_tokens - 1), *(item.num_scheduled_tokens - 1 + row for row in rows)])
        self._memory.mark(state)
        list.extend(sequence.token_ids, new_ids)  # `TokenIds` allows nothing else
        sequence.finish_reason = reason
        chunk = StreamChunk("", new_ids, num_accepted, index=sequence.choice)
        if item.draft is not None and item.draft.sources:
            chunk.sources = tuple([item.draft.sources[node] for node in nodes[:num_accepted]])
        if state.logprobs is not None:
            chunk.logprobs = item.logprobs([item.num_extra + row for row in rows], new_ids, params.logprobs)
            state.logprobs += chunk.logprobs
        item.count(chunk, nodes[:num_accepted], stats)
        return chunk

    # Learn: the drafter from the committed tokens, the policy from costs and outcomes

    def _tell_drafter(self, work: Seq[SequenceStep], stats: StepStats) -> dict[SequenceState, Exception]:
        """Report the committed tokens to the drafter.

        Returns:
            The sequences for which the drafter failed, with its errors.
        """
        if self._drafter is None or not work or self._is_asleep:
            return {}
        started = perf_counter()
        failed: dict[SequenceState, Exception] = {}
        states = [item.state for item in work]
        steps = [item.report(self._needs) for item in work]
        try:
            self._drafter.commit(steps[:])
            self._check_untouched(states)
        except Exception:
            for state, step in zip(states, steps, strict=True):
                try:
                    self._drafter.commit([step])
                    self._check_untouched([state])
                except Exception as error:
                    failed[state] = error
        stats.time_draft += perf_counter() - started
        return failed

    def observe(self, work: Seq[SequenceStep], stats: StepStats, time_rest: float) -> None:
        """Report costs and outcomes of the step to the policy. time_rest: seconds of the engine's other work."""
        policy = self.policy
        if policy is None:
            return
        times = stats.time_draft, stats.time_target, stats.time_verify, time_rest
        if self._rests:
            policy.rest(sum(times))
            return
        num_prompt_rows, context, outcomes = 0, 0, []
        for item in work:
            context += item.context
            if item.outcome is not None:
                outcomes.append(item.outcome)
            elif item.num_draft_tokens is None:
                num_prompt_rows += item.num_scheduled_tokens
        given = self._target.experts_given if stats.num_experts else None
        after_prompt = self.last_step.num_prompt_rows > 0  # of the step before, until this one ends
        cost = StepCost(stats.num_rows, num_prompt_rows, context, *times, stats.num_experts, given, after_prompt)
        policy.observe(cost, outcomes)

    # Deliver: outputs, and the end of sequences. These methods may be interrupted and called again.

    def deliver(self, state: SequenceState) -> None:
        """Add what the step has committed to the outputs; end a sequence that is finished."""
        chunk = state.pending
        if chunk is None:
            return
        state.changing = True
        if state.sequence.finish_reason is not None:
            self.end(state)
            return
        if state.request.stream:
            if state.text is not None:
                chunk.text = state.text.take()
            self.outputs.append(StepOutput(state.request.id, chunk))
        state.pending, state.changing = None, False

    def fail(self, state: SequenceState, error: Exception) -> None:
        """End the sequence with this error, or with the device's error behind it."""
        state.error, state.sequence.finish_reason = self.faults.own(error), "abort"
        self.end(state)

    def end(self, state: SequenceState) -> None:
        """Free all that the sequence holds, and then add its result or error to the outputs, once."""
        self.release(state)
        self.scheduler.remove(state)
        if state.has_left:
            return
        try:
            output = state.result(self._texts) if state.error is None else state.failure(state.error)
        except Exception as error:  # of a tokenizer that cannot decode it
            output = state.failure(error)
        # in one line, between whose parts no interrupt can come
        state.has_left = self.outputs.append(output) is None  # type: ignore[func-returns-value]
        if self._remembered is not None and state.error is None:  # last, so that it is written once at most
            self._remembered.write(state.sequence.token_ids, state.sequence.num_prompt, state.sequence.params.tenant)

    def release(self, state: SequenceState) -> None:
        """Free all that the sequence holds; its published pages stay adoptable."""
        self._memory.publish(state)
        self.stop(state)
        if state.cache is not None:
            state.cache.free()
            state.cache = state.sequence.cache = None

    def stop(self, state: SequenceState) -> None:
        """Forget a sequence that leaves, however far it came. What the drafter raises is logged, not raised."""
        self._constrained.discard(state)
        self._verifying.pipeline.stop(state.sequence)
        try:
            if self._policy is not None:
                self._policy.stop(state.sequence)
            if self._drafter is not None and state.entered:
                self._drafter.stop(state.sequence)
        except Exception:
            _log.exception("the drafter failed to stop sequence %d", state.sequence.id)
        state.entered = False  # after an interrupt this is called again

    def reset(self) -> None:
        """Let the drafter drop the state that sequences share, after an interrupted step. No sequence is started."""
        if self._drafter is None:
            return
        try:
            self._drafter.reset()
        except Exception:
            _log.exception("%s failed to drop what sequences share", name_of(self._drafter))


def with_probes(k: int, traits: Traits) -> int:
    """Return the nodes of a draft of at most so many tokens."""
    return min(k + traits.num_probes, MAX_NUM_DRAFT_TOKENS) if k else 0


def _new_policy(config: EngineConfig, target: LanguageModel, drafter: Drafter | None) -> SpeculationPolicy | None:
    if drafter is None:
        return None
    offers = drafter.offers
    if not offers:
        return _policy_of(Offer(drafter.traits), config, target)
    policies = {name: _policy_of(offer, config, target) for name, offer in offers.items()}
    return PolicyByRequest(policies, lambda sequence: drafter.chosen(sequence.params))


def _policy_of(offer: Offer, config: EngineConfig, target: LanguageModel) -> SpeculationPolicy:
    k, traits = config.num_draft_tokens, offer.traits
    if k == AUTO and offer.num_draft_tokens is not None:
        k = offer.num_draft_tokens
    if isinstance(k, int):
        return FixedPolicy(with_probes(k, traits))
    return traits.automatic_policy(drafter_costs((identity(target), *traits.cost_key)).costs)
