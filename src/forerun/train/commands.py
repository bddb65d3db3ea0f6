"""The commands that train and measure drafts: from data to a draft's folder with its card."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.train.accelerator import device_name, dtype_name, micro_tokens, product_type, training_device
from forerun.train.card import (
    NOT_JUDGED,
    chance_line,
    load_model_and_tokenizer,
    model_record,
    read_record,
    save_model,
    write_model_card,
)
from forerun.train.checkpoint import DTYPE, Weights, run_in, run_type
from forerun.train.corpus import read_held_out
from forerun.train.data.answer_rows import read_rows
from forerun.train.data.packed import PackedBatch, PackedShard
from forerun.train.defaults import AUTO, DraftTraining
from forerun.train.draft import distil
from forerun.train.draft.parallel import mask_token_of
from forerun.train.draft.prune import check_start_given
from forerun.train.draft.samples import mask_unproposed
from forerun.train.evaluate import (
    HeldOutAcceptance,
    TextScore,
    acceptance_of,
    agreement_of,
    drafted_logits,
    held_out_acceptance,
    most_frequent_share,
    text_score,
)
from forerun.utils import workloads

HELD_OUT_ROWS = 64
"""Packed rows that are measured, at most."""
NUM_DRAFT_TOKENS = 4
"""Tokens of the chains that are measured, where nobody says how many."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of a pair on held-out code."""

    target: TextScore
    draft: TextScore
    acceptance: list[HeldOutAcceptance]


def train_draft(
    out: Path,
    work: Path,
    target_folder: Path,
    data: Path,
    options: DraftTraining,
    command: str,
    *,
    resume: bool = False,
    force: bool = False,
    start: Path | None = None,
) -> bool:
    """Train a draft of `target_folder`, save to `out`, measure the pair on held-out rows, write the card.

    Args:
        data: see `read_rows`.
        command: the command line, for the card.
        start: folder of a model to go on from, in place of a pruned copy of the target (`check_start_given`).

    Returns:
        Whether the draft is no better than chance (`is_chance`).
    """
    check_start_given(start, options.pruning)
    where = training_device(options.device)
    console = Console()
    with run_in(work, out, console, resume=resume, force=force):
        target, tokenizer = load_model_and_tokenizer(target_folder)
        target.to(where, run_type(work / "samples", options.dtype, where, console))
        rows = read_rows(data, Weights(target), tokenizer, work / "packed", options.window, console)
        former = load_model_and_tokenizer(start, torch.float32) if start is not None else None
        draft, state = distil.train_stages(target, tokenizer, rows, work, options, console, former)
        save_model(draft, tokenizer, out)
        stored, _ = load_model_and_tokenizer(out)
        stored.to(where, target.dtype)
        held_out = rows.held_out()
        rates = packed_acceptance(target, stored, held_out, options.parallel or NUM_DRAFT_TOKENS)
        record = model_record(
            kind="draft",
            command=command,
            seed=options.seed,
            model=stored,
            data=_data_record(rows, held_out),
            options=asdict(options) | {DTYPE: dtype_name(target.dtype)},
            stages={"distillation": state},
            started_from=read_record(start) if start is not None else None,
            held_out=text_score(stored, tokenizer, packed_texts(held_out, tokenizer)),
            acceptance=rates,
            device=device_name(where),
            constant=most_frequent_share(held_out, HELD_OUT_ROWS),
        )
        write_model_card(out, record)
        return _show(rates, record, out, console)


def _show(rates: list[HeldOutAcceptance], record: dict[str, Any], out: Path, console: Console) -> bool:
    """Print what was measured. Returns whether the draft is no better than chance."""
    for row in rates:
        setting = f"temperature {row.temperature:g}, K={row.num_draft_tokens}"
        console.print(f"{out}: acceptance rate {row.rate:.3f} at {setting}")
    if not rates:
        console.print(f"{out}: {NOT_JUDGED}", highlight=False)
    none: bool = record["is_chance"]
    if none:
        console.print(chance_line("draft", rates[0].per_position[0], record["most_frequent_token"]), soft_wrap=True)
    return none


