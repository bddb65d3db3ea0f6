"""The mathematics of the acceptance rules for drafts drawn from known distributions, and nothing else.

Everything here works on numpy arrays of any number type, so that the tests enumerate the very code that
runs (arrays of `fractions.Fraction`) and prove that it is exact; `excess` works on tensors as well.

Notation, for one drawn chain x_1 ... x_n: p_i and q_i are the target's and the draft's distribution of
x_i given the tokens before it, and ratio_i = p_i(x_i) / q_i(x_i). The rule accepts the first `length` tokens and
then draws one more from p_{n+1} if all were accepted, else from the normalised `excess` at `length`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Numbers: TypeAlias = NDArray[Any]
Array = TypeVar("Array", Numbers, Tensor)


def excess(carry: Array, target: Array, draft: Array) -> Array:
    """(carry * target - draft)+: what the target's distribution holds beyond the draft's.

    carry: [R, 1]; target, draft: [R, V] distributions. Returns [R, V].
    """
    left = carry * target
    left -= draft  # in place: fresh memory costs more than the subtraction
    return left.clamp_(min=0) if isinstance(left, Tensor) else left.clip(min=0)


@dataclass(frozen=True, slots=True)
class ChainRule:
    """An acceptance rule for drawn chains, as three pure functions. Arrays are [B, n] unless said otherwise.

    Attributes:
        carry: ratios -> [B, n + 1]; column i is the weight of the target in the excess after i tokens.
        acceptance: (ratios, carries [B, n + 1], masses [B, n + 1], lengths [B]) -> chances; column i - 1 is
            the chance that token i's comparison with a uniform number succeeds. masses: the sum of the
            excess after i tokens. lengths: tokens in each chain; columns beyond them hold chance 0.
        length: outcomes of the comparisons, bool -> [B] how many tokens are accepted.
    """

    carry: Callable[[Numbers], Numbers]
    acceptance: Callable[[Numbers, Numbers, Numbers, NDArray[np.int64]], Numbers]
    length: Callable[[NDArray[np.bool_]], NDArray[np.int64]]


def unit_carry(ratios: Numbers) -> Numbers:
    """Token-level rejection recovers from (p - q)+ wherever it stops."""
    return np.ones((len(ratios), ratios.shape[1] + 1), dtype=int).astype(ratios.dtype)


def block_carry(ratios: Numbers) -> Numbers:
    """a_0 = 1, a_i = min(1, a_{i-1} * ratio_i): the chance that at least i of these tokens are accepted."""
    carries = unit_carry(ratios)
    for place in range(ratios.shape[1]):
        np.minimum(carries[:, place] * ratios[:, place], 1, out=carries[:, place + 1])
    return carries


def token_acceptance(ratios: Numbers, carries: Numbers, masses: Numbers, lengths: NDArray[np.int64]) -> Numbers:
    """min(1, ratio_i) (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""
    return np.where(_places(ratios) <= lengths[:, None], np.minimum(ratios, 1), 0)


def block_acceptance(ratios: Numbers, carries: Numbers, masses: Numbers, lengths: NDArray[np.int64]) -> Numbers:
    """Z_i / (Z_i + 1 - a_i), where 0 / 0 is 1; a_n at the chain's end (Sun et al., 2403.10444)."""
    places = _places(ratios)
    carry, mass = carries[:, 1:], masses[:, 1:]
    whole = mass + 1 - carry
    inside = np.where(whole == 0, 1, mass / np.where(whole == 0, 1, whole))
    return np.where(places == lengths[:, None], carry, np.where(places < lengths[:, None], inside, 0))


def up_to_first_failure(accepted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many comparisons in a row succeeded, from the first on."""
    count: NDArray[np.int64] = np.cumprod(accepted, axis=-1, dtype=np.int64).sum(-1)
    return count


def up_to_last_success(accepted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The last comparison that succeeded, counted from 1; 0 if none did. Failures before it do not matter."""
    last: NDArray[np.int64] = np.where(accepted, _places(accepted), 0).max(-1, initial=0)
    return last


def _places(array: Numbers) -> NDArray[np.int64]:
    return np.arange(1, array.shape[1] + 1)


TOKEN = ChainRule(unit_carry, token_acceptance, up_to_first_failure)
"""Token-level rejection: stop at the first token that fails."""
BLOCK = ChainRule(block_carry, block_acceptance, up_to_last_success)
"""Block verification: the same inputs and cost, and never fewer tokens in expectation."""
