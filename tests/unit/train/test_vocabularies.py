"""Training takes the vocabulary from the target or the tokenizer it is given, beyond 65,536 tokens too."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from forerun.errors import ConfigError
from forerun.models import load_model
from forerun.train import card as folder, commands
from forerun.train.accelerator import end_of_text, id_type
from forerun.train.corpus import SourceFile
from forerun.train.data.packed import PackedDocument, pack
from forerun.train.defaults import DraftTraining, Pruning
from forerun.train.draft.samples import Labels, output_tokens_of
from forerun.train.evaluate import write_on
from forerun.utils.vocabulary import fingerprint
from tools import lm, toys
from tools.lm import Architecture
from tools.text import EpochTexts, TwoStageStream, tokenize

LARGE = 70_000
NARROW = Architecture(
    hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, intermediate_size=16, context=256
)


def large_tokenizer() -> PreTrainedTokenizerFast:
    """Words of letters and digits as ids; "def" and what is unknown are beyond 16 bits."""
    names = {"</s>": 0, "return": 1, "value": 2, "def": 69_000, "<unk>": LARGE - 1}
    vocabulary = names | {f"w{index}": index for index in range(LARGE) if index not in names.values()}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "Console", lambda: Console(quiet=True))
    monkeypatch.setattr(toys, "Console", lambda: Console(quiet=True))


def first_loss(metrics: Path) -> float:
    return json.loads(metrics.read_text().splitlines()[0])["loss"]


def test_ids_are_stored_in_the_type_that_holds_them() -> None:
    assert [id_type(size) for size in (1, 65_536, 65_537)] == [np.uint16, np.uint16, np.uint32]
    tokens = tokenize(["def value", "other"], large_tokenizer())
    assert tokens.dtype == np.uint32 and tokens.tolist() == [69_000, 2, 0, LARGE - 1, 0]


def test_streams_and_texts_keep_large_ids(files: list[SourceFile]) -> None:
    stream = TwoStageStream(EpochTexts.make(files, 0, 0.0, 0.0), large_tokenizer(), (8, 8), 0.0, 64)
    assert stream.batch(0, 4).max() == LARGE - 1
    model = lm.build_model(replace(NARROW, vocab_size=LARGE), 0, 0)
    with torch.no_grad():
        model.model.embed_tokens.weight[: 1 << 16] = 0.0
    prompts = torch.tensor([[69_000, 69_001]])
    assert write_on(model, prompts, 3, 0.0, 0)[0, -3:].min() >= 1 << 16


@pytest.mark.slow
def test_a_draft_takes_its_targets_vocabulary(tmp_path: Path) -> None:
    sizes = replace(NARROW, vocab_size=LARGE, num_layers=8, intermediate_size=40_000)
    target = lm.build_model(sizes, 0, 0)
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(50)
    folder.save_model(target, large_tokenizer(), tmp_path / "target")
    made_from = {"tokenizer": fingerprint(large_tokenizer())}
    documents = [PackedDocument([69_000, 2, 0, LARGE - 1] * 4, [True] * 16) for _ in range(6)]
    rows = pack(documents, tmp_path / "rows", window=16, vocab_size=LARGE, made_from=made_from)
    options = DraftTraining(top=4, tokens=128, tokens_per_step=64, threads=1, pruning=Pruning(layers="1"))
    out, work = tmp_path / "draft", tmp_path / "work"
    commands.train_draft(out, work, str(tmp_path / "target"), rows.folder, options, "the command")
    draft, tokenizer = folder.load_model_and_tokenizer(out)
    assert draft.config.vocab_size == LARGE == len(tokenizer)
    proposed = output_tokens_of(draft)
    assert proposed is not None and len(proposed) == 16_384 and {0, 2, 69_000, LARGE - 1} <= set(proposed.tolist())
    labels = Labels(load_model(tmp_path / "target"), rows, work / "samples", 4, proposed)
    shard = labels.read(0)
    assert shard.tokens.dtype == np.uint32 and shard.probs.ids.dtype == np.uint16


def test_a_language_model_takes_the_vocabulary_of_the_tokenizer_it_is_given(
    source_folder: Path, tmp_path: Path
) -> None:
    large_tokenizer().save_pretrained(tmp_path / "tokenizer")
    sizes = "--hidden-size 8 --num-layers 1 --num-heads 1 --num-kv-heads 1 --head-dim 8 --intermediate-size 16"
    run = "--tokens 128 --tokens-per-step 128 --short-window 16 --long-share 0 --threads 1"
    places = ["--data", str(source_folder), "--tokenizer", str(tmp_path / "tokenizer")]
    done = CliRunner().invoke(toys.app, ["lm", str(tmp_path / "out"), *sizes.split(), *run.split(), *places])
    assert done.exit_code == 0, done.output
    assert folder.load_model_and_tokenizer(tmp_path / "out")[0].config.vocab_size == LARGE
    assert abs(first_loss(tmp_path / "out.run" / "metrics.jsonl") - math.log(LARGE)) < 0.5


def test_a_tokenizer_without_an_end_of_text_is_refused() -> None:
    tokenizer = large_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has no end-of-text token"):
        end_of_text(tokenizer)
