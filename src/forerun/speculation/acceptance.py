"""Statistics of how often a draft's nodes are accepted, by their position in it: for all sequences, and for each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Sequence as Seq

from forerun.config import MAX_NUM_DRAFT_TOKENS

ACCEPTANCE_FIRST = 0.6
"""Prior acceptance of a draft's first node, where the drafter's record has none."""
ACCEPTANCE_NEXT = 0.8
"""Prior acceptance of a later node, given that the node before it was accepted."""
ACCEPTANCE_DECAY = 0.85
"""Weight that a sequence's earlier trials keep when it drafts again."""
ACCEPTANCE_FADE = 0.98
"""The same in a step in which it drafts nothing, while others do."""
ACCEPTANCE_SHARED_DECAY = 0.995
"""Weight that all sequences' earlier trials of a place keep when it is tried again."""
ACCEPTANCE_WEIGHT = 4.0
"""Pseudo-trials of a place's prior."""
ACCEPTANCE_RECORD_WEIGHT = 8.0
"""The same where the drafter has a record: one rejected draft must not outweigh it, or the drafter is not tried again
for hundreds of steps."""
ACCEPTANCE_SEQUENCE_WEIGHT = 4.0
"""Pseudo-trials, accepted and rejected, of the prior that a sequence accepts as often as the others."""
ACCEPTANCE_SEQUENCE_TRIALS = 4.0
"""Drafts of one sequence after which a further one teaches those to come half as much: texts differ, and one must not
decide for all."""
ACCEPTANCE_LASTING_DECAY = 0.97
"""What earlier sequences' trials keep at the first draft of a new one: some five long sequences count."""
ACCEPTANCE_MOST = 0.999
"""Largest probability of a step."""
ACCEPTANCE_REFRESH = 16
"""Drafts after which the shared steps are computed again."""
LENGTH_WEIGHT = 2.0
"""Pseudo-trials of the prior that a drafter proposes as many nodes as are requested."""


_EVEN = (1.0, 1.0)


