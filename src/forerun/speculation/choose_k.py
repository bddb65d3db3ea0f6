"""The choice of K: which candidate tokens of a step's sequences are verified, and whether a drafter runs for them.

Every candidate has a probability to survive verification. Sorted by it, the candidates are cut where expected tokens
per second, by what rows and drafting cost, are the highest ("goodput": SmartSpec, 2406.14066). That may be none, and
then no drafter runs. Costs are calibrated before the first request (`engine/step_times.py`), and followed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.speculation.acceptance import AcceptanceStats
from forerun.speculation.cost_model import KINDS, CostModel, StoredCosts, costs_setting, forward_costs, request_kind
from forerun.speculation.policy import DraftOutcome, DraftPlan, Reason, SpeculationPolicy, StepCost, own_reasons
from forerun.types import Sequence

Prices = Seq[float]
"""Seconds of a step by the rows that candidates add to it, drafting apart; the first without any."""
LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_NUM_DRAFT_TOKENS)
"""Largest K of one draft that are compared for several sequences."""
FIRST_PLACES = 16
"""Largest K while none has been tried; then twice the largest that has."""
PLAN_STEPS, LEARN_STEPS = 4, 16
"""Steps for which a plan and prices stand while the batch is the same, and of which one is learned from once its kind
is known: both take time."""
BEGINS, GOES_ON = 1.03, 1.01
"""Rate over plain decoding that drafting must promise to begin, and to go on."""
HORIZON = 64
"""Tokens that are at least to come when drafting begins, as far as is assumed; else as many as came so far."""
SHARE_PRIOR = 0.25
"""Share of a sequence's tokens that copies leave to the drafter, as is assumed first."""
SHARE_WEIGHT = 16.0
"""Pseudo-tokens of that prior."""
SHARE_MEMORY = 128
"""Tokens over which the share is averaged."""
FOLLOW_MARGIN = 1.5
"""Factor on the time in which a drafter follows a sequence that drafts must save, as the best of many is overrated."""
FIRST_WAIT, LAST_WAIT = 8, 512
"""Steps until a sequence that does not draft tries one token; doubled while trials are in vain."""
TRIAL_SHARE = 0.005
"""Share of the time that trials may cost."""
SLEEPS, WAKES = 8, 2
"""Steps without a draft after which the drafter sleeps, and steps before the next trial at which it wakes."""
HOPED = 0.9
"""Acceptance of every token with which drafts for several sequences must pay, so that it is weighed which: their real
acceptance is lower almost always, and is forgotten where nothing is drafted."""
WHOLE_STEPS = 12
"""Steps of a trial of a drafter whose drafts have a fixed length: one step's window makes the drafts of later ones."""


def expected(
    gains: Seq[float], there: Seq[float], prices: Prices, draft: Seq[float], given: Seq[float] = ()
) -> tuple[list[float], list[float]]:
    """Return expected tokens and seconds of a step of one sequence, by K from 0 on.

    Args:
        gains: [L] chance that each token is there and accepted. there: [L] chance that it is there.
        prices: [len(given) + L + 1 at least]. draft: [L + 1] seconds of drafting as many tokens.
        given: probabilities of the tokens that the draft begins with, which exist already.
    """
    above = given[-1] if given else 1.0
    first = len(given)
    tokens = [1.0 + sum(given)]
    seconds = [prices[first] + draft[0]]
    reached = 1.0  # the chance that a token is drafted: where the one before it is there
    for place, (gain, chance) in enumerate(zip(gains, there, strict=True)):
        tokens.append(tokens[-1] + above * gain)
        row = prices[first + place + 1] - prices[first + place]
        seconds.append(seconds[-1] + chance * row + reached * (draft[place + 1] - draft[place]))
        reached = chance
    return tokens, seconds


def best_cut(candidates: Seq[Seq[float]], prices: Prices, others: float = 0.0) -> tuple[list[int], float, float]:
    """Cut candidates that exist, so that the step gives the most tokens per second.

    Args:
        candidates: for each sequence the probabilities of its nodes, falling.
        others: tokens expected of rows that are in the prices already.

    Returns:
        The kept nodes of each sequence, expected tokens and seconds.
    """
    tokens = len(candidates) + others
    best = tokens / prices[0], 0, tokens, prices[0]
    nodes = sorted(((prob, i) for i, probs in enumerate(candidates) for prob in probs), key=lambda node: -node[0])
    for count, (prob, _) in enumerate(nodes, 1):
        tokens += prob
        seconds = prices[min(count, len(prices) - 1)]
        if tokens / seconds > best[0]:
            best = tokens / seconds, count, tokens, seconds
    counts = [0] * len(candidates)
    for _, i in nodes[: best[1]]:
        counts[i] += 1
    return counts, best[2], best[3]


