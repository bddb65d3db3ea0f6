from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from forerun import workloads
from forerun.errors import ConfigError, ModelLoadError
from forerun.train import card, commands, folder
from forerun.train.commands import train_draft, train_lm, train_other_vocab
from forerun.train.corpus import SourceFile
from forerun.train.defaults import Architecture, DraftTraining, OtherVocabTraining
from forerun.train.draft.starts import check_size, inherit_embeddings
from forerun.train.lm import build_model
from forerun.train.other_vocab import sample_documents

from .conftest import SHORT_RUN

SMALL_DRAFT = Architecture(
    vocab_size=320,
    hidden_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=16,
    context=256,
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "Console", lambda: Console(quiet=True))
    few = workloads.load("code", 2)
    monkeypatch.setattr(workloads, "load", lambda _: few)


def test_a_pair_is_trained_from_files_to_folders_with_cards(source_folder: Path, tmp_path: Path) -> None:
    wide = replace(SHORT_RUN.architecture, hidden_size=128, num_layers=3, num_heads=4, intermediate_size=192)
    target, draft = tmp_path / "target", tmp_path / "draft"
    train_lm(target, tmp_path / "a", source_folder, replace(SHORT_RUN, architecture=wide), resume=False)
    options = DraftTraining(
        text=replace(SHORT_RUN, architecture=SMALL_DRAFT),
        sample_tokens=256,
        text_law_tokens=256,
        text_window=16,
        text_batch=4,
        sample_batch=8,
        prompt_lengths=(8, 16),
        new_tokens=16,
        top=8,
        tokens=1_024,
        tokens_per_step=128,
        threads=1,
    )
    train_draft(draft, tmp_path / "b", target, source_folder, options, resume=False)

    for path, parts in ((target, {"text"}), (draft, {"text", "distillation"})):
        model, tokenizer = folder.load(path)
        record = json.loads((path / "training.json").read_text())
        text = (path / "README.md").read_text()
        assert set(record["stages"]) == parts
        assert record["data"]["licence"] == "that of the files" and record["parameters"] == model.num_parameters()
        assert record["data"]["held_out_files"] > 0 and record["held_out"]["bits_per_byte"] > 0
        assert f"{record['held_out']['bits_per_byte']:.4f}" in text
        for word in ("licence", "forerun train", "Seed: 0", "torch", "perplexity", "held out if sha256"):
            assert word in text
        assert str(tmp_path) not in text + json.dumps(record)
        assert not list(path.glob("*.bin")) and (path / "model.safetensors").exists()
        assert len(tokenizer) <= 320
    rates = folder.read_record(draft)["acceptance"]
    assert [row["temperature"] for row in rates] == [0.0, 1.0]
    assert all(0 <= row["rate"] <= 1 and row["num_draft_tokens"] == 4 for row in rates)
    assert "acceptance rate" in (draft / "README.md").read_text()


def test_a_draft_with_its_own_vocabulary_learns_from_samples(
    source_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = replace(SHORT_RUN.architecture, hidden_size=128, num_layers=3, num_heads=4, intermediate_size=192)
    train_lm(tmp_path / "target", tmp_path / "a", source_folder, replace(SHORT_RUN, architecture=wide), resume=False)
    sampling = DraftTraining(
        sample_tokens=256, text_law_tokens=0, sample_batch=8, prompt_lengths=(40,), new_tokens=16, own_prompt_share=0.5
    )
    text = replace(SHORT_RUN, architecture=replace(SMALL_DRAFT, vocab_size=280))
    options = OtherVocabTraining(text=text, read_tokens=400, sampling=sampling)
    seen: list[str] = []
    original = commands.lm.train

    def spy(files: list[SourceFile], *args, **kwargs):
        seen.extend(file.name for file in files)
        return original(files, *args, **kwargs)

    monkeypatch.setattr(commands.lm, "train", spy)
    out = tmp_path / "other"
    train_other_vocab(out, tmp_path / "b", tmp_path / "target", source_folder, options, resume=False)
    _, tokenizer = folder.load(out)
    record = folder.read_record(out)
    assert len(tokenizer) == 280 and any(name.startswith("samples/") for name in seen)
    assert set(record["on_target"]) == {f"{m}_at_temperature_{t}" for m in ("draft", "target") for t in (0, 1)}
    assert all(value > 0 for value in record["on_target"].values())
    assert "target's continuations" in (out / "README.md").read_text()
    assert "--own-prompt-share 0.5" in record["command"]
    with pytest.raises(ConfigError, match="no samples"):
        sample_documents(tmp_path / "empty", tokenizer, 10)


def test_a_draft_larger_than_a_tenth_is_refused() -> None:
    check_size(100, 1_000)
    with pytest.raises(ConfigError, match="tenth"):
        check_size(101, 1_000)


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"does not exist"):
        folder.load(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        folder.load(tmp_path)


def test_the_standard_library_comes_with_its_licence(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [SourceFile(name, "pass\n") for name in ("os.py", "traceback.py")]
    monkeypatch.setattr(commands, "read_python_files", lambda root: files)
    record = commands.read_corpus(None).record()
    assert record["licence"] == "PSF-2.0" and (record["training_files"], record["held_out_files"]) == (1, 1)
    monkeypatch.setattr(commands, "read_python_files", lambda root: files[:1])
    with pytest.raises(ConfigError, match="0 to hold out"):
        commands.read_corpus(None)


def test_the_commands_are_there() -> None:
    from forerun.cli.make import app as make
    from forerun.cli.train import app as train

    runner = CliRunner()
    for app, names in ((train, ("lm", "draft", "eval")), (make, ("padded",))):
        text = runner.invoke(app, ["--help"]).output
        assert all(name in text for name in names)
    assert card.versions().keys() >= {"python", "torch", "transformers", "tokenizers"}


def test_a_draft_inherits_its_targets_embeddings() -> None:
    target = build_model(SHORT_RUN.architecture, 0, 0)
    same = build_model(SHORT_RUN.architecture, 0, 1)
    inherit_embeddings(same, target)
    wanted, got = (model.model.embed_tokens.weight for model in (target, same))
    assert torch.allclose(got @ got.T / got.norm() ** 2, wanted @ wanted.T / wanted.norm() ** 2, atol=1e-6)
    narrow = build_model(SMALL_DRAFT, 0, 1)
    inherit_embeddings(narrow, target)
    assert narrow.model.embed_tokens.weight.std().item() == pytest.approx(0.02)
    before = target.model.embed_tokens.weight.clone()
    inherit_embeddings(target, narrow)
    assert torch.equal(target.model.embed_tokens.weight, before)
