"""One step: draft, one target forward, verify, commit. There is no prefill or decode phase."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from time import perf_counter

import torch
from torch import Tensor

from forerun.config import AUTO, EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.drafters.base import Offer
from forerun.engine.drafting import Drafting
from forerun.engine.non_finite import Diagnosis
from forerun.engine.results import StreamChunk
from forerun.engine.scheduler import Schedule
from forerun.engine.state import SequenceState
from forerun.engine.stats import StepStats
from forerun.engine.work import Work
from forerun.models import Forward, LanguageModel, Rows, identity
from forerun.policy import Budget, BudgetByRequest, FixedBudget, Outcome, StepCost, automatic_budget
from forerun.sampling import LogitsPipeline, StepNoise, TokenLogprob, non_finite_rows, row_argmax, token_logprobs
from forerun.tree import ROOT
from forerun.types import PackedDrafts, Verdict
from forerun.verify import UnsoundProbsError, greedy_verdicts, rule_for, verify_step


class StepLoop:
    """The parts of a step, in the order in which the engine calls them: compute, apply, tell_drafter, observe.

    `compute` changes nothing that a second try would notice; `apply` commits one sequence.
    """

    def __init__(
        self, target: LanguageModel, drafter: Drafter | None, config: EngineConfig, budget: Budget | None = None
    ) -> None:
        self._target = target
        self._drafting = Drafting(drafter, target.vocab_size)
        self._needs = self._drafting.needs
        self._config = config
        self._budget = budget or _new_budget(config, target, drafter)
        self._diagnosis = Diagnosis(target)
        self._pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
        self._generator = torch.Generator()
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)

    def argmax_suffices(self, params: SamplingParams) -> bool:
        """Whether the argmax of the raw logits decides, so that no distribution need be computed."""
        return self._pipeline.is_identity(params)

    def start(self, state: SequenceState) -> None:
        """A sequence enters."""
        self._pipeline.start(state.sequence)
        self._drafting.start(state)

    def stop(self, state: SequenceState) -> None:
        """A sequence leaves, however far it came."""
        self._pipeline.stop(state.sequence)
        self._budget.stop(state.sequence)
        self._drafting.stop(state)

    def reset(self) -> None:
        """A step was interrupted; no sequence is in at this moment."""
        self._drafting.reset()

    @property
    def budget(self) -> Budget | None:
        """How much may be drafted; None without a drafter."""
        return None if self._drafting.drafter is None else self._budget

    def compute(self, schedule: Schedule, stats: StepStats) -> list[Work]:
        """Draft, forward and verify; nothing is committed."""
        work = self._draft(schedule, stats)
        rows = [item.rows(self._needs) for item in work]
        started = perf_counter()
        result = self._target.forward(rows, self._needs.layers)
        computed = perf_counter()
        self._hand_out(work, rows, result)
        self._verify(work, result.logits)
        stats.time_target, stats.time_verify = computed - started, perf_counter() - computed
        stats.num_sequences = len(work)
        for row, item in zip(rows, work, strict=True):
            stats.num_rows += len(row.token_ids)
            stats.num_prompt_rows += item.num_owed if item.num_owed > 1 else 0
            stats.num_draft_tokens += 0 if item.draft is None else len(item.draft)
            if item.budget is not None and item.draft is not None and item.verdict is not None:
                item.outcome = Outcome(item.state.sequence, item.budget, item.draft, item.verdict)
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
            cache.commit(range(item.num_owed))
            return None
        nodes = verdict.path
        rows = [0, *(node + 1 for node in nodes)]
        ids = item.draft.ids if item.draft is not None else []
        new_ids = [ids[node] for node in verdict.path]
        num_accepted = len(new_ids)
        new_ids.append(verdict.next_token)
        keep, reason = state.cut(new_ids)
        if keep < len(new_ids):
            # the last token kept is a draft token, and takes the place of the verdict's own
            num_accepted, new_ids, rows = keep, new_ids[:keep], rows[:keep]
            verdict = item.verdict = Verdict(verdict.path[: keep - 1], new_ids[-1])
        if not item.bad_rows.isdisjoint(rows):
            raise self._diagnosis.error()
        cache.commit([*range(item.num_owed - 1), *(item.num_owed - 1 + row for row in rows)])
        state.token_ids.grow(new_ids)
        sequence.finish_reason = reason
        chunk = StreamChunk("", new_ids, num_accepted, index=sequence.choice)
        if item.draft is not None and item.draft.sources:
            chunk.sources = tuple([item.draft.sources[node] for node in nodes[:num_accepted]])
        if state.logprobs is not None:
            chunk.logprobs = self._report(item, [item.num_extra + row for row in rows], new_ids)
            state.logprobs += chunk.logprobs
        self._count(item, chunk, nodes[:num_accepted], stats)
        return chunk

    def tell_drafter(self, work: Seq[Work], stats: StepStats) -> dict[SequenceState, Exception]:
        """Report what was committed; the sequences for which the drafter failed."""
        if self._drafting.drafter is None:
            return {}
        started = perf_counter()
        failed = self._drafting.tell(work)
        stats.time_draft += perf_counter() - started
        return failed

    def observe(self, work: Seq[Work], stats: StepStats, time_rest: float) -> None:
        """Tell the budget what the step cost and gave. time_rest: what the engine took besides, in seconds."""
        outcomes = [item.outcome for item in work if item.outcome is not None]
        cost = StepCost(
            num_rows=stats.num_rows,
            num_prompt_rows=sum(item.num_owed for item in work if item.budget is None),
            context=sum(item.context for item in work),
            time_draft=stats.time_draft,
            time_target=stats.time_target,
            time_verify=stats.time_verify,
            time_rest=time_rest,
        )
        self._budget.observe(cost, outcomes)

    def _draft(self, schedule: Schedule, stats: StepStats) -> list[Work]:
        """What each turn computes, with the drafts of those that may have one."""
        all_rows = self._needs.prompt_rows and self._needs.rows
        work = [Work.undrafted(turn.state, turn.num_owed, all_rows) for turn in schedule.undrafted]
        ready, plan = [turn.state for turn in schedule.drafting], schedule.plan
        if ready:
            started = perf_counter()
            drafts = self._drafting.ask(ready, plan)
            stats.time_draft = perf_counter() - started
            for state, draft, budget in zip(ready, drafts, plan.budgets, strict=True):
                reason = "request" if state.most_drafted == 0 else plan.reason
                work.append(Work(state, 1, draft, budget=budget, reason=reason))
            stats.reason = plan.reason
        return work

    def _verify(self, work: Seq[Work], logits: Tensor) -> None:
        """Set every verdict; keep the logits that log-probabilities will be taken from."""
        greedy: list[Work] = []
        drawn: list[Work] = []
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
            wanted = logits if len(greedy_rows) == at else logits[greedy_rows]
            packed = PackedDrafts.of([item.draft for item in greedy if item.draft is not None])
            tokens: list[int] = row_argmax(wanted).tolist()
            _settle(greedy, greedy_verdicts(packed, tokens))
            _mark(greedy, packed, non_finite_rows(wanted, tokens))
        if drawn:
            self._verify_drawn(drawn, logits if len(drawn_rows) == at else logits[drawn_rows])

    def _verify_drawn(self, work: Seq[Work], logits: Tensor) -> None:
        drafts = [item.draft for item in work if item.draft is not None]
        packed = PackedDrafts.of(drafts)
        bad = non_finite_rows(logits)
        if bad:  # any distribution will do in their place: a request whose verdict comes by one of them ends
            _mark(work, packed, bad)
            logits = logits.index_fill(0, torch.tensor(bad, device=logits.device), 0.0)
        logprobs = self._pipeline.process(logits, [row for item in work for row in item.logits_rows()])
        rules = [
            rule_for(item.state.sequence.params, draft, self._config.acceptance)
            for item, draft in zip(work, drafts, strict=True)
        ]
        noise = StepNoise(self._generator, [item.state.sequence for item in work], packed, logits.device)
        try:
            _settle(work, verify_step(packed, logprobs, rules, noise))
        except UnsoundProbsError as error:
            raise self._drafting.error(error) from None

    def _hand_out(self, work: Seq[Work], rows: Seq[Rows], result: Forward) -> None:
        """Check drafts that could not be read before, and keep what the drafter wants to know of every row."""
        logits, taps = result.logits, result.taps
        count = min(self._needs.top_tokens, logits.shape[1])
        top: Tensor | None = None
        if count and len(logits):
            top = row_argmax(logits)[:, None] if count == 1 else logits.topk(count).indices
        at = tap = 0
        for item, row in zip(work, rows, strict=True):
            if item.draft is not None:
                self._drafting.check_tokens(item.draft)
            end, last = at + item.num_logits, tap + row.num_tapped
            if top is not None and end > at:
                item.top_tokens = top[at:end]
            if taps is not None and last > tap:
                item.taps = taps[tap:last]
            at, tap = end, last

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
        own.count_budget(item.budget, item.reason)
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


def _new_budget(config: EngineConfig, target: LanguageModel, drafter: Drafter | None) -> Budget:
    if drafter is None:
        return FixedBudget(0)
    offers = drafter.offers
    if not offers:
        return _budget_of(Offer(drafter.traits), config, target)
    budgets = {name: _budget_of(offer, config, target) for name, offer in offers.items()}
    return BudgetByRequest(budgets, lambda sequence: drafter.chosen(sequence.params))


def _budget_of(offer: Offer, config: EngineConfig, target: LanguageModel) -> Budget:
    k, traits = config.num_draft_tokens, offer.traits
    if k == AUTO and offer.num_draft_tokens is not None:
        k = offer.num_draft_tokens
    if isinstance(k, int):
        return FixedBudget(k)
    return automatic_budget(whole_draft=traits.whole_draft, cost_key=(identity(target), *traits.cost_key))


def _mark(work: Seq[Work], packed: PackedDrafts, bad_rows: Seq[int]) -> None:
    """Note for each sequence which of its rows are bad. bad_rows: among all rows of the packed drafts."""
    for row in bad_rows:
        index = bisect_right(packed.offsets, row) - 1
        work[index].bad_rows |= {row - packed.offsets[index]}


def _settle(work: Seq[Work], verdicts: Seq[Verdict]) -> None:
    for item, verdict in zip(work, verdicts, strict=True):
        item.verdict = verdict
