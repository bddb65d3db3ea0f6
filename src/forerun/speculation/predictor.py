"""A predictor of tokens, seconds and speedup by K, from the costs of a step and acceptance.

The cost of a step is that in the engine: the forward with its hidden-state outputs, the drafter with its updates, and
the engine's part. The formula is that of the automatic policy (`speculation/choose_k.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from forerun.errors import ConfigError
from forerun.speculation.choose_k import expected

_BISECTIONS = 50


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Return the tokens of a step, the target's own included, where every draft token below an accepted one is accepted
    with probability alpha: 1 + α + α² + … + α^K = (1 − α^(K+1)) / (1 − α) (Leviathan et al., 2211.17192, equation 1).
    """
    if alpha == 1:
        return num_draft_tokens + 1.0
    return (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """How often the tokens of a chain are accepted.

    Attributes:
        per_position: of the first, the second, ..., each given that those before it were accepted; later ones are
            accepted as the last.
    """

    per_position: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.per_position or not all(0 <= each <= 1 for each in self.per_position):
            raise ConfigError(
                f"acceptance is {', '.join(map(str, self.per_position)) or 'empty'}, but must be numbers from 0 to 1: "
                "one for all positions of a draft, or one for each with commas between them."
            )

    def gains(self, num_draft_tokens: int) -> list[float]:
        """Return [K] the probability that each token is accepted, and with it all before it."""
        last = self.per_position[-1]
        steps = [*self.per_position, *([last] * num_draft_tokens)][:num_draft_tokens]
        return list(accumulate(steps, lambda accept_prob, step: accept_prob * step))


@dataclass(frozen=True, slots=True)
class CostsByK:
    """Seconds of a step for each sequence in it, by the tokens of its draft, from none on: lists of one length.

    Attributes:
        plain: of a step without any drafter.
        target: the forward over one row more than there are draft tokens.
        draft: the drafter: drafting, and learning what became of the draft. For none: learning alone.
        rest: the engine's part: distributions, verification, commits, text.
    """

    plain: float
    target: Sequence[float]
    draft: Sequence[float]
    rest: Sequence[float]

    @property
    def most(self) -> int:
        """Return the largest K."""
        return len(self.target) - 1

    def seconds(self, num_draft_tokens: int) -> float:
        """Return the seconds of a whole step."""
        return sum(part[num_draft_tokens] for part in (self.target, self.draft, self.rest))

    def speedup(self, length: float, num_draft_tokens: int) -> float:
        """Return tokens per second over plain decoding, with drafts of K tokens and this mean acceptance length."""
        return length * self.plain / self.seconds(num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Predicted:
    """The prediction of one K.

    Attributes:
        tokens: of a step, the target's own included.
        seconds: of a step.
        speedup: over plain decoding.
        break_even: the acceptance of every token from which it is faster than plain decoding; None: never is.
    """

    num_draft_tokens: int
    tokens: float
    seconds: float
    speedup: float
    break_even: float | None


@dataclass(frozen=True, slots=True)
class SpeedPrediction:
    """The predictions of every K.

    Attributes:
        plain: seconds of a token of plain decoding.
        by_k: from K = 1 on.
    """

    plain: float
    by_k: tuple[Predicted, ...]

    @classmethod
    def of(cls, costs: CostsByK, gains: Sequence[float], accept_probs: Sequence[float] = ()) -> SpeedPrediction:
        """Predict every K of these costs.

        Args:
            gains: [K] chance that each token is there and accepted.
            accept_probs: [K] chance that a draft has each token; empty: every draft is as long as was asked for.
        """
        most = min(costs.most, len(gains))
        rows = [target + rest for target, rest in zip(costs.target, costs.rest, strict=True)]
        there = accept_probs or [1.0] * most
        tokens, seconds = expected(gains[:most], there[:most], rows, list(costs.draft[: most + 1]))
        return cls(
            costs.plain,
            tuple(
                Predicted(k, tokens[k], seconds[k], tokens[k] / seconds[k] * costs.plain, break_even(costs, k))
                for k in range(1, most + 1)
            ),
        )

    @property
    def best(self) -> Predicted | None:
        """Return the fastest K's prediction; None where plain decoding is the fastest."""
        fastest = max(self.by_k, key=lambda each: each.speedup, default=None)
        return fastest if fastest is not None and fastest.speedup > 1 else None

    @property
    def break_even(self) -> float | None:
        """Return the acceptance from which some K is faster than plain decoding."""
        return min((each.break_even for each in self.by_k if each.break_even is not None), default=None)


def break_even(costs: CostsByK, num_draft_tokens: int) -> float | None:
    """Return the acceptance of every token at which K draft tokens cost what they gain.

    None where they cost more than even complete acceptance gains.
    """
    wanted = costs.seconds(num_draft_tokens) / costs.plain
    if wanted > num_draft_tokens + 1:
        return None
    low = 0.0
    high = 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if expected_tokens(middle, num_draft_tokens) < wanted:
            low = middle
        else:
            high = middle
    return high if wanted > 1 else 0.0
