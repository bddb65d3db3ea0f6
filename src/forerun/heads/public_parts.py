"""What public forms share when heads are written in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

D2T, T2D, OUTPUT = "d2t", "t2d", "lm_head.weight"


def proposed_tokens(d2t: Tensor) -> Tensor:
    """[draft_vocab_size] int64, the target's tokens that a head with these offsets proposes."""
    return torch.arange(len(d2t)) + d2t.to(torch.int64)


def token_tables(d2t: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """The offsets, and [vocab_size] bool of the tokens that they lead to; none for heads that propose every token."""
    if d2t is None:
        return {}
    mask = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, proposed_tokens(d2t), True)
    return {D2T: d2t.to(torch.int64), T2D: mask}


def as_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same as a file can hold them, each in memory of its own."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def speculators_entry(kind: str, *, target: str, architectures: list[str], num_draft_tokens: int) -> dict[str, Any]:
    """`speculators_config`, by which programs choose how to draft.

    Args:
        kind: of head, as the form calls it.
        target: name or folder of the target. architectures: of the target, as its config.json says.
        num_draft_tokens: that the form recommends.
    """
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
        "verifier": {"name_or_path": target, "architectures": architectures},
    }
