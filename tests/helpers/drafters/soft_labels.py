"""What a model's most probable tokens are, by PyTorch alone, and rows that labels are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.train.data.packed import PackedDocument, PackedShard, pack
from forerun.train.evaluate import document_mask


@torch.inference_mode()
def softmax_top(
    model: PreTrainedModel, tokens: Tensor, top: int, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Ids int64 and probabilities float32, [B, T, top], at every position but the last of tokens [B, T + 1]."""
    mask = None if documents is None else document_mask(documents[:, :-1])
    logits = model(input_ids=tokens[:, :-1], attention_mask=mask, use_cache=False).logits
    probs, ids = torch.softmax(logits.float(), -1).topk(top)
    return ids, probs


def drawn_rows(folder: Path, vocab_size: int, lengths: list[int], window: int = 31, **made_from: Any) -> PackedShard:
    """Rows of random documents of these lengths, of which the first three tokens are a prompt."""
    generator = torch.Generator().manual_seed(4)
    tokens = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    documents = [PackedDocument(each, [place >= 3 for place in range(len(each))]) for each in tokens]
    return pack(documents, folder, window=window, vocab_size=vocab_size, made_from=made_from)