def _data_record(rows: PackedShard, held_out: PackedShard) -> dict[str, Any]:
    """Return the card's entry of a draft's data."""
    return {
        "description": f"packed rows ({rows.num_tokens:,} tokens, {rows.num_wanted:,} of them learnt)",
        "licence": "that of the data",
        "unit": "documents",
        "training_files": rows.num_documents,
        "held_out_files": held_out.num_documents,
        "split": "by a hash of the prompt",
    }


def evaluate_pair(
    target_folder: Path,
    draft_folder: Path,
    *,
    num_draft_tokens: int,
    new_tokens: int = 128,
    device: str | None = None,
) -> Evaluation:
    """Measure a pair on the bundled held-out files and prompts."""
    where = training_device(device)
    dtype = product_type(AUTO, where)
    target, tokenizer = load_model_and_tokenizer(target_folder)
    draft, _ = load_model_and_tokenizer(draft_folder)
    target.to(where, dtype)
    draft.to(where, dtype)
    texts = [file.text for file in read_held_out()]
    return Evaluation(
        target=text_score(target, tokenizer, texts),
        draft=text_score(draft, tokenizer, texts),
        acceptance=pair_acceptance(target, draft, tokenizer, num_draft_tokens, new_tokens),
    )


def pair_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
    new_tokens: int = 128,
) -> list[HeldOutAcceptance]:
    """Measure acceptance on the bundled prompts at temperatures 0 and 1."""
    prompts = [tokenizer(case.prompt, verbose=False)["input_ids"] for case in workloads.load_workload("code")]
    with mask_unproposed(draft):
        return [
            found
            for temperature in (0.0, 1.0)
            for found in held_out_acceptance(
                target,
                draft,
                prompts,
                temperature=temperature,
                num_draft_tokens=num_draft_tokens,
                new_tokens=new_tokens,
            )
        ]


@torch.inference_mode()
def packed_acceptance(
    target: PreTrainedModel, draft: PreTrainedModel, rows: PackedShard, num_draft_tokens: int = NUM_DRAFT_TOKENS
) -> list[HeldOutAcceptance]:
    """Measure acceptance along the wanted tokens of held-out rows, at temperatures 0 and 1; none without such rows.

    At temperature 0 a token is accepted where the most probable ones of both models agree, whatever the text says next.
    """
    found: dict[float, list[Tensor]] = {0.0: [], 1.0: []}
    chains = 1 if mask_token_of(draft) is None else num_draft_tokens
    size = max(1, micro_tokens(target) // (rows.window * chains))
    for first in range(0, min(len(rows), HELD_OUT_ROWS), size):
        batch = rows.rows(list(range(first, min(first + size, len(rows), HELD_OUT_ROWS))))
        inputs = batch.tokens[:, :-1].to(target.device), batch.documents[:, :-1].to(target.device)
        (wanted,) = drafted_logits(target, *inputs, 1)
        with mask_unproposed(draft):
            for temperature, runs in found.items():
                drafted = drafted_logits(draft, *inputs, num_draft_tokens)
                values = agreement_of(drafted, wanted, wanted.argmax(-1), temperature)
                runs += _runs(values.cpu(), batch, num_draft_tokens)
    return [each for temperature, runs in found.items() for each in acceptance_of(runs, temperature, num_draft_tokens)]


def _runs(values: Tensor, batch: PackedBatch, longer_than: int) -> list[Tensor]:
    """Split values [rows, K, window] into runs at consecutive wanted tokens, which answers are."""
    runs = []
    for row, wanted, documents in zip(values, batch.wanted[:, 1:], batch.documents[:, 1:], strict=True):
        breaks = (wanted[1:] != wanted[:-1]) | (documents[1:] != documents[:-1])
        bounds = [0, *(breaks.nonzero()[:, 0] + 1).tolist(), len(wanted)]
        spans = [span for span in pairwise(bounds) if wanted[span[0]] and span[1] - span[0] > longer_than]
        runs += [row[:, start:end] for start, end in spans]
    return runs


def packed_texts(rows: PackedShard, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode the documents of held-out rows."""
    texts: list[str] = []
    for number in range(min(len(rows), HELD_OUT_ROWS)):
        batch = rows.rows([number])
        parts = (batch.tokens[batch.documents == document] for document in range(int(batch.documents.max()) + 1))
        texts += [tokenizer.decode(part) for part in parts]
    return texts
