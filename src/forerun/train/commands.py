"""The commands that train and measure drafts: from data to a draft's folder with its card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.models import LanguageModel, load_model
from forerun.train.accelerator import device_name, dtype_name, product_type, training_device
from forerun.train.card import (
    NOT_JUDGED,
    chance_line,
    load_model_and_tokenizer,
    model_record,
    read_record,
    save_model,
    write_model_card,
)
from forerun.train.checkpoint import DTYPE, FILE_NAME, run_in, run_type
from forerun.train.corpus import read_held_out
from forerun.train.data.answer_rows import read_rows, target_tokenizer
from forerun.train.data.packed import PackedShard
from forerun.train.defaults import AUTO, DRAFT_RATE, FITTED_RATE, DraftTraining
from forerun.train.draft.distil import DISTILLATION, IMITATION, NUM_DRAFT_TOKENS, Start, train_stages
from forerun.train.draft.fit import can_fit
from forerun.train.draft.judge import HELD_OUT_ROWS
from forerun.train.draft.prune import check_start
from forerun.train.draft.samples import ShardBatches, mask_unproposed, output_tokens_of
from forerun.train.evaluate import (
    HeldOutAcceptance,
    TextScore,
    held_out_acceptance,
    most_frequent_share,
    text_score,
)
from forerun.utils import workloads


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of a pair on held-out code."""

    target: TextScore
    draft: TextScore
    acceptance: list[HeldOutAcceptance]


def train_draft(
    out: Path,
    work: Path,
    target_name: str,
    data: Path,
    options: DraftTraining,
    command: str,
    *,
    resume: bool = False,
    force: bool = False,
    start: str | None = None,
) -> bool:
    """Train a draft of a target, save it to `out`, measure it on held-out rows, write the card; return whether it is
    no better than chance (`is_chance`).

    Args:
        data: see `read_rows`.
        command: the command line, for the card.
        start: name of the model to go on from; None: the target, of which some layers are kept.

    Raises:
        ConfigError, IncompatibleDrafterError: no start is given, or it does not fit; see `train_stages`.
    """
    where = training_device(options.device)
    _check_given(start, options)
    console = Console()
    with run_in(work, out, console, resume=resume, force=force):
        target = load_model(target_name, device=where)
        tokenizer = target_tokenizer(target_name)
        dtype = run_type(work / _begun_stage(work), options.dtype, where, console)
        rows = read_rows(data, target, tokenizer, work / "packed", options.window, console)
        former = _load_start(start, target_name, target, tokenizer)
        options = _with_rate(options, former.weights)
        trained = train_stages(target, tokenizer, rows, work, options, dtype, console, former)
        save_model(trained.weights, tokenizer, out)
        stored, _ = load_model_and_tokenizer(out)
        stored.to(where, dtype)
        rates = trained.judge.acceptance(stored)
        held_out = rows.held_out()
        record = model_record(
            kind="draft",
            command=command,
            seed=options.seed,
            model=stored,
            data=_data_record(rows, trained.learnt, held_out),
            options=asdict(options) | {DTYPE: dtype_name(dtype)},
            stages=trained.stages,
            started_from=None if start is None else read_record(Path(start)) or None,
            held_out=text_score(stored, tokenizer, packed_texts(held_out, tokenizer)),
            acceptance=rates,
            device=device_name(where),
            constant=most_frequent_share(held_out, HELD_OUT_ROWS),
        )
        write_model_card(out, record)
        return _show(rates, record, out, console)


def _check_given(start: str | None, options: DraftTraining) -> None:
    """Raise ConfigError where neither a start nor layers of the target are given."""
    if start is None and options.pruning.layers is None:
        raise ConfigError(
            "A draft starts from trained weights. Give a smaller model of the target's tokens (--start), whole or cut "
            "to some of its layers (--layers); without --start, the target's own layers are kept."
        )


def _begun_stage(work: Path) -> str:
    """Return the stage that a run began with, and has its options."""
    return IMITATION if (work / IMITATION / FILE_NAME).exists() else DISTILLATION


def _with_rate(options: DraftTraining, start: PreTrainedModel) -> DraftTraining:
    """Return the options with the learning rate that suits a draft of this start, unless they have one.

    It is the low one where the draft is fitted, or was: only trained drafts propose some tokens alone.
    """
    is_fitted = can_fit(start) and (options.pruning.layers is not None or output_tokens_of(start) is not None)
    return replace(options, learning_rate=options.learning_rate or (FITTED_RATE if is_fitted else DRAFT_RATE))


def _load_start(
    start: str | None, target_name: str, target: LanguageModel, tokenizer: PreTrainedTokenizerBase
) -> Start:
    """Load what a draft starts from. Raises as `check_start`."""
    name = start or target_name
    found = Start(name, *load_model_and_tokenizer(Path(name), torch.float32))
    if start is not None:
        check_start(found.weights, found.tokenizer, target, tokenizer)
    return found


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


def _data_record(rows: PackedShard, learnt: ShardBatches, held_out: PackedShard) -> dict[str, Any]:
    """Return the card's entry of a draft's data."""
    documents, tokens, wanted = learnt.counts()
    part = f"{len(learnt.rows):,} of {len(rows):,} " if len(learnt.rows) < len(rows) else ""
    return {
        "description": f"{part}packed rows ({tokens:,} tokens, {wanted:,} of them learnt)",
        "licence": "that of the data",
        "unit": "documents",
        "training_files": documents,
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


def packed_texts(rows: PackedShard, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode the documents of held-out rows."""
    texts: list[str] = []
    for number in range(min(len(rows), HELD_OUT_ROWS)):
        batch = rows.rows([number])
        parts = (batch.tokens[batch.documents == document] for document in range(int(batch.documents.max()) + 1))
        texts += [tokenizer.decode(part) for part in parts]
    return texts
