"""The rotation of queries and keys by their positions (RoPE: Su et al., 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.models.attention.base import Layout


class RotaryEmbedding:
    """Rotates numbers 2i and 2i + 1 of each head by an angle that grows with the position.

    Args:
        inverse_frequencies: [D / 2] angle from one position to the next, float32 on the CPU.
        scaling: of the rotated numbers.
        dtype: of the numbers to rotate, float32 or float64.
        device: where they lie.
    """

    def __init__(self, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies
        self._scaling = scaling
        self._dtype = dtype
        self._device = device
        self._table = self._made(2048)

    def cos_sin(self, layout: Layout) -> Tensor:
        """Return the complex factors of a forward's rows, [T, 1, D / 2], for `apply_rotary`."""
        return self.at(layout.positions, layout.num_positions)

    def at(self, positions: Tensor, num_positions: int | None = None) -> Tensor:
        """Return the complex factors of any positions, [T, 1, D / 2].

        Args:
            positions: [T] int64, at least one.
            num_positions: one more than the largest; None: it is computed.
        """
        num_positions = int(positions.max()) + 1 if num_positions is None else num_positions
        table = self._table
        if num_positions > len(table):
            self._table = table = self._made(2 * (num_positions - 1))
        return table[positions].unsqueeze(1)

    def _made(self, length: int) -> Tensor:
        """Compute [length, D / 2] complex factors; in float32 whatever the model's dtype, as Transformers does."""
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._inverse_frequencies)
        table = torch.complex(angles.cos(), angles.sin()) * self._scaling
        return table.to(self._device, torch.complex128 if self._dtype == torch.float64 else torch.complex64)


def cos_sin_tables(inverse_frequencies: Tensor, scaling: float, length: int) -> tuple[Tensor, Tensor]:
    """Return [length, D / 2] cosines and sines of the angles that rotate numbers i and i + D / 2 of each head; computed
    in float32, as Transformers does."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies)
    return (angles.cos() * scaling).contiguous(), (angles.sin() * scaling).contiguous()


class CosSinTables:
    """Cosines and sines for the native kernels, which rotate numbers i and i + D / 2 of each head.

    Args:
        frequencies: of each rotation, the angle from one position to the next, [D / 2] float32 on the CPU, and a factor
            of the rotated numbers.
    """

    def __init__(self, *frequencies: tuple[Tensor, float]) -> None:
        self._frequencies = frequencies
        self._tables = self._made(2048)

    def reaching(self, num_positions: int) -> tuple[Tensor, ...]:
        """Return [positions, D / 2] cosines and sines of at least so many positions, of one rotation after the other.
        Hold them until the computation ends: another thread may replace them by longer ones."""
        tables = self._tables
        if num_positions > len(tables[0]):
            self._tables = tables = self._made(2 * (num_positions - 1))
        return tables

    def _made(self, length: int) -> tuple[Tensor, ...]:
        return tuple(table for each in self._frequencies for table in cos_sin_tables(*each, length))


def apply_rotary(heads: Tensor, cos_sin: Tensor) -> None:
    """Rotate queries or keys in place.

    heads: [T, heads, D], numbers of a head side by side. cos_sin: complex factors, [T, 1, D / 2].
    """
    rows, count, width = heads.shape
    stride = heads.stride()
    pairs = heads.as_strided((rows, count, width // 2, 2), (stride[0], stride[1], 2, 1), heads.storage_offset())
    torch.view_as_complex(pairs).mul_(cos_sin)


def pair_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Move each head's rows i and i + D/2, which one rotation turns, side by side; dot products are unchanged.

    weight: [heads * D, ...].
    """
    half = head_dim // 2
    heads = weight.shape[0] // head_dim
    rest = weight.shape[1:]
    return weight.view(heads, 2, half, *rest).transpose(1, 2).reshape(weight.shape)
