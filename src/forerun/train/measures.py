"""What training commands measure, and on what: held-out files, the bundled prompts, the held-out packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun import workloads
from forerun.train import attention
from forerun.train.accelerator import micro_tokens
from forerun.train.corpus import SourceFile
from forerun.train.data.packed import PackedBatch, PackedRows
from forerun.train.draft.output_vocabulary import restricted
from forerun.train.evaluate import Acceptance, acceptance, acceptance_of, continued, score_of_continuations
from forerun.train.heldout import holds_out_the_same, read_held_out

HELD_OUT_ROWS = 64
"""Packed rows that are measured, at most."""


@dataclass(frozen=True, slots=True)
class DraftData:
    """What a draft learns from and is measured on.

    Attributes:
        training: files of text, or packed rows.
        record: the card's entry.
        held_out: files of text; of packed rows nothing, which have a part of their own for it.
    """

    training: list[SourceFile] | PackedRows
    record: dict[str, Any]
    held_out: list[SourceFile]

    def acceptance(
        self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> list[Acceptance]:
        """Of the pair: on packed rows' held-out part, else on the bundled prompts."""
        if isinstance(self.training, PackedRows):
            return packed_acceptance(target, draft, self.training.held_out())
        return pair_acceptance(target, draft, tokenizer)

    def held_out_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        if isinstance(self.training, PackedRows):
            return packed_texts(self.training.held_out(), tokenizer)
        return [file.text for file in self.held_out]


def on_target(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedModel,
    draft_tokenizer: PreTrainedTokenizerBase,
) -> dict[str, float]:
    """Bits per byte of the target's continuations of the bundled prompts, for draft and target."""
    prompts = [tokenizer(case.prompt, verbose=False)["input_ids"] for case in workloads.load("code")]
    bits = {}
    for temperature in (0.0, 1.0):
        before, after = continued(target, tokenizer, prompts, temperature)
        for name, model, reader in (("draft", draft, draft_tokenizer), ("target", target, tokenizer)):
            bits[f"{name}_at_temperature_{temperature:g}"] = score_of_continuations(model, reader, before, after)
    return bits


def held_out_files(data: Path | None, held_out: list[SourceFile]) -> list[SourceFile]:
    """What to measure on: the files that ship, so that figures compare, or those of the user's folder."""
    return read_held_out() if data is None or holds_out_the_same(held_out) else held_out


def held_out_texts(data: Path | None, held_out: list[SourceFile]) -> list[str]:
    """Their texts."""
    return [file.text for file in held_out_files(data, held_out)]


def pair_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_draft_tokens: int = 4,
    new_tokens: int = 128,
) -> list[Acceptance]:
    """Acceptance on the bundled prompts at temperatures 0 and 1."""
    prompts = [tokenizer(case.prompt, verbose=False)["input_ids"] for case in workloads.load("code")]
    with restricted(draft):
        return [
            acceptance(
                target,
                draft,
                prompts,
                temperature=temperature,
                num_draft_tokens=num_draft_tokens,
                new_tokens=new_tokens,
            )
            for temperature in (0.0, 1.0)
        ]


@torch.inference_mode()
def packed_acceptance(
    target: PreTrainedModel, draft: PreTrainedModel, rows: PackedRows, num_draft_tokens: int = 4
) -> list[Acceptance]:
    """Acceptance along the wanted tokens of held-out rows, at temperatures 0 and 1; nothing where there are none.

    At temperature 0 a token is accepted where the most probable ones of both models agree, whatever the text says next.
    """
    found: dict[float, list[Tensor]] = {0.0: [], 1.0: []}
    size = max(1, micro_tokens(target) // rows.window)
    for first in range(0, min(len(rows), HELD_OUT_ROWS), size):
        batch = rows.rows(list(range(first, min(first + size, len(rows), HELD_OUT_ROWS))))
        with restricted(draft):
            guessed = _logits(draft, batch)
        wanted = _logits(target, batch)
        agreed = {
            0.0: (wanted.argmax(-1) == guessed.argmax(-1)).float(),
            1.0: torch.minimum(wanted.softmax(-1), guessed.softmax(-1)).sum(-1),
        }
        for temperature, values in agreed.items():
            found[temperature] += _runs(values.cpu(), batch, num_draft_tokens)
    return [acceptance_of(rows, temperature, num_draft_tokens) for temperature, rows in found.items() if rows]


def _logits(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """float32 [rows, window, V]."""
    tokens = batch.tokens[:, :-1].to(model.device)
    mask = attention.document_mask(batch.documents[:, :-1].to(model.device))
    attention.use_for(model, tokens.shape[1])
    logits: Tensor = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return logits.float()


def _runs(values: Tensor, batch: PackedBatch, longer_than: int) -> list[Tensor]:
    """The parts of values [rows, window] at the wanted tokens that follow one another, which answers are."""
    runs = []
    for row, wanted, documents in zip(values, batch.wanted[:, 1:], batch.documents[:, 1:], strict=True):
        breaks = (wanted[1:] != wanted[:-1]) | (documents[1:] != documents[:-1])
        bounds = [0, *(breaks.nonzero()[:, 0] + 1).tolist(), len(wanted)]
        spans = [span for span in pairwise(bounds) if wanted[span[0]] and span[1] - span[0] > longer_than]
        runs += [row[start:end] for start, end in spans]
    return runs


def packed_texts(rows: PackedRows, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The documents of held-out rows as text."""
    texts: list[str] = []
    for number in range(min(len(rows), HELD_OUT_ROWS)):
        batch = rows.rows([number])
        parts = (batch.tokens[batch.documents == document] for document in range(int(batch.documents.max()) + 1))
        texts += [tokenizer.decode(part) for part in parts]
    return texts
