"""The mathematics of the acceptance rules for drafts drawn from known distributions, and nothing else.

Everything here works on numbers of any type, and `excess` on arrays of them, so that the tests enumerate the very code
that runs with `fractions.Fraction` and prove that it is exact; `excess` works on tensors as well.

A minimum takes 1 as its second argument: of NaN it is NaN then, with which no comparison succeeds.

Notation, for one drawn chain x_1 ... x_n: p_i and q_i are the target's and the draft's distribution of
x_i given the tokens before it, and ratio_i = p_i(x_i) / q_i(x_i). The rule accepts the first `length` tokens and
then draws one more from p_{n+1} if all were accepted, else from the normalised `excess` at `length`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from numpy.typing import NDArray
from torch import Tensor

Numbers: TypeAlias = NDArray[Any]
Array = TypeVar("Array", Numbers, Tensor)


def excess(carry: Array, target: Array, draft: Array) -> Array:
    """Return (carry * target - draft)+, the excess of the target's distribution over the draft's.

    carry: [R, 1]; target, draft: [R, V] distributions. Returns [R, V].
    """
    left = carry * target
    left -= draft  # in index: fresh memory costs more than the subtraction
    return left.clamp_(min=0) if isinstance(left, Tensor) else left.clip(min=0)


@dataclass(frozen=True, slots=True)
class ChainRule:
    """An acceptance rule for drawn chains, as three pure functions of one chain of n tokens.

    Attributes:
        carry: ratios [n] -> [n + 1]; entry i is the weight of the target in the excess after i tokens.
        acceptance: (ratios [n], carries [n + 1], masses [n + 1]) -> [n] probabilities; entry i - 1 is that with which
            token i's comparison with a uniform number succeeds. masses: the sum of the excess after i tokens.
        length: outcomes of the comparisons [n] -> how many tokens are accepted.
    """

    carry: Callable[[Seq[float]], list[float]]
    acceptance: Callable[[Seq[float], Seq[float], Seq[float]], list[float]]
    length: Callable[[Seq[bool]], int]


def unit_carry(ratios: Seq[float]) -> list[float]:
    """Return n + 1 ones: token-level rejection recovers from (p - q)+ wherever it stops."""
    return [1] * (len(ratios) + 1)


def block_carry(ratios: Seq[float]) -> list[float]:
    """Return a_0 = 1, a_i = min(1, a_{i-1} * ratio_i), the probability that at least i of these tokens are accepted."""
    carries: list[float] = [1]
    for ratio in ratios:
        carries.append(min(carries[-1] * ratio, 1))
    return carries


def token_acceptance(ratios: Seq[float], carries: Seq[float], masses: Seq[float]) -> list[float]:
    """Return min(1, ratio_i) (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""
    return [min(ratio, 1) for ratio in ratios]


def block_acceptance(ratios: Seq[float], carries: Seq[float], masses: Seq[float]) -> list[float]:
    """Return Z_i / (Z_i + 1 - a_i), where 0 / 0 is 1; a_n at the chain's end (Sun et al., 2403.10444)."""
    accept_probs: list[float] = []
    for carry, mass in zip(carries[1:-1], masses[1:-1], strict=True):
        whole = mass + 1 - carry
        accept_probs.append(mass / whole if whole else 1)
    return [*accept_probs, carries[-1]] if ratios else []


def up_to_first_failure(accepted: Seq[bool]) -> int:
    """Return how many comparisons in a row succeeded, from the first on."""
    return next((index for index, success in enumerate(accepted) if not success), len(accepted))


def up_to_last_success(accepted: Seq[bool]) -> int:
    """Return the last comparison that succeeded, counted from 1; 0 if none did. Failures before it do not matter."""
    return max((index for index, success in enumerate(accepted, 1) if success), default=0)


TOKEN = ChainRule(unit_carry, token_acceptance, up_to_first_failure)
"""Token-level rejection: stop at the first token that fails."""
BLOCK = ChainRule(block_carry, block_acceptance, up_to_last_success)
"""Block verification: the same inputs and cost, and never fewer tokens in expectation."""
