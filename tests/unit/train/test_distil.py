"""Distillation: what its loss counts, where a draft starts, and what a killed run is resumed to."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.models import Rows, load_draft_model
from forerun.train import accelerator, card as folder, commands
from forerun.train.corpus import SourceFile
from forerun.train.data.packed import PackedDocument, PackedShard, pack
from forerun.train.defaults import LOSSES, DraftTraining, LossName, Pruning
from forerun.train.draft import distil as distil_loss
from forerun.train.draft.distil import DistillationLoss
from forerun.train.draft.samples import Shard, frequent_tokens, mask_unproposed, output_tokens_of, restrict, write_shard
from forerun.train.evaluate import TopProbs, top_probs_of
from forerun.train.loop import Loop
from forerun.utils.vocabulary import fingerprint
from tools.lm import Architecture, build_model, train_tokenizer

TARGET = Architecture(
    vocab_size=320, hidden_size=32, num_layers=8, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
OPTIONS = DraftTraining(
    window=64,
    text_batch=4,
    top=8,
    tokens=8 * 64,
    tokens_per_step=64,
    threads=1,
    loss="hybrid",
    output_tokens=48,
    pruning=Pruning(layers="0,4", width=24),
)

COMMAND = "forerun train draft OUT"


def drawn(seed: int = 0, sizes: Architecture = TARGET) -> LlamaForCausalLM:
    model = build_model(sizes, 0, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "Console", lambda: Console(quiet=True))


@pytest.fixture
def tokenizer(files: list[SourceFile]) -> PreTrainedTokenizerBase:
    return train_tokenizer((file.text for file in files), TARGET.vocab_size)


@pytest.fixture
def target(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    folder.save_model(drawn(), tokenizer, tmp_path / "target")
    return tmp_path / "target"


def rows_of(lengths: list[int], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, documents and wanted, [2, width]: documents of these lengths, of which a random part is wanted."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, TARGET.vocab_size, (2, width), generator=generator)
    documents = torch.full((2, width), -1, dtype=torch.int32)
    documents[:, : sum(lengths)] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    wanted = (torch.rand(2, width, generator=generator) < 0.6) & (documents >= 0)
    wanted[:, 1:] &= documents[:, 1:] == documents[:, :-1]
    wanted[:, 0] = False
    return tokens, documents, wanted


@pytest.mark.parametrize("window", [23, 600])
def test_packed_documents_are_computed_as_if_each_were_alone(window: int) -> None:
    target, lengths = drawn(), [9, 2, 7]
    tokens, documents, _ = rows_of(lengths, window + 1)
    probs = top_probs_of(target, tokens, 8, documents)
    start = 0
    for length in lengths:
        alone = top_probs_of(target, tokens[:, start : start + length], 8)
        part = slice(start, start + length - 1)
        np.testing.assert_allclose(probs.probabilities[:, part], alone.probabilities, atol=2e-3)
        assert (probs.ids[:, part, 0] == alone.ids[..., 0]).mean() > 0.9
        start += length


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_packed_rows_is_that_of_their_wanted_tokens(name: LossName) -> None:
    """Beside a slow loop over documents, of a draft that proposes half of the tokens."""
    target, draft = drawn(), drawn(1)
    lengths = [9, 2, 7]
    tokens, documents, wanted = rows_of(lengths, 21)
    probs = top_probs_of(target, tokens, 8, documents)
    ids, values = torch.from_numpy(probs.ids.astype(np.int64)), torch.from_numpy(probs.probabilities).float()
    proposed = torch.arange(0, TARGET.vocab_size, 2)
    with torch.autocast("cpu", enabled=False):
        losses = DistillationLoss.of(name, proposed, TARGET.vocab_size)
        rows = (tokens.int(), ids.int(), values.half(), documents, wanted, torch.arange(2))
        found = losses.mean(draft, rows, 0.3)
    logits, at_ids, at_values = [], [], []
    for row in range(2):
        start = 0
        for length in lengths:
            alone = draft(tokens[None, row, start : start + length - 1]).logits[0]
            for place in range(length - 1):
                if wanted[row, start + place + 1]:
                    logits.append(alone[place, proposed])
                    kept = ids[row, start + place] % 2 == 0
                    at_ids.append((ids[row, start + place] // 2).where(kept, -1))
                    at_values.append(values[row, start + place])
            start += length
    by_hand = distil_loss.distillation_loss(
        torch.stack(logits), torch.stack(at_ids), torch.stack(at_values), name, variation_share=0.3
    )
    assert len(logits) == int(wanted.sum()) > 10
    assert float(found.detach()) == pytest.approx(float(by_hand.detach()), rel=0.02)  # products in bfloat16


def test_a_loss_in_parts_is_the_whole_one_and_so_are_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    target, generator = drawn(), torch.Generator().manual_seed(2)
    tokens = torch.randint(0, TARGET.vocab_size, (3, 17), generator=generator)
    probs = top_probs_of(target, tokens, 8)
    arrays = (probs.ids.astype(np.int32), probs.probabilities, np.zeros((3, 17), np.int32), np.ones((3, 17), np.bool_))
    rows = (tokens.int(), *map(torch.from_numpy, arrays), torch.arange(3))
    gradients, values = [], []
    for at_once in (1 << 25, 5 * TARGET.vocab_size):
        monkeypatch.setitem(distil_loss.LOGITS_AT_ONCE, "cpu", at_once)
        draft = drawn(1)
        loss = DistillationLoss.of("forward-kl", None, TARGET.vocab_size).mean(draft, rows, 0.0)
        loss.backward()
        values.append(loss.detach())
        gradients.append(draft.model.embed_tokens.weight.grad)
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=0.05)


def test_the_tokens_with_most_probability_are_proposed(tmp_path: Path) -> None:
    ids = np.array([[[5, 2], [5, 9]], [[7, 5], [2, 9]]], np.uint16)
    values = np.array([[[0.5, 0.25], [0.5, 0.125]], [[0.75, 0.125], [0.25, 0.0]]], np.float16)
    write_shard(tmp_path, 0, Shard(np.zeros((2, 3), np.uint16), TopProbs(ids, values), *np.zeros((2, 2, 3), np.int32)))
    assert frequent_tokens(tmp_path, 1, 3, 12, []).tolist() == [2, 5, 7]
    assert frequent_tokens(tmp_path, 1, 3, 12, [11]).tolist() == [5, 7, 11]
    assert frequent_tokens(tmp_path, 1, 6, 12, []).tolist() == [0, 1, 2, 5, 7, 9]
    with pytest.raises(ConfigError, match="output_tokens is 13, but the vocabulary has 12"):
        frequent_tokens(tmp_path, 1, 13, 12, [])


class Killed(Exception):
    pass


def test_a_pruned_draft_is_killed_resumed_saved_and_served(
    target: Path, source_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, draft = tmp_path / "whole", tmp_path / "draft"
    monkeypatch.setattr(accelerator, "is_quick_at_bfloat16", lambda: False)
    commands.train_draft(whole, tmp_path / "a", target, source_folder, OPTIONS, COMMAND)
    original: Callable[..., float | Tensor] = Loop._step

    def dying(self: Loop, batch: object, progress: float) -> float | Tensor:
        if progress >= 0.5:
            raise Killed
        return original(self, batch, progress)

    monkeypatch.setattr(Loop, "_step", dying)
    always = replace(OPTIONS, checkpoint_seconds=0.0)
    with pytest.raises(Killed):
        commands.train_draft(draft, tmp_path / "b", target, source_folder, always, COMMAND)
    monkeypatch.setattr(Loop, "_step", original)
    other = tmp_path / "other"
    folder.save_model(drawn(5), folder.load_model_and_tokenizer(target)[1], other)
    with pytest.raises(ConfigError, match="belongs to a run of another target"):
        commands.train_draft(draft, tmp_path / "b", other, source_folder, OPTIONS, COMMAND, resume=True)
    changed = replace(OPTIONS, loss="forward-kl")
    with pytest.raises(ConfigError, match="loss was hybrid and is forward-kl"):
        commands.train_draft(draft, tmp_path / "b", target, source_folder, changed, COMMAND, resume=True)
    monkeypatch.setattr(accelerator, "is_quick_at_bfloat16", lambda: True)  # a run keeps the type it began with
    changed = replace(OPTIONS, dtype="bfloat16")
    with pytest.raises(ConfigError, match="dtype was float32 and is bfloat16"):
        commands.train_draft(draft, tmp_path / "b", target, source_folder, changed, COMMAND, resume=True)
    commands.train_draft(draft, tmp_path / "b", target, source_folder, OPTIONS, COMMAND, resume=True)
    assert folder.read_record(draft)["options"]["dtype"] == "float32"
    assert (draft / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()

    stored, _ = folder.load_model_and_tokenizer(draft, torch.float32)
    proposed = output_tokens_of(stored)
    assert proposed is not None and len(proposed) == 48 and 0 in proposed  # the end of text is
    assert (stored.config.num_hidden_layers, stored.config.intermediate_size) == (2, 24)
    served = load_draft_model(draft, "float32")
    logits = served.forward([Rows(served.new_cache(), [5, 6, 7])]).logits
    with mask_unproposed(stored), torch.inference_mode():
        wanted = stored(torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert folder.read_record(draft)["command"] == COMMAND
    assert f"Command: `{COMMAND}`" in (draft / "README.md").read_text()


def documents(tokenizer: PreTrainedTokenizerBase, files: list[SourceFile]) -> list[PackedDocument]:
    texts = [tokenizer(file.text)["input_ids"][:40] for file in files]
    return [
        PackedDocument(ids, [place > 4 for place in range(len(ids))], held_out=number % 4 == 3)
        for number, ids in enumerate(texts[:24])
    ]


def test_packed_rows_are_learnt_from(
    target: Path, tokenizer: PreTrainedTokenizerBase, files: list[SourceFile], tmp_path: Path
) -> None:
    made_from = {"tokenizer": fingerprint(tokenizer)}
    rows = pack(documents(tokenizer, files), tmp_path / "rows", window=63, vocab_size=320, made_from=made_from)
    options = replace(OPTIONS, output_tokens=None, pruning=Pruning(layers="4"))
    commands.train_draft(tmp_path / "draft", tmp_path / "a", target, rows.folder, options, COMMAND)
    record = folder.read_record(tmp_path / "draft")
    assert record["data"]["training_files"] == 18 and record["data"]["held_out_files"] == 6
    assert [row["temperature"] for row in record["acceptance"]] == [0.0, 1.0]
    assert all(row["tokens"] > 20 for row in record["acceptance"])
    assert record["held_out"]["tokens"] > 20 and "18 documents" in (tmp_path / "draft" / "README.md").read_text()
    # a trained draft is a start again, and what it proposes stays
    start, _ = folder.load_model_and_tokenizer(tmp_path / "draft", torch.float32)
    restrict(start, torch.tensor([0, 7, 9]))
    folder.save_model(start, tokenizer, tmp_path / "draft")
    again = replace(options, pruning=Pruning())
    commands.train_draft(
        tmp_path / "next", tmp_path / "b", target, rows.folder, again, COMMAND, start=tmp_path / "draft"
    )
    tokens = output_tokens_of(folder.load_model_and_tokenizer(tmp_path / "next")[0])
    assert tokens is not None and tokens.tolist() == [0, 7, 9]


def test_a_draft_in_no_time_is_saved_and_one_without_held_out_rows_is_not_judged(
    target: Path,
    tokenizer: PreTrainedTokenizerBase,
    files: list[SourceFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(file=io.StringIO(), width=500)
    monkeypatch.setattr(commands, "Console", lambda: console)
    kept = [replace(each, held_out=False) for each in documents(tokenizer, files)]
    made_from = {"tokenizer": fingerprint(tokenizer)}
    rows = pack(kept, tmp_path / "rows", window=63, vocab_size=320, made_from=made_from)
    hurried, out = replace(OPTIONS, minutes=1e-6, text_batch=2), tmp_path / "draft"
    commands.train_draft(out, tmp_path / "a", target, rows.folder, hurried, COMMAND)
    record, labels = folder.read_record(out), tmp_path / "a" / "samples"
    assert record["stages"]["distillation"]["steps"] == 1 and len(list(labels.glob("*.tokens.npy"))) == 1
    assert record["acceptance"] == [] and "nothing to judge by" in (out / "README.md").read_text()
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ended by --minutes after step 1 of 8" in printed and "nothing to judge by" in printed
    assert "0.000" not in printed and "bits per byte" not in (out / "README.md").read_text()
    patient = replace(hurried, minutes=None)
    commands.train_draft(out, tmp_path / "a", target, rows.folder, patient, COMMAND, resume=True)
    assert folder.read_record(out)["stages"]["distillation"]["steps"] == 8
    assert len(list(labels.glob("*.tokens.npy"))) == 1  # it learns from the rows that it began with


def test_what_does_not_fit_together_is_refused(
    target: Path, tokenizer: PreTrainedTokenizerBase, files: list[SourceFile], tmp_path: Path
) -> None:
    def run(data: Path = Path(), options: DraftTraining = OPTIONS, start: Path | None = None) -> None:
        commands.train_draft(
            tmp_path / "draft", tmp_path / "run", target, data, options, COMMAND, force=True, start=start
        )

    with pytest.raises(ConfigError, match="--start and --prune-layers are two starts"):
        run(start=target)
    made, made_from = documents(tokenizer, files), {"tokenizer": fingerprint(tokenizer)}
    foreign = pack(made, tmp_path / "foreign", window=63, vocab_size=320, made_from={"tokenizer": "other"})
    with pytest.raises(ConfigError, match="packed with another tokenizer"):
        run(foreign.folder)
    ours = pack(made, tmp_path / "ours", window=63, vocab_size=320, made_from=made_from)
    with pytest.raises(ConfigError, match="A draft starts from trained weights"):
        run(ours.folder, replace(OPTIONS, pruning=Pruning()))
    with pytest.raises(ConfigError, match="more than a quarter of its target's"):
        run(ours.folder, replace(OPTIONS, pruning=Pruning(layers="0,1,2,3,4,5")))
    with pytest.raises(ConfigError, match="the target's layers are 0 to 7"):
        run(ours.folder, replace(OPTIONS, pruning=Pruning(layers="0,9")))
    with pytest.raises(ConfigError, match="loss is 'luck', but must be one of"):
        replace(OPTIONS, loss="luck")
    assert PackedShard(ours.folder).num_documents == 18
