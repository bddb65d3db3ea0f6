"""How Triton products are cut, which follows from the shape of the matrix alone and decides the order of additions."""

from __future__ import annotations

from dataclasses import dataclass

_ENOUGH = 256
"""Programs that keep the memory of a large device busy; fewer are split along the inputs."""
_LEAST_PART = 512
"""Inputs of a split at least."""
_BLOCK_BYTES = 256
"""Of one row of a block of the matrix."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one product is cut.

    Attributes:
        block_n: outputs of a program. block_k: inputs that it adds at a time. splits: parts of the inputs.
    """

    block_n: int
    block_k: int
    splits: int

    @classmethod
    def of(cls, num_outputs: int, num_inputs: int, itemsize: int) -> Cut:
        block_n = 64 if num_outputs >= 64 else max(16, power_of_2_from(num_outputs))
        block_k = min(_BLOCK_BYTES // itemsize, max(16, power_of_2_from(num_inputs)))
        splits = 1
        programs = -(-num_outputs // block_n)
        while programs * splits < _ENOUGH and num_inputs // (2 * splits) >= _LEAST_PART:
            splits *= 2
        return cls(block_n, block_k, splits)


def power_of_2_from(number: int) -> int:
    """Return the least power of 2 that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
