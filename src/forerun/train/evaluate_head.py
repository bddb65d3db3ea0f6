"""`forerun train eval --head`: a head's folder measured with its target."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from forerun import workloads
from forerun.errors import ConfigError, UnsupportedModelError
from forerun.heads import BlockConfig, EagleConfig, HeadConfig, MedusaConfig, StoredHead, load_head
from forerun.heads.fingerprint import check_target
from forerun.models import LanguageModel, load_model
from forerun.train.accelerator import reuse_memory, training_device
from forerun.train.block.kind import BlockKind
from forerun.train.continuations import write_on
from forerun.train.data.answer_rows import read_rows, tokenizer_of
from forerun.train.data.packed import PackedRows
from forerun.train.data.packing import Document, pack
from forerun.train.eagle.kind import EagleKind
from forerun.train.evaluate import batches_of_one_length
from forerun.train.heads.card import HeadReport
from forerun.train.heads.commands import FINAL_ROWS, Start, measure
from forerun.train.heads.evaluate import HeldOut
from forerun.train.heads.kind import HeadKind
from forerun.train.heads.options import BlockTraining, EagleTraining, MedusaTraining
from forerun.train.heads.run import Target, frozen_model
from forerun.train.heads.start import target_config
from forerun.train.medusa.kind import MedusaKind
from forerun.vocabulary import encode_text

WINDOW = 512


def evaluate_head(
    name: str,
    folder: Path,
    data: Path | None,
    *,
    num_draft_tokens: int,
    new_tokens: int,
    threads: int = 0,
    device: str | None = None,
) -> HeadReport:
    """Measure a stored head of any form on held-out answers.

    Args:
        name: of the target, as `load_model` takes it.
        data: as for training: what is held out of it. None: the target's greedy continuations of the bundled prompts.
        new_tokens: of such a continuation.

    Raises:
        ModelLoadError: there is no head, or it is damaged.
        IncompatibleDrafterError: it is one for another target.
        ConfigError: nothing of the data is held out.
    """
    if threads:
        torch.set_num_threads(threads)
    reuse_memory()
    where = training_device(device)
    served = load_model(name, device=where)
    tokenizer = tokenizer_of(name)
    num_layers = target_config(name).num_hidden_layers
    stored = load_head(folder, num_layers)
    kind = kind_of(stored.config, str(folder))
    check_target(stored.fingerprint, served, str(folder))
    model = frozen_model(name, where)
    with tempfile.TemporaryDirectory() as temporary:
        packed = Path(temporary) / "packed"
        if data is None:
            documents = _continuations(model, tokenizer, new_tokens)
            rows = pack(documents, packed, window=WINDOW, vocab_size=served.vocab_size, made_from={})
        else:
            rows = read_rows(data, served, tokenizer, packed, WINDOW, Console(stderr=True)).held_out()
        start = _start(served, model, stored, rows, kind)
        held_out = HeldOut(start.target, rows, FINAL_ROWS, start.vocabulary, num_draft_tokens, kind.guess)
        if not held_out:
            raise ConfigError(f"{data} has no held-out answers. Give more data, or leave --data out.")
        return measure(start, held_out, num_draft_tokens)


def kind_of(config: HeadConfig, place: str) -> HeadKind[Any]:
    """The kind of a stored head. Raises UnsupportedModelError where such heads are not measured."""
    if isinstance(config, EagleConfig):
        return EagleKind(EagleTraining())
    if isinstance(config, BlockConfig):
        return BlockKind(BlockTraining())
    if isinstance(config, MedusaConfig):
        return MedusaKind(MedusaTraining())
    raise UnsupportedModelError(f"{place} holds a head of the kind {config.kind}, which is not measured here.")


def _start(
    served: LanguageModel, model: Any, stored: StoredHead[HeadConfig], rows: PackedRows, kind: HeadKind[Any]
) -> Start:
    """The head as if a run had just ended."""
    vocabulary, head = stored.token_ids, kind.module(stored.config)
    head.load_state_dict(dict(stored.tensors))
    target = Target.of(served, model, stored.config.layers, vocabulary)
    return Start(served, target, rows, head.to(served.device), vocabulary, 0.0, kind)


def _continuations(model: Any, tokenizer: Any, new_tokens: int) -> Iterator[Document]:
    """Of the bundled prompts, at temperature 0."""
    prompts = [encode_text(tokenizer, case.prompt, special=True) for case in workloads.load("code")]
    for batch in batches_of_one_length(prompts):
        for tokens in write_on(model, batch.to(model.device), new_tokens, 0.0, 0).tolist():
            first = len(tokens) - new_tokens
            yield Document(tokens, [place >= first for place in range(len(tokens))])