@dataclass(slots=True)
class _Use:
    """What a sequence makes of a drafter beside copies.

    Attributes:
        followed: its tokens when it drafted last.
        seen: its tokens when it was considered last.
        pays: whether a draft then promised more than copies.
        tokens, paying: those since it was considered first, and of these the ones after which a draft promised more;
            both fade.
    """

    followed: int = 0
    seen: int = 0
    pays: bool = False
    tokens: float = 0.0
    paying: float = 0.0

    def consider(self, length: int, *, pays: bool) -> None:
        """Count the tokens up to `length`, and whether a draft pays for the next ones."""
        new = length - self.seen if self.seen else 0
        kept = (1 - 1 / SHARE_MEMORY) ** new
        self.tokens = self.tokens * kept + new
        self.paying = self.paying * kept + new * self.pays
        self.seen = length
        self.pays = pays

    @property
    def share(self) -> float:
        """Return the share of its tokens that copies leave to the drafter."""
        return (self.paying + SHARE_PRIOR * SHARE_WEIGHT) / (self.tokens + SHARE_WEIGHT)


class DraftChooser:
    """Chooses for how many tokens one drafter is asked, 0 included, where its drafts cost time.

    Args:
        costs: what its drafts cost; None begins with none.
        fixed_length: nodes of its drafts, where fewer would do it harm; None: any number.
        acceptance: priors by position, of greedy and of drawn requests.
        max_tokens: K is never larger.
        follows: tokens that the drafter computes with, at most, before it first drafts for a sequence; None: all.
        can_sleep: it need not be told of steps while it does not draft.
        continues: its drafts may begin with tokens that it is given.

    Attributes:
        rate, plain: tokens per second of the last choice, and of the step without this drafter.
        num_given: tokens of the copy with which the draft of the only sequence is to begin.
        min_acceptance_prob: probability of acceptance below which a further token lowers that rate.
    """

    def __init__(
        self,
        costs: CostModel | None = None,
        fixed_length: int | None = None,
        acceptance: Seq[Seq[float]] = ((), ()),
        max_tokens: int = MAX_NUM_DRAFT_TOKENS,
        follows: int | None = None,
        can_sleep: bool = False,
        continues: bool = False,
    ) -> None:
        self.costs = costs or CostModel()
        self.fixed_length = fixed_length
        self._max = max_tokens
        self._follows = follows
        self._least = fixed_length or 1  # nodes of a draft
        self._can_sleep = can_sleep
        self._continues = continues
        self.num_given = 0
        self.acceptance = {
            kind: AcceptanceStats(max_tokens, prior) for kind, prior in zip(KINDS, acceptance, strict=True)
        }
        self._uses: dict[Sequence, _Use] = {}
        self._wait = self._due = FIRST_WAIT  # steps between trials, and after which the next is considered
        self._since = 0  # steps since the last draft
        self._vain = 0  # the same, but for steps in which only copies promised more, and since there was no sequence
        self._credit = 0.0  # seconds that trials may cost now
        self._trial: list[Sequence] = []
        self._left = 0  # steps of the present trial that are still to come
        self.rate = self.plain = self.min_acceptance_prob = 0.0

    @property
    def is_trying(self) -> bool:
        """Return whether the last choice was a trial."""
        return bool(self._trial)

    @property
    def is_asleep(self) -> bool:
        """Return whether the drafter has not paid for so long that it need not even be told of steps."""
        return self._can_sleep and self._vain >= SLEEPS and self._since < self._due - WAKES

    def choose(
        self, sequences: Seq[Sequence], prices: Prices, found: Seq[Seq[float]] = (), num_chained: int = 0
    ) -> list[int]:
        """Return [B] the tokens that the drafter is to draft, which raise tokens per second, or which are a trial.

        Args:
            found: [B] the probabilities of candidates that exist already, falling: none is drafted where they are worth
                more.
            num_chained: of the only sequence's candidates, the first ones that are a chain. The draft may begin with
                `num_given` of them, which count as drafted.
        """
        self.num_given = 0
        if self._left and all(sequence in sequences for sequence in self._trial):
            self._left -= 1
            return [min(self._least, self.room(each)) if each in self._trial else 0 for each in sequences]
        self._trial = []
        self._left = 0
        batch = len(sequences)
        if self.is_asleep:
            self.rate = self.min_acceptance_prob = 0.0
            return [0] * batch
        places = self.places
        draft = self.costs.draft(batch, places).tolist()
        kept, tokens, seconds = best_cut(found or [()] * batch, prices)
        self.plain = tokens / (seconds + draft[0])
        if batch > 1 and self._most_of_many(sequences, tokens, prices[sum(kept) :], draft) <= BEGINS * self.plain:
            self._refuse()
            self._due = max(self._due, self._since + FIRST_WAIT)
            return [0] * batch
        gains, there = zip(*(self._expect(sequence, places) for sequence in sequences), strict=True)
        if batch == 1:
            copy = found[0][:num_chained] if found and self._continues else ()
            k, rate = self._best_of_one(sequences[0], gains[0], there[0], prices, draft, copy)
            counts = [k]
        else:
            worth = [sum(each) for each in found or [()] * batch]
            free = [bool(found) and value >= sum(each) for value, each in zip(worth, gains, strict=True)]
            shown = [list(found[i]) if free[i] else each for i, each in enumerate(gains)]
            counts, rate = self._best_of_many(sequences, shown, there, free, prices, draft)
        goes_on = batch == 1 and self.lag(sequences[0]) == 0
        if rate <= self.plain * (GOES_ON if goes_on else BEGINS):
            counts = [0] * batch
        self.rate = rate
        counts = [
            k if self._earns(each, pays=k > 0, beside_copies=bool(found)) else 0
            for k, each in zip(counts, sequences, strict=True)
        ]
        if any(counts):
            self.min_acceptance_prob = self._price_of_a_token(counts, prices, draft)
        else:
            self._refuse()
            counts = self._try_one(sequences, gains, prices, draft)
        return counts

    def _refuse(self) -> None:
        """Draft nothing for its gain."""
        self.rate = self.plain
        self.min_acceptance_prob = 0.0
        self.num_given = 0

    def observe(self, outcomes: Seq[DraftOutcome], seconds: float, whole: float | None) -> None:
        """Learn from a step.

        Args:
            outcomes: of the sequences; those that were not asked have num_draft_tokens 0.
            seconds: of the whole step.
            whole: seconds in the drafter; None where they are not known.
        """
        asked = [outcome for outcome in outcomes if outcome.num_draft_tokens]
        lag = 0
        for outcome in outcomes:
            sequence = outcome.sequence
            path = outcome.verdict.path
            stats = self.acceptance[request_kind([sequence])]
            if outcome.num_draft_tokens:
                stats.observe(sequence, outcome.num_draft_tokens, outcome.draft.num_candidates, path)
                lag += max(self.lag(sequence) - len(path) - 1, 0)  # of before this step
                self.follow(sequence)
                if sequence in self._trial and path:
                    self._wait = self._due = FIRST_WAIT // 2
            elif asked:  # it was left out by its own fault, which fades
                stats.fade(sequence)
        self.rest(seconds)
        if asked:
            self._vain = 0
            if not self._trial:
                self._since = 0
        if whole is None:
            return
        if not asked:
            if self._since % PLAN_STEPS == 0:
                self.costs.add_idle(whole)
            return
        longest = max(max(len(outcome.draft), 1) for outcome in asked)  # chains may end early
        self.learn_cost(len(asked), longest, lag, whole)

    def learn_cost(self, batch: int, longest: int, lag: int, seconds: float) -> None:
        """Learn what drafts of `batch` sequences cost, the longest of them of so many tokens, of which `lag` committed
        ones were computed before."""
        if lag:
            self.costs.add_first_draft(batch, longest, lag, seconds)
        else:
            self.costs.add_draft(batch, longest, seconds)

    def rest(self, seconds: float) -> None:
        """Let a step without drafts pass, which earns what trials may cost."""
        self._credit += TRIAL_SHARE * seconds
        self._since += 1
        self._vain += 1

    def follow(self, sequence: Sequence) -> None:
        """Record that the drafter has computed with all tokens of a sequence."""
        self._uses.setdefault(sequence, _Use()).followed = len(sequence.token_ids)

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence that leaves."""
        self._uses.pop(sequence, None)
        if not self._uses:  # the next sequence is considered anew
            self._vain = 0
        for stats in self.acceptance.values():
            stats.stop(sequence)
        if sequence in self._trial:
            self._trial = []
            self._left = 0

    @property
    def places(self) -> int:
        """Return the largest K that is considered."""
        if self.fixed_length is not None:
            return self.fixed_length
        return min(self._max, max(FIRST_PLACES, 2 * self.costs.largest_draft))

    def gains(self, sequence: Sequence, count: int) -> list[float]:
        """Return the probabilities that the first nodes of its next draft are accepted."""
        return self._expect(sequence, count)[0]

    def lag(self, sequence: Sequence) -> int:
        """Return the tokens that the drafter must follow before it drafts: those since it drafted last."""
        use = self._uses.get(sequence)
        lag = len(sequence.token_ids) - (0 if use is None else use.followed)
        return lag if self._follows is None else min(lag, self._follows)

    def room(self, sequence: Sequence) -> int:
        """Return the most tokens that it can be asked for: of drafts of a fixed length all, wherever there is room."""
        return (self.fixed_length or sequence.room) if sequence.room > 0 else 0

    def _expect(self, sequence: Sequence, places: int) -> tuple[list[float], list[float]]:
        gains, there = self.acceptance[request_kind([sequence])].expect(sequence, places)
        # drafts of a fixed length have all their rows, whether or not they are candidates
        return gains, there if self.fixed_length is None else [1.0] * len(there)

    def _earns(self, sequence: Sequence, *, pays: bool, beside_copies: bool) -> bool:
        """Return whether its drafts will save more time than the drafter takes to follow it.

        Args:
            pays: a draft promises more than what it has, which is counted.
            beside_copies: a part of its tokens to come will be copied.
        """
        use = self._uses.setdefault(sequence, _Use())
        use.consider(len(sequence.token_ids), pays=pays)
        if not pays:
            return False
        lost = FOLLOW_MARGIN * self.costs.follow(self.lag(sequence))
        ahead: float = min(max(HORIZON, sequence.num_output), max(sequence.room, 1))
        if beside_copies:
            ahead *= use.share
        return lost <= ahead * (1 / self.plain - 1 / self.rate)

    def _best_of_one(
        self,
        sequence: Sequence,
        gains: list[float],
        there: list[float],
        prices: Prices,
        draft: list[float],
        copy: Seq[float],
    ) -> tuple[int, float]:
        """Return the K of the only sequence that gives the highest rate, and that rate. The draft begins with
        `num_given` tokens of a copy where this raises it: those that are more probable, each after those before it,
        than the first token of a draft.

        copy: the probabilities of its tokens.
        """
        copy = copy[: len(prices) - 1]
        above = [1.0, *copy]
        sure = next((place for place, prob in enumerate(copy) if prob <= above[place] * gains[0]), len(copy))
        best = 0, 0.0
        for first in sorted({0, sure}):
            most = max(min(len(gains), len(prices) - 1 - first, self.room(sequence) - first), 0)
            tokens, seconds = expected(gains[:most], there[:most], prices, draft, copy[:first])
            some = range(most + 1) if self.fixed_length is None else (0, *[most] * (most >= self.fixed_length))
            k = max(some, key=lambda k: tokens[k] / seconds[k])
            rate = tokens[k] / seconds[k]
            if not first and rate > BEGINS / (prices[0] + draft[0]):  # if it does not draft now, the copy is better
                self._vain = 0
            if not first or (k and rate > best[1]):
                self.num_given = first
                best = first + k, rate
        return best

    def _most_of_many(self, sequences: Seq[Sequence], tokens: float, prices: Prices, draft: list[float]) -> float:
        """Return the rate of several sequences if all drafts came true as often as the best, or HOPED.

        Args:
            tokens: expected without them. prices: from there on.
        """
        batch = len(sequences)
        rows = np.arange(1, len(prices))
        prob = max(HOPED, *(self._expect(sequence, 1)[0][0] for sequence in sequences))
        depth = np.minimum((rows - 1) // batch + 1, len(draft) - 1)
        asked = np.minimum(rows, batch)
        cost = draft[0] + (np.array(draft)[depth] - draft[0]) * (asked / batch) ** self.costs.growth
        return float(((tokens + np.cumsum(prob**depth)) / (np.array(prices[1:]) + cost)).max(initial=0.0))

    def _best_of_many(
        self,
        sequences: Seq[Sequence],
        shown: Seq[list[float]],
        there: Seq[list[float]],
        free: list[bool],
        prices: Prices,
        draft: list[float],
    ) -> tuple[list[int], float]:
        """Return the K of several sequences that give the highest rate together, and that rate.

        Args:
            shown: [B] the probabilities of each sequence's candidates.
            free: [B] whether these exist already.
        """
        batch = len(sequences)
        places = len(draft) - 1
        rooms = [len(shown[i]) if free[i] else self.room(sequences[i]) for i in range(batch)]
        nodes = [
            (prob, 1.0 if free[i] else there[i][at], i, 0 if free[i] else at + 1)
            for i in range(batch)
            for at, prob in enumerate(shown[i][: rooms[i]])
        ]
        nodes.sort(key=lambda node: -node[0])
        if not nodes:
            return [0] * batch, 0.0
        probs, sure, owner, depth = (np.array(each) for each in zip(*nodes, strict=True))
        rows_of = np.arange(len(prices))
        best_rate = 0.0
        best = owner[:0]
        for limit in (self.fixed_length,) if self.fixed_length else [k for k in LIMITS if k <= places]:
            part = depth <= limit
            tokens = batch + np.cumsum(probs[part])
            rows = np.cumsum(sure[part])
            asked = np.cumsum(depth[part] == 1)
            cost = draft[0] + (draft[limit] - draft[0]) * (asked / batch) ** self.costs.growth
            rates = tokens / (np.interp(rows, rows_of, prices) + cost)
            if self.fixed_length:
                rates[:-1] = 0.0
            if rates.max() > best_rate:
                best_rate = float(rates.max())
                end = int(rates.argmax()) + 1
                best = owner[part][:end][depth[part][:end] > 0]
        return np.bincount(best, minlength=batch).tolist(), best_rate

    def _price_of_a_token(self, counts: list[int], prices: Prices, draft: list[float]) -> float:
        """Return the acceptance probability above which a further token raises the rate.

        Slopes are taken over a few rows, since kernels pad and costs rise in steps.
        """
        rows = sum(counts)
        longest = max(counts) - self.num_given
        last = len(prices) - 1
        low = min(max(0, rows - 4), last)
        high = min(rows + 4, last)
        row = (prices[high] - prices[low]) / max(high - low, 1)
        first = int(longest > 1)
        node = (draft[longest] - draft[first]) / (longest - first) / len(counts)
        return min(max(self.rate * (row + node), 0.0), 0.9)

    def _try_one(
        self, sequences: Seq[Sequence], gains: Seq[list[float]], prices: Prices, draft: list[float]
    ) -> list[int]:
        """Return what is drafted on trial in this step, if anything is: by the sequence that was followed last."""
        none = [0] * len(sequences)
        if self._since < self._due:
            return none
        index = min(range(len(sequences)), key=lambda i: self.lag(sequences[i]))
        count = min(self._least, self.room(sequences[index]))
        if not 0 < count < min(len(prices), len(draft)):
            return none
        steps = WHOLE_STEPS if self.fixed_length else 1
        batch = len(sequences)
        growth = self.costs.growth
        drafting = (draft[count] - draft[0]) / batch**growth
        lost = prices[count] - prices[0] + drafting
        loss = steps * (lost - sum(gains[index][:count]) / self.plain) + self.costs.follow(self.lag(sequences[index]))
        if loss > self._credit:
            steps = math.ceil((loss - self._credit) / (TRIAL_SHARE * prices[0]))
            self._due = self._since + min(steps, LAST_WAIT)
            return none
        self._credit -= max(loss, 0.0)
        self._since = self._vain = 0
        self._wait = min(2 * self._wait, LAST_WAIT)
        self._due = self._wait
        self._trial = [sequences[index]]
        self._left = steps - 1
        return [count if i == index else 0 for i in range(batch)]


class AutomaticPolicy(SpeculationPolicy):
    """Chooses every sequence's K, 0 included, for a drafter whose drafts cost time.

    Args:
        chooser: weighs the drafter; None: one that knows nothing yet.
    """

    def __init__(self, chooser: DraftChooser | None = None) -> None:
        self.chooser = chooser or DraftChooser()
        self.costs = self.chooser.costs
        self._planned: list[Sequence] = []
        self._plan = DraftPlan([])  # which stands for so many steps
        self._left = 0
        self._off: Reason = "no gain"  # why nothing was drafted last
        self._learned = 0  # steps since costs were learned

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        if self._left > 0 and self._planned == sequences and not self.chooser.is_trying:
            self._left -= 1
            counts = self._plan.num_draft_tokens
            if any(counts):
                counts = [min(k, self.chooser.room(sequence)) for k, sequence in zip(counts, sequences, strict=True)]
                if not any(counts):
                    return DraftPlan(counts, reason="no room")
            own = own_reasons(sequences, counts, self._off)
            return DraftPlan(counts, self._plan.min_acceptance_prob, self._plan.reason, own_reasons=own)
        self._planned = list(sequences)
        self._left = 0
        if self.is_asleep:
            return DraftPlan([0] * len(sequences), reason=self._off)
        prices = prices_of(self.costs, sequences, len(sequences) * self.chooser.places)
        if prices is None:  # what a plain step costs is measured first
            return DraftPlan([0] * len(sequences), reason="measuring")
        if not any(sequence.room > 0 for sequence in sequences):
            return DraftPlan([0] * len(sequences), reason="no room")
        counts = self.chooser.choose(sequences, prices)
        if self.chooser.is_trying:
            return DraftPlan(counts, reason="probe", own_reasons=own_reasons(sequences, counts, self._off))
        self._left = PLAN_STEPS - 1
        self._off = "full batch" if not any(counts) and self._gains_alone(sequences) else "no gain"
        own = own_reasons(sequences, counts, self._off)
        reason = "gain" if any(counts) else self._off
        self._plan = DraftPlan(counts, self.chooser.min_acceptance_prob, reason, own_reasons=own)
        return self._plan

    @property
    def is_asleep(self) -> bool:
        return self.chooser.is_asleep

    rests = is_asleep

    def rest(self, seconds: float) -> None:
        self._learned += 1
        self.chooser.rest(seconds)

    def observe(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:
        if self.rests:
            self.rest(cost.seconds)
            return
        self._learned += 1
        if not outcomes:
            return
        hidden = cost.num_prompt_rows > 0  # prompts in the forward hide what rows and drafts cost
        self.chooser.observe(outcomes, cost.seconds, None if hidden else cost.time_draft)
        if not hidden and learn_rows(self.costs, cost, outcomes, self._learned):
            self._learned = 0

    def stop(self, sequence: Sequence) -> None:
        self.chooser.stop(sequence)
        self._planned = []
        self._left = 0

    def _gains_alone(self, sequences: Seq[Sequence]) -> bool:
        """Return whether drafting would pay for the first of several sequences, if it were alone."""
        if len(sequences) == 1 or self.chooser.fixed_length:
            return False
        prices = prices_of(self.costs, sequences[:1], FIRST_PLACES)
        if prices is None:
            return False
        gains, there = self.chooser.acceptance[request_kind(sequences[:1])].expect(sequences[0], FIRST_PLACES)
        tokens, seconds = expected(gains, there, prices, self.costs.draft(1, FIRST_PLACES).tolist())
        return max(map(float.__truediv__, tokens, seconds)) > BEGINS * tokens[0] / seconds[0]


def prices_of(costs: CostModel, sequences: Seq[Sequence], most: int) -> list[float] | None:
    """Return what up to `most` candidate rows of these sequences' next step cost; None if no step was seen."""
    batch = len(sequences)
    context = sum([len(sequence.token_ids) for sequence in sequences]) - batch
    table = costs.target(request_kind(sequences), batch, context, batch + most + 1)
    if table is None:
        return None
    prices: list[float] = table[min(batch, len(table) - 1) :].tolist()
    return prices + [prices[-1]] * (most + 1 - len(prices))


def learn_rows(costs: CostModel, cost: StepCost, outcomes: Seq[DraftOutcome], since: int) -> bool:
    """Learn what a step without prompts cost apart from drafting, and return whether it was worth the time.

    since: steps since the last from which that was learned.
    """
    kind = request_kind([outcome.sequence for outcome in outcomes])
    batch = len(outcomes)
    if (since < LEARN_STEPS or cost.is_after_prompt) and costs.knows(kind, batch, cost.context, cost.num_rows):
        return False
    seconds = cost.seconds - cost.time_draft
    costs.add_target(kind, batch, cost.context, cost.num_rows, seconds, num_experts=cost.num_experts)
    if cost.experts_given is not None and (given := cost.experts_given()) is not None:
        costs.expect_experts(given)
    return True


def drafter_costs(cost_key: tuple[str, ...]) -> StoredCosts:
    """Return the stored costs of a drafter on a target, which begin with those of the target's forwards.

    cost_key: the target with its number format, then the drafter with its models.
    """
    stored = StoredCosts(costs_setting(cost_key))
    stored.costs.begin_with(forward_costs(cost_key[0]).costs)
    return stored
