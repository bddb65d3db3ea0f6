from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from forerun.errors import ConfigError, ModelLoadError
from forerun.train import card, card as folder
from forerun.train.corpus import SourceFile
from tools import toys
from tools.lm import Architecture, build_model, inherit_embeddings

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


SMALL = [
    "--hidden-size",
    "16",
    "--num-layers",
    "1",
    "--num-heads",
    "1",
    "--num-kv-heads",
    "1",
    "--head-dim",
    "16",
    "--intermediate-size",
    "16",
]
RUN = ["--tokens", "1024", "--tokens-per-step", "128", "--short-window", "16", "--long-share", "0", "--threads", "1"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PROMPT", 16), ("WRITTEN", 16), ("TOGETHER", 8)):
        monkeypatch.setattr(toys, name, value)


def made(command: str, out: Path, *flags: str) -> None:
    done = CliRunner().invoke(toys.app, [command, str(out), *RUN, *flags])
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def target(source_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "target"
    wide = [
        "--vocab-size",
        "320",
        "--hidden-size",
        "128",
        "--num-layers",
        "3",
        "--num-heads",
        "4",
        "--num-kv-heads",
        "1",
        "--head-dim",
        "16",
    ]
    made("lm", folder, *wide, "--data", str(source_folder))
    return folder


@pytest.mark.slow
def test_a_pair_is_trained_from_files_to_folders_with_cards(target: Path, source_folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    samples = ("--sample-tokens", "1024", "--distil-tokens", "16384")
    made("draft", draft, "--target", str(target), "--data", str(source_folder), *SMALL, *samples)
    for path, parts in ((target, {"text"}), (draft, {"distillation"})):
        model, tokenizer = folder.load_model_and_tokenizer(path)
        record = json.loads((path / "training.json").read_text())
        text = (path / "README.md").read_text()
        assert set(record["stages"]) == parts
        assert record["parameters"] == model.num_parameters()
        assert record["data"]["held_out_files"] > 0 and record["held_out"]["bits_per_byte"] > 0
        assert f"{record['held_out']['bits_per_byte']:.4f}" in text
        for word in ("licence", "tools.toys", "Seed: 0", "torch", "perplexity"):
            assert word in text
        assert str(path.parent) not in text + json.dumps(record)
        assert not list(path.glob("*.bin")) and (path / "model.safetensors").exists()
        assert len(tokenizer) <= 320
    rates = folder.read_record(draft)["acceptance"]
    assert [row["temperature"] for row in rates] == [0.0, 1.0]
    assert all(0 <= row["rate"] <= 1 and row["num_draft_tokens"] == 4 for row in rates)
    assert "acceptance rate" in (draft / "README.md").read_text()


def test_a_draft_with_its_own_vocabulary_learns_from_samples(
    target: Path, source_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    original = toys.lm.train

    def spy(files: list[SourceFile], *args, **kwargs):
        seen.extend(file.name for file in files)
        return original(files, *args, **kwargs)

    monkeypatch.setattr(toys.lm, "train", spy)
    own = ("--vocab-size", "280", "--sample-tokens", "256", "--target", str(target), "--data", str(source_folder))
    made("other-vocab", tmp_path / "other", *SMALL, *own)
    _, tokenizer = folder.load_model_and_tokenizer(tmp_path / "other")
    assert len(tokenizer) == 280 and any(name.startswith("samples/") for name in seen)
    assert folder.read_record(tmp_path / "other")["kind"] == "draft with a vocabulary of its own"


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"does not exist"):
        folder.load_model_and_tokenizer(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        folder.load_model_and_tokenizer(tmp_path)


def test_files_for_both_sides_are_needed(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("value = 1\n" * 20)
    with pytest.raises(ConfigError, match="0 to hold out"):
        toys.read_corpus(tmp_path)


def test_the_commands_are_there() -> None:
    text = CliRunner().invoke(toys.app, ["--help"]).output
    assert all(name in text for name in ("lm", "draft", "other-vocab", "padded", "in-memory", "workloads"))
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
