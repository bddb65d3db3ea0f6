"""The parts of one engine step: draft, run the target's forward, verify, commit, and update drafter and policy."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence as Seq
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor

from forerun.config import AUTO, EngineConfig
from forerun.drafters import Drafter
from forerun.drafters.base import Offer, Traits
from forerun.drafters.validation import check_tokens, checked_drafts, name_of
from forerun.engine.results import StreamChunk
from forerun.engine.scheduler import Schedule
from forerun.engine.sequence import SequenceState, SequenceStep
from forerun.engine.stats import StepStats
from forerun.errors import DrafterError, NonFiniteError
from forerun.models import Forward, LanguageModel, Rows, identity
from forerun.models.non_finite import first_non_finite_tensor
from forerun.sampling import (
    DeadRows,
    LogitsPipeline,
    LogitsRow,
    StepNoise,
    TokenLogprob,
    non_finite_rows,
    row_argmax,
    row_top,
    token_logprobs,
)
from forerun.sampling.grammar.drafts import SOURCE, forced_tokens, with_grammar
from forerun.speculation import (
    AutomaticPolicy,
    CostModel,
    DraftOutcome,
    DraftPlan,
    FixedPolicy,
    PolicyByRequest,
    SpeculationPolicy,
    StepCost,
    StoredCosts,
    TrimmingPolicy,
    drafter_costs,
)
from forerun.types import Draft, Needs, PackedDrafts, Sequence, Step, Verdict
from forerun.utils.tree import ROOT
from forerun.verification import UnsoundProbsError, match_sampled_tokens, rule_for, verify_step

# The verification of one step: from the target's logits to verdicts, or to errors where no token can be chosen.


class Verifying:
    """Verifies drafts with the sampling pipeline, the noise and the acceptance rules of one engine.

    Distributions are computed only where more than the argmax decides.
    """

    def __init__(self, target: LanguageModel, config: EngineConfig) -> None:
        self._target = target
        self._acceptance = config.acceptance
        self.pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
        self._generator = torch.Generator()
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)

    def verify(self, work: Seq[SequenceStep], logits: Tensor) -> None:
        """Set the verdict of every sequence; keep the logits that log-probabilities are taken from.

        logits: [rows, V] of the step, in the order of `work`.
        """
        greedy: list[SequenceStep] = []
        drawn: list[SequenceStep] = []
        greedy_rows: list[int] = []
        drawn_rows: list[int] = []
        at = 0
        for item in work:
            state, end = item.state, at + item.num_logits
            if state.logprobs is not None or state.prompt_logprobs is not None:
                item.logits = logits[at:end]
            if item.draft is not None:
                items, rows = (greedy, greedy_rows) if state.argmax_suffices else (drawn, drawn_rows)
                items.append(item)
                rows.extend(range(at + item.num_extra, end))
            at = end
        if greedy:
            self._verify_greedy(greedy, logits if len(greedy_rows) == at else logits[greedy_rows])
        if drawn:
            self._verify_drawn(drawn, logits if len(drawn_rows) == at else logits[drawn_rows])

    @cached_property
    def non_finite_message(self) -> str:
        """Explain why logits are NaN or infinite. The weights are searched once, after the first such row."""
        tensor = first_non_finite_tensor(self._target)
        cause = "No such number was found in its weights. "
        is_narrow = self._target.dtype.itemsize < 4
        cause += "A wider number format may help: dtype='float32'." if is_narrow else "Its files may be damaged."
        if tensor is not None:
            cause = f"Its weights hold such numbers, first in {tensor}. Get them anew, or another model."
        return (
            f"{self._target.name} computed logits that are NaN or infinite, from which no token can be chosen. {cause}"
        )

    def _verify_greedy(self, work: Seq[SequenceStep], logits: Tensor) -> None:
        packed = PackedDrafts.of([item.draft for item in work if item.draft is not None])
        tokens: list[int] = row_argmax(logits).tolist()
        for row in non_finite_rows(logits, tokens):
            _mark(work, packed, row)
        if any(item.state.sequence.constraint is not None for item in work):
            tokens = row_argmax(self._adjusted(work, packed, logits, self.pipeline.adjust)).tolist()
        for item, verdict in zip(work, match_sampled_tokens(packed, tokens), strict=True):
            item.verdict = verdict

    def _verify_drawn(self, work: Seq[SequenceStep], logits: Tensor) -> None:
        drafts = [item.draft for item in work if item.draft is not None]
        packed = PackedDrafts.of(drafts)
        bad = non_finite_rows(logits)
        if bad:  # replaced by any distribution: a request whose verdict depends on one of them ends
            for row in bad:
                _mark(work, packed, row)
            logits = logits.index_fill(0, torch.tensor(bad, device=logits.device), 0.0)
        logprobs = self._adjusted(work, packed, logits, self.pipeline.process)
        rules = [
            rule_for(item.state.sequence.params, draft, self._acceptance)
            for item, draft in zip(work, drafts, strict=True)
        ]
        noise = StepNoise(self._generator, [item.state.sequence for item in work], packed, logits.device)
        for item, verdict in zip(work, verify_step(packed, logprobs, rules, noise), strict=True):
            item.verdict = verdict

    def _adjusted(
        self,
        work: Seq[SequenceStep],
        packed: PackedDrafts,
        logits: Tensor,
        adjust: Callable[[Tensor, Seq[LogitsRow], DeadRows], Tensor],
    ) -> Tensor:
        """Return the logits as `adjust` changes them, and mark rows whose grammar leaves no token."""
        dead: DeadRows = {}
        logits = adjust(logits, [row for item in work for row in item.logits_rows()], dead)
        for row, error in dead.items():
            _mark(work, packed, row, error)
        return logits


def _mark(work: Seq[SequenceStep], packed: PackedDrafts, row: int, error: Exception | None = None) -> None:
    """Note for its sequence that a row is bad, or that its grammar leaves no token. row: of the packed drafts."""
    index = bisect_right(packed.offsets, row) - 1
    item, own = work[index], row - packed.offsets[index]
    if error is None:
        item.bad_rows |= {own}
    else:
        item.dead_rows = {**item.dead_rows, own: error}


_log = logging.getLogger(__name__)


class StepLoop:
    """Runs the parts of a step, in the order in which the engine calls them: compute, apply, update_drafter, observe.

    `compute` changes nothing that a second try would notice; `apply` commits one sequence.

    Args:
        policy: decides how much is drafted; None: the policy that `config` and the drafter choose.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        config: EngineConfig,
        policy: SpeculationPolicy | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._needs = Needs() if drafter is None else drafter.needs
        self._needs_rows = self._needs.rows
        self._config = config
        self._policy = policy or _new_policy(config, target, drafter)  # None: no drafter, and no grammar so far
        self._verifying = Verifying(target, config)
        self._constrained: set[SequenceState] = set()  # sequences under a grammar

    def start(self, state: SequenceState) -> None:
        """Prepare for the steps of a sequence that enters."""
        if state.sequence.constraint is not None:
            if self._policy is None:
                traits = Traits(cost_key=(SOURCE,))  # of the tokens that grammars force, without a drafter
                self._policy = _policy_of(Offer(traits), self._config, self._target)
            self._constrained.add(state)
        if self._drafter is not None:
            state.entered = True
            self._drafter.start(state.sequence)
            self._check_untouched([state])

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

    @property
    def policy(self) -> SpeculationPolicy | None:
        """Return the policy that decides how much is drafted; None without a drafter and without grammars."""
        return self._policy if self._drafter is not None or self._constrained else None

    def compute(self, schedule: Schedule, stats: StepStats) -> list[SequenceStep]:
        """Draft, run the forward and verify; nothing is committed."""
        work = self._draft(schedule, stats)
        rows = [item.rows(self._needs) for item in work]
        started = perf_counter()
        result = self._target.forward(rows, self._needs.layers)
        computed = perf_counter()
        for item in work:
            if item.draft is not None and len(item.draft) and self._drafter is not None:
                # some lay on a device, and the forward has waited for them
                check_tokens(self._drafter, item.draft, self._target.vocab_size)
        if self._needs_rows:
            self._attach_target_rows(work, rows, result)
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
            if item.num_draft_tokens is not None and item.draft is not None and item.verdict is not None:
                item.outcome = DraftOutcome(item.state.sequence, item.num_draft_tokens, item.draft, item.verdict)
                item.context = row.cache.length
        return work

    def apply(self, item: SequenceStep, stats: StepStats) -> StreamChunk | None:
        """Commit the verified tokens of one sequence, cut where the output ends.

        Returns:
            The committed tokens; None while the prompt is computed.
        """
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
        list.extend(sequence.token_ids, new_ids)  # `TokenIds` allows nothing else
        sequence.finish_reason = reason
        chunk = StreamChunk("", new_ids, num_accepted, index=sequence.choice)
        if item.draft is not None and item.draft.sources:
            chunk.sources = tuple([item.draft.sources[node] for node in nodes[:num_accepted]])
        if state.logprobs is not None:
            chunk.logprobs = _logprobs(
                item, [item.num_extra + row for row in rows], new_ids, state.request.params.logprobs
            )
            state.logprobs += chunk.logprobs
        _count(item, chunk, nodes[:num_accepted], stats)
        return chunk

    def update_drafter(self, work: Seq[SequenceStep], stats: StepStats) -> dict[SequenceState, Exception]:
        """Report the committed tokens to the drafter.

        Returns:
            The sequences for which the drafter failed, with its errors.
        """
        if self._drafter is None or not work:
            return {}
        started = perf_counter()
        failed: dict[SequenceState, Exception] = {}
        states = [item.state for item in work]
        steps = [self._step_of(item) for item in work]
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
        outcomes = [item.outcome for item in work if item.outcome is not None]
        cost = StepCost(
            num_rows=stats.num_rows,
            num_prompt_rows=sum(item.num_scheduled_tokens for item in work if item.num_draft_tokens is None),
            context=sum(item.context for item in work),
            time_draft=stats.time_draft,
            time_target=stats.time_target,
            time_verify=stats.time_verify,
            time_rest=time_rest,
        )
        policy.observe(cost, outcomes)

    def _draft(self, schedule: Schedule, stats: StepStats) -> list[SequenceStep]:
        """Make the sequences' parts of the step, with the drafts of those that may have one."""
        all_rows = self._needs.prompt_rows and self._needs_rows
        work = []
        for state, num_scheduled_tokens in schedule.undrafted:
            last = num_scheduled_tokens == state.num_uncomputed_tokens
            extra = num_scheduled_tokens - last if all_rows or state.wants_prompt_logprobs else 0
            work.append(SequenceStep(state, num_scheduled_tokens, Draft() if last else None, extra))
        ready, plan = schedule.drafting, schedule.plan
        if ready:
            started = perf_counter()
            drafts, plan = self._drafts(ready, plan)
            stats.time_draft = perf_counter() - started
            for state, draft, k in zip(ready, drafts, plan.num_draft_tokens, strict=True):
                reason = "request" if state.most_drafted == 0 else plan.reason
                work.append(SequenceStep(state, 1, draft, num_draft_tokens=k, reason=reason))
            stats.reason = plan.reason
        return work

    def _drafts(self, ready: Seq[SequenceState], plan: DraftPlan) -> tuple[Seq[Draft], DraftPlan]:
        """Return the drafts of these sequences, with the tokens that their grammars force, and the plan as it was kept.

        The drafter is not called for a sequence whose grammar forces as many tokens as it may draft.
        """
        num_draft_tokens = plan.num_draft_tokens
        if not any(num_draft_tokens):
            return [Draft.empty()] * len(ready), plan
        sequences = [state.sequence for state in ready]
        if all(sequence.constraint is None for sequence in sequences):
            drafts = self._call_drafter(ready, sequences, plan, num_draft_tokens)
            assert self._policy is not None
            plan = self._policy.trim(plan, sequences, drafts)
            return [draft.first(k) for draft, k in zip(drafts, plan.num_draft_tokens, strict=True)], plan
        forced = forced_tokens(sequences, num_draft_tokens)
        unforced = [0 if len(tokens) >= k else k for tokens, k in zip(forced, num_draft_tokens, strict=True)]
        drafts = list(self._call_drafter(ready, sequences, plan, unforced))
        for index, sequence in enumerate(sequences):
            if sequence.constraint is not None:
                drafts[index] = with_grammar(sequence, forced[index], drafts[index], num_draft_tokens[index])
        return drafts, plan

    def _call_drafter(
        self, ready: Seq[SequenceState], sequences: Seq[Sequence], plan: DraftPlan, num_draft_tokens: Seq[int]
    ) -> Seq[Draft]:
        if self._drafter is None or not any(num_draft_tokens):
            return [Draft.empty()] * len(ready)
        if plan.prices is not None:
            self._drafter.see_prices(plan.prices)
        try:
            return checked_drafts(
                self._drafter, sequences, num_draft_tokens, plan.min_acceptance_prob, self._target.vocab_size
            )
        finally:
            self._check_untouched(ready)

    def _step_of(self, item: SequenceStep) -> Step:
        """Make the report on one sequence's part of the step for the drafter."""
        state, verdict, hidden_outputs, states = item.state, item.verdict, item.hidden_outputs, None
        assert state.cache is not None
        if verdict is not None:  # a copy: the policy reads it after the drafter
            verdict = Verdict(list(verdict.path), verdict.next_token)
        if self._needs.states and hidden_outputs is not None:
            path, start = [] if verdict is None else verdict.path, item.num_scheduled_tokens
            kept = [*range(start), *(start + node for node in path)]
            states = hidden_outputs[kept] if path else hidden_outputs[:start]
            hidden_outputs = hidden_outputs[len(hidden_outputs) - item.num_logits :] if item.num_logits else None
        return Step(state.sequence, item.draft, verdict, state.cache.length, item.top_tokens, hidden_outputs, states)

    def _check_untouched(self, states: Seq[SequenceState]) -> None:
        """Restore the sequences that the drafter has changed. Raises DrafterError if there are any."""
        touched = [state for state in states if not state.is_untouched()]
        if touched and self._drafter is not None:
            raise DrafterError(
                f"{name_of(self._drafter)} changed a sequence, which is the engine's. Its attributes are for reading; "
                "keep what belongs to the drafter elsewhere."
            )

    def _attach_target_rows(self, work: Seq[SequenceStep], rows: Seq[Rows], result: Forward) -> None:
        """Keep the top tokens and hidden states of the target's rows that the drafter needs."""
        logits, hidden_outputs = result.logits, result.hidden_outputs
        count = min(self._needs.top_tokens, logits.shape[1])
        top: Tensor | None = None
        if count and len(logits):
            top = row_top(logits, count)
        at = hidden_output = 0
        for item, row in zip(work, rows, strict=True):
            end, last = at + item.num_logits, hidden_output + row.num_hidden_rows
            if top is not None and end > at:
                item.top_tokens = top[at:end]
            if hidden_outputs is not None and last > hidden_output:
                item.hidden_outputs = hidden_outputs[hidden_output:last]
            at, hidden_output = end, last

    def _report_prompt(self, item: SequenceStep) -> None:
        state = item.state
        assert state.cache is not None
        assert state.prompt_logprobs is not None
        first = state.cache.length + 1
        ids = state.request.prompt_token_ids[first : first + item.num_extra]
        state.prompt_logprobs += _logprobs(item, list(range(item.num_extra)), ids, state.request.params.prompt_logprobs)


