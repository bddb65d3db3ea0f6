"""Random numbers: counter-based noise for requests with a seed, a generator's for the others.

The noise of a seeded request is a function of (seed, choice, absolute position, token id) and of
nothing else: not of the batch, the vocabulary's padding, the drafter, or the number of calls.
So drafter and target that both take argmax(logprob + noise) agree wherever their distributions do, and the
text depends on the seed and the target alone.

The hash is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA
2014): the key chooses a position in its sequence, the token id counts on from there.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.types import Draft, PackedDrafts, Sequence

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1
_ONE = 0x3FF0000000000000
"""The bits of 1.0: with 52 random bits below them they are a float64 in [1, 2)."""


class NoiseKey(NamedTuple):
    """The values that the noise of one row depends on.

    Attributes:
        seed: the request's seed.
        choice: index among the request's `n` choices.
        position: index in `token_ids` of the token that the row draws.
    """

    seed: int
    choice: int
    position: int


def keyed_uniform(
    keys: Seq[NoiseKey], vocab_size: int, device: torch.device | str = "cpu", token_ids: Tensor | None = None
) -> Tensor:
    """Return [len(keys), V] float64 in (0, 1), never 0 or 1: odd multiples of 2^-53.

    token_ids: [n] int64 on the device; these columns alone, [len(keys), n], with the same bits.
    """
    device = torch.device(device)
    starts = [_hash_key(key) for key in keys]
    steps = _token_steps(vocab_size, device) if token_ids is None else _steps_to(token_ids)
    if device.type != "cpu":
        return _uniform_tensor(starts, steps)
    return torch.from_numpy(_uniform_array(starts, steps.numpy()))


def keyed_gumbel(
    keys: Seq[NoiseKey], vocab_size: int, device: torch.device | str = "cpu", token_ids: Tensor | None = None
) -> Tensor:
    """Return [len(keys), V] float64 standard Gumbel noise, -log(-log(u)) of `keyed_uniform` (see its token_ids)."""
    return _to_gumbel(keyed_uniform(keys, vocab_size, device, token_ids))


class StepNoise:
    """The noise of one step (`forerun.types.Noise`), in the packed order of the target's rows.

    Rows of requests with a seed get the keyed noise, all others the generator's.

    Args:
        generator: on any device; uniform numbers stay there.
        sequences: [B].
        packed: the drafts of these sequences.
        device: where Gumbel noise is made or brought to.
    """

    def __init__(
        self,
        generator: torch.Generator,
        sequences: Seq[Sequence],
        packed: PackedDrafts,
        device: torch.device | str = "cpu",
    ) -> None:
        self._generator = generator
        self._device = device
        self._sequences = sequences
        self._packed = packed
        self._keys: list[NoiseKey | None] | None = None  # computed when first needed: most steps draw none

    def uniform(self, size: int) -> Tensor:
        return torch.rand(size, dtype=torch.float64, generator=self._generator, device=self._generator.device)

    def gumbel(self, rows: Seq[int], vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
        row_keys = [self.key(row) for row in rows]
        keys = [key for key in row_keys if key is not None]
        if len(keys) == len(row_keys):
            return keyed_gumbel(keys, vocab_size, self._device, token_ids)
        width = vocab_size if token_ids is None else len(token_ids)
        u = self.uniform(len(row_keys) * width).to(self._device).reshape(-1, width)
        noise = _to_gumbel(u.clamp_(min=2.0**-54))  # the generator's grid holds 0
        if keys:
            seeded = [index for index, key in enumerate(row_keys) if key is not None]
            noise[seeded] = keyed_gumbel(keys, vocab_size, self._device, token_ids)
        return noise

    def key(self, row: int) -> NoiseKey | None:
        """Return the key of a packed row; None if its request has no seed."""
        if self._keys is None:
            self._keys = [
                key
                for sequence, draft in zip(self._sequences, self._packed.drafts, strict=True)
                for key in _keys_of(sequence, draft)
            ]
        return self._keys[row]


def _keys_of(sequence: Sequence, draft: Draft) -> list[NoiseKey | None]:
    """Return one key per row of the sequence: the row after the last committed token, then one per node."""
    seed = sequence.params.seed
    if seed is None:
        return [None] * (len(draft) + 1)
    positions = [len(sequence.token_ids)]
    for parent in draft.parents:
        positions.append(positions[parent + 1] + 1)
    return [NoiseKey(seed, sequence.choice, position) for position in positions]


def _to_gumbel(u: Tensor) -> Tensor:
    if u.device.type != "cpu":
        return u.log_().neg_().log_().neg_()
    values = u.numpy()  # numpy's logarithm takes less than half the time of torch's
    np.log(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    np.negative(values, out=values)
    return u


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _hash_key(key: NoiseKey) -> int:
    value = 0
    for part in key:
        value = _mix((value + part * _GAMMA + _GAMMA) & _MASK)
    return value


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


@lru_cache(maxsize=8)
def _token_steps(vocab_size: int, device: torch.device) -> Tensor:
    return _steps_to(torch.arange(vocab_size, device=device))


def _steps_to(token_ids: Tensor) -> Tensor:
    return (token_ids + 1) * _signed(_GAMMA)


def _uniform_array(starts: Seq[int], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Compute `keyed_uniform` in numpy, whose unsigned integers shift logically: half the time of the tensors.

    starts: [R] hashes of the keys; steps: [n] what each token adds to them.
    """
    bits = np.array(starts, dtype=np.uint64)[:, None] + steps.view(np.uint64)
    scratch = np.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        bits ^= np.right_shift(bits, np.uint64(shift), out=scratch)
        if factor is not None:
            bits *= np.uint64(factor)
    bits >>= np.uint64(12)
    bits |= np.uint64(_ONE)
    # In [1, 2) by the exponent's bits; the difference is exact and lands between the multiples of 2^-52.
    values = bits.view(np.float64)
    values -= 1 - 2.0**-53
    return values


def _uniform_tensor(starts: Seq[int], steps: Tensor) -> Tensor:
    """Compute `keyed_uniform` on any device. steps: [n] int64, whose wrapping products have unsigned ones' bits."""
    bits = torch.tensor([_signed(start) for start in starts], device=steps.device)[:, None] + steps
    scratch = torch.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        bits.bitwise_xor_(_shift_right(bits, shift, scratch))
        if factor is not None:
            bits.mul_(_signed(factor))
    return _shift_right(bits, 12, scratch).bitwise_or_(_ONE).view(torch.float64).sub_(1 - 2.0**-53)


def _shift_right(bits: Tensor, shift: int, out: Tensor) -> Tensor:
    """Shift logically, where torch's shift is arithmetic."""
    torch.bitwise_right_shift(bits, shift, out=out)
    return out.bitwise_and_(2 ** (64 - shift) - 1)
