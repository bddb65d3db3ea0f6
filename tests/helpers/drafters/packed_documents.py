"""Documents packed into rows, as training of heads reads them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from families import VOCAB
from forerun.train.data.packed import NO_DOCUMENT


def packed_documents(lengths: Seq[Seq[int]] = ((9, 5), (12,)), width: int = 15) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, width] random tokens, whether each is wanted, and the number of its document.

    lengths: of the documents of each row. The first tokens of the longer documents are a prompt.
    """
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (len(lengths), width), generator=generator)
    documents = torch.full(tokens.shape, NO_DOCUMENT, dtype=torch.int32)
    wanted = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, of_row in enumerate(lengths):
        start = 0
        for number, length in enumerate(of_row):
            documents[row, start : start + length] = number
            wanted[row, start + min(3, length - 3) : start + length] = True
            start += length
    return tokens, wanted, documents