def _logprobs(item: SequenceStep, rows: list[int], token_ids: list[int], num_top: int | None) -> list[TokenLogprob]:
    assert item.logits is not None
    assert num_top is not None
    return token_logprobs(item.logits[rows], token_ids, num_top)


def _count(item: SequenceStep, chunk: StreamChunk, accepted: list[int], stats: StepStats) -> None:
    """Add one sequence's part of a step to its statistics and to the step's. accepted: nodes that were committed."""
    own = item.state.stats
    if own.num_tokens == 0:
        own.time_first_token = perf_counter() - item.state.time_started
    own.num_tokens += len(chunk.token_ids)
    own.num_forwards += 1
    own.num_plain_forwards += not item.num_draft_tokens
    if item.num_draft_tokens is not None:
        own.num_asked_tokens += item.num_draft_tokens
        decision = f"{'on' if item.num_draft_tokens else 'off'}: {item.reason}"
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
        return FixedPolicy(k)
    return automatic_policy(traits, drafter_costs((identity(target), *traits.cost_key)))


def automatic_policy(traits: Traits, costs: StoredCosts | CostModel) -> SpeculationPolicy:
    """Return the policy that chooses K for a drafter, by these costs."""
    if traits.estimates:
        return TrimmingPolicy(costs)
    return AutomaticPolicy(
        costs, fixed_length=traits.fixed_length_draft, acceptance=traits.acceptance, follows=traits.follows
    )
