"""From packed rows of tokens to what a head computes: which states, tokens and targets belong to which row.

In a document of n tokens, row i of the head holds token i + 1 and the target's state of token i. At unrolled step j it
holds token i + 1 + j in place of a draft that was accepted, stands at position i + j, and predicts token i + 2 + j;
the target predicts that token from its state of token i + 1 + j. Rows none of whose predictions are wanted are
computed as keys and values only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.train.accelerator import to_device
from forerun.train.data.packed import NO_DOCUMENT


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one document.

    Attributes:
        first, last: of all rows, the document's.
        first_active, last_active: the same of the active rows.
    """

    first: int
    last: int
    first_active: int
    last_active: int


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Index arrays of some packed rows. "Places" are positions in the documents' tokens, laid one after another.

    Attributes:
        token_ids: [N] int64, the documents' tokens.
        lengths: of the documents.
        states: [R] places whose state a row reads; the token that it reads first is at the place after.
        positions: [R] the row's place in its document.
        active: [A] the rows that predict something that is wanted.
        tokens: [J, A] places of the tokens that the active rows read at each step.
        predictors: [W] places from whose state the target predicts the wanted tokens; each is there once.
        rows: [J, W] the active row that predicts the same token at step j; 0 where there is none.
        valid: [J, W] bool, whether there is one.
        segments: the documents that have active rows.
    """

    token_ids: Tensor
    lengths: list[int]
    states: Tensor
    positions: Tensor
    active: Tensor
    tokens: Tensor
    predictors: Tensor
    rows: Tensor
    valid: Tensor
    segments: list[Segment]

    @property
    def steps(self) -> int:
        """Unrolled steps."""
        return len(self.tokens)

    def to(self, where: torch.device) -> HeadRows:
        """With the tensors on a device."""
        return HeadRows(
            token_ids=to_device(self.token_ids, where),
            lengths=self.lengths,
            states=to_device(self.states, where),
            positions=to_device(self.positions, where),
            active=to_device(self.active, where),
            tokens=to_device(self.tokens, where),
            predictors=to_device(self.predictors, where),
            rows=to_device(self.rows, where),
            valid=to_device(self.valid, where),
            segments=self.segments,
        )


def head_rows(tokens: Tensor, wanted: Tensor, documents: Tensor, steps: int) -> HeadRows:
    """Lay out the documents of packed rows, each [rows, window + 1], on the CPU."""
    used = documents != NO_DOCUMENT
    token_ids, is_wanted = tokens[used].long(), wanted[used]
    lengths = _lengths(documents, used)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    sizes = torch.tensor(lengths)
    place = torch.arange(len(token_ids))
    document = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    position = place - starts[document]
    left = sizes[document] - position  # tokens from this place to the end of its document, itself included
    # the row of a place predicts the token two further on, and later ones at later steps
    is_row = left > 2
    is_active = torch.zeros_like(is_row)
    for step in range(steps):
        is_active |= (left > 2 + step) & is_wanted[(place + 2 + step).clamp(max=len(place) - 1)]
    states = place[is_row]
    active = is_active[is_row].nonzero().flatten()
    number = torch.full_like(place, -1)  # of the active row at a place
    number[states[active]] = torch.arange(len(active))
    read = states[active][None] + 1 + torch.arange(steps)[:, None]
    predictors = place[(left > 1) & is_wanted[(place + 1).clamp(max=len(place) - 1)] & (position > 0)]
    source = predictors[None] - 1 - torch.arange(steps)[:, None]
    valid = (position[predictors][None] > torch.arange(steps)[:, None]) & (source >= 0)
    rows = number[source.clamp(min=0)]
    return HeadRows(
        token_ids=token_ids,
        lengths=lengths,
        states=states,
        positions=position[is_row],
        active=active,
        tokens=read.clamp(max=len(place) - 1),
        predictors=predictors,
        rows=torch.where(valid, rows, 0),
        valid=valid,
        segments=_segments(document[is_row], document[is_row][active], len(lengths)),
    )


def predicted(rows: HeadRows) -> Tensor:
    """[A, J] bool: whether the token that an active row predicts at a step is wanted."""
    found = torch.zeros(rows.steps, len(rows.active), dtype=torch.bool, device=rows.rows.device)
    for step in range(rows.steps):
        found[step, rows.rows[step, rows.valid[step]]] = True
    return found.T


def _lengths(documents: Tensor, used: Tensor) -> list[int]:
    """Of the documents of each row, in order."""
    row = torch.arange(len(documents))[:, None].expand_as(documents)[used]
    key = row * (int(documents.max()) + 2) + documents[used]
    lengths: list[int] = torch.unique_consecutive(key, return_counts=True)[1].tolist()
    return lengths


def _segments(of_rows: Tensor, of_active: Tensor, count: int) -> list[Segment]:
    ends = torch.bincount(of_rows, minlength=count).cumsum(0).tolist()
    active_ends = torch.bincount(of_active, minlength=count).cumsum(0).tolist()
    bounds = zip([0, *ends], ends, [0, *active_ends], active_ends, strict=False)
    return [Segment(*each) for each in bounds if each[3] > each[2]]