class AcceptanceStats:
    """Estimates the probability that node r of a draft is there and accepted, if at least r + 1 nodes were requested.

    Nodes are ordered by their probability, so the expected acceptance of a draft cut shorter is the sum of its
    first probabilities, chain or tree. A probability is a product of steps, each a beta posterior of the trials where
    the step before came true: r accepted where r - 1 was (for a chain, the acceptance conditional on reaching the
    position), and r drafted where r - 1 was (drafters find nothing, or stop by themselves). Beyond the drafter's record
    the prior of a step is the mean of those before it. All sequences teach these steps together; a sequence differs
    from the others by one factor on the odds of all its steps.

    Args:
        size: places that are told apart.
        prior: acceptance by place, given that of the place before, as the drafter's record has it; later places are
            like the last.
    """

    def __init__(self, size: int = MAX_NUM_DRAFT_TOKENS, prior: Seq[float] = ()) -> None:
        self.size = size
        self._prior = list(prior)
        # tried, accepted, open and drafted by place: of now, and what counts when the next sequence is alone
        self._now, self._lasting = ([[0.0] * size for _ in range(4)] for _ in range(2))
        self._num_new = self._num_seen = 0  # drafts since the steps were computed, and before
        self._steps: tuple[list[float], list[float]] = ([], [])  # of acceptance and of drafting
        # accepted and what was expected, rejected and what was expected; then the same of drafted nodes
        self._own: dict[Hashable, list[float]] = {}
        self._num_drafts: dict[Hashable, int] = {}
        self._odds: dict[Hashable, tuple[float, float]] = {}

    def observe(self, key: Hashable, num_draft_tokens: int, drafted: int, accepted: Seq[int]) -> None:
        """Learn from a verified draft.

        Args:
            key: of the sequence.
            num_draft_tokens: nodes that were requested.
            drafted: nodes that came and could be accepted.
            accepted: indices of those that were.
        """
        num_draft_tokens = min(num_draft_tokens, self.size)
        if num_draft_tokens == 0:
            return
        accepted = [node for node in accepted if node < num_draft_tokens]
        drafted = min(drafted, num_draft_tokens)
        tried = [0, *(node + 1 for node in accepted if node + 1 < num_draft_tokens)]
        opened = min(drafted + 1, num_draft_tokens)
        self._learn_own(key, tried, len(accepted), opened, drafted)
        seen = self._num_drafts[key] = self._num_drafts.get(key, 0) + 1
        lasting = ACCEPTANCE_SEQUENCE_TRIALS / (ACCEPTANCE_SEQUENCE_TRIALS + seen - 1)
        for kept, weight, decay in (
            (self._now, 1.0, ACCEPTANCE_SHARED_DECAY),
            (self._lasting, lasting, 1 - (1 - ACCEPTANCE_LASTING_DECAY) * lasting),
        ):
            for counts, places in zip(kept, (tried, accepted, range(opened), range(drafted)), strict=True):
                counts[:num_draft_tokens] = [count * decay for count in counts[:num_draft_tokens]]
                for place in places:
                    counts[place] += weight
        self._num_new += 1

    def fade(self, key: Hashable) -> None:
        """Let what a sequence has shown lose weight, as it was not asked for a draft."""
        own = self._own.get(key)
        if own is not None:
            self._own[key] = own = [ACCEPTANCE_FADE * each for each in own]
            self._odds[key] = odds_ratio(*own[:4]), odds_ratio(*own[4:])

    def stop(self, key: Hashable) -> None:
        """Forget a sequence that leaves."""
        self._own.pop(key, None)
        self._odds.pop(key, None)
        if self._num_drafts.pop(key, None) and not self._num_drafts:
            self._now = [counts[:] for counts in self._lasting]
            self._steps = ([], [])

    def expect(self, key: Hashable, places: int) -> tuple[list[float], list[float]]:
        """Return for each position the probability of an accepted node, and that of a node at all: two lists
        [places]."""
        fresh = min(ACCEPTANCE_REFRESH, 1 + self._num_seen // 4)
        if self._num_new >= fresh or len(self._steps[0]) < places:
            self._compute_steps(places)
        odds, odds_drafted = self._odds.get(key, _EVEN)
        gain = accept_prob = 1.0
        gains = []
        accept_probs = []
        for accept, draft in zip(self._steps[0][:places], self._steps[1], strict=False):
            gain *= with_odds(accept, odds)
            accept_prob *= with_odds(draft, odds_drafted)
            gains.append(gain)
            accept_probs.append(accept_prob)
        return gains, accept_probs

    def _learn_own(self, key: Hashable, tried: list[int], num_accepted: int, opened: int, drafted: int) -> None:
        """Learn how the sequence differs from the expectation of any sequence."""
        if len(self._steps[0]) <= max(tried[-1], opened):
            self._compute_steps(max(tried[-1], opened) + 1)
        accepts, drafts = self._steps
        hoped = sum([accepts[place] for place in tried])
        looked = sum(drafts[:opened])
        judged = len(tried)
        now = (
            *(num_accepted, hoped, judged - num_accepted, judged - hoped),
            *(drafted, looked, opened - drafted, opened - looked),
        )
        own = self._own.get(key)
        own = list(now) if own is None else [ACCEPTANCE_DECAY * old + new for old, new in zip(own, now, strict=True)]
        self._own[key] = own
        self._odds[key] = odds_ratio(*own[:4]), odds_ratio(*own[4:])

    def _compute_steps(self, places: int) -> None:
        """Compute the steps that all sequences share, of the first places."""
        self._num_seen += self._num_new
        self._num_new = 0
        places = min(places, self.size)
        weight = ACCEPTANCE_RECORD_WEIGHT if self._prior else ACCEPTANCE_WEIGHT
        tried_by, accepted_by, open_by, drafted_by = self._now
        accepts = []
        drafts = []
        prior = ACCEPTANCE_FIRST
        seen = weight
        good = weight * ACCEPTANCE_NEXT
        for place in range(places):
            if self._prior:
                prior = self._prior[min(place, len(self._prior) - 1)]
            tried = tried_by[place]
            accepted = accepted_by[place]
            accepts.append(min((accepted + weight * prior) / (tried + weight), ACCEPTANCE_MOST))
            drafted = (drafted_by[place] + LENGTH_WEIGHT) / (open_by[place] + LENGTH_WEIGHT)
            drafts.append(min(drafted, ACCEPTANCE_MOST))
            if place:  # the prior of a place is the acceptance of the places before it, all but the first together
                seen += tried
                good += accepted
            prior = good / seen
        self._steps = accepts, drafts  # at once: an interrupt leaves the old ones


def odds_ratio(
    came: float, expected: float, failed: float, feared: float, weight: float = ACCEPTANCE_SEQUENCE_WEIGHT
) -> float:
    """Return the odds over the expected ones, with a prior of no difference. weight: its pseudo-trials of each kind."""
    return (came + weight) / (expected + weight) * (feared + weight) / (failed + weight)


def with_odds(prob: float, ratio: float) -> float:
    """Return the probability whose odds are those of `prob` times a ratio."""
    return ratio * prob / (1 - prob + ratio * prob)


RATE_DECAY = 0.98
"""Weight that earlier trials keep when one more of the same level is observed: about the last fifty count."""
RATE_PRIOR_WEIGHT = 2.0
"""Pseudo-trials of the prior."""


class Rates:
    """Acceptance rates by level: of each position, match length, or bin of a drafter's confidence.

    The estimate is that of a beta prior around `prior`, after trials whose weight decays with every new trial of the
    same level. Only uncensored trials count: a node is one if its parent was accepted (or is the last committed
    token); the others were never compared with the target.

    Args:
        prior: the rate of each level before any trial.
        weight: pseudo-trials of the prior.
        decay: factor on the earlier trials' weight at each new one.
    """

    __slots__ = ("_accepted", "_decay", "_prior", "_tried", "_weight")

    def __init__(self, prior: Sequence[float], weight: float = RATE_PRIOR_WEIGHT, decay: float = RATE_DECAY) -> None:
        self._prior = list(prior)
        self._weight = weight
        self._decay = decay
        self._tried = [0.0] * len(prior)
        self._accepted = [0.0] * len(prior)

    def __len__(self) -> int:
        return len(self._prior)

    def rate(self, level: int) -> float:
        """Return the probability that something of this level is accepted; levels beyond the last count as the last."""
        level = min(level, len(self._prior) - 1)
        weight = self._weight
        return (self._accepted[level] + weight * self._prior[level]) / (self._tried[level] + weight)

    def observe(self, level: int, accepted: bool) -> None:
        """Count one uncensored trial."""
        level = min(level, len(self._prior) - 1)
        self._tried[level] = self._tried[level] * self._decay + 1
        self._accepted[level] = self._accepted[level] * self._decay + accepted


def bin_of(confidence: float, num_bins: int) -> int:
    """Return the level of a confidence in [0, 1] among equally wide bins; NaN and values out of it count as 0 or 1."""
    if not confidence > 0:
        return 0
    return int(min(confidence * num_bins, num_bins - 1))


def bin_centres(num_bins: int) -> list[float]:
    """Return the prior that takes a drafter's confidence as a probability."""
    return [(i + 0.5) / num_bins for i in range(num_bins)]
