"""The effect of a grammar on logits: tokens that may not follow become -inf."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from forerun.errors import GrammarDeadEndError
from forerun.types import Allowed

DeadRows: TypeAlias = dict[int, GrammarDeadEndError]
"""Rows from which no token can be drawn, and why."""


def apply(logits: Tensor, allowed: Seq[Allowed]) -> DeadRows:
    """Change [R, V] logits in place, and return the rows for which there is an error. allowed: [R]."""
    rows = [row for row, bits in enumerate(allowed) if isinstance(bits, np.ndarray)]
    if rows:
        packed = np.stack([bits for bits in allowed if isinstance(bits, np.ndarray)])
        unpacked = np.unpackbits(packed, axis=-1, count=logits.shape[-1], bitorder="little")
        mask = torch.from_numpy(unpacked).to(logits.device) == 0
        if len(rows) == len(allowed):
            logits.masked_fill_(mask, -math.inf)
        else:
            logits[rows] = logits[rows].masked_fill_(mask, -math.inf)
    return {row: error for row, error in enumerate(allowed) if isinstance(error, GrammarDeadEndError)}


def no_token() -> GrammarDeadEndError:
    """Make the error of a position where the grammar allows no token."""
    return GrammarDeadEndError(
        "The grammar allows no token here together with the request's other options, and the text is not complete. "
        "If min_tokens or ignore_eos is set, leave it out; else widen the grammar."
    )
