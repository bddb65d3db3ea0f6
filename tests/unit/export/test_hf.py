"""Models as Transformers folders: the same logits, ids and end tokens, whole files or none, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from families import make_family
from forerun import LLM, SamplingParams
from forerun.errors import ConfigError, ModelLoadError
from forerun.export import files, transformers as hf
from forerun.export.transformers import export_hf
from forerun.models import load_tokenizer
from forerun.models.loading.gguf.tokenizer import read_tokenizer
from gguf_metadata import byte_level, smollm2

IDS = torch.tensor([[3, 14, 15, 92, 65]])
TEMPLATE = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with end tokens, and a tokenizer made from a GGUF file's metadata."""
    folder = make_family("llama", tmp_path_factory.mktemp("source"))
    settings = {"eos_token_id": [0, 7], "do_sample": True, "temperature": 0.7, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    metadata = byte_level("llama-bpe") | {"tokenizer.chat_template": TEMPLATE}
    read_tokenizer(metadata, "m.gguf").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "new" / "model"
    assert export_hf(source, out).dtype == "float32"
    return out


def test_transformers_computes_the_same_logits(source: Path, exported: Path) -> None:
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, exported))
    assert theirs.dtype == torch.float32 and torch.equal(ours(IDS).logits, theirs(IDS).logits)
    said = theirs.generation_config
    assert (said.eos_token_id, said.bos_token_id, said.do_sample) == ([0, 7], 1, True)
    assert (said.temperature, said.top_k, said.top_p) == (0.7, 20, None)
    assert len({path.stat().st_mode for path in exported.iterdir()}) == 1  # whoever may read one may read all


def test_transformers_reads_the_same_tokenizer(source: Path, exported: Path) -> None:
    ours, theirs = load_tokenizer(source), AutoTokenizer.from_pretrained(exported)
    text = "hello wo 123'S<tool></s>\n  é 日"
    assert theirs(text)["input_ids"] == ours(text)["input_ids"] and ours(text)["input_ids"][0] == 1
    assert (theirs.eos_token, theirs.bos_token, theirs.chat_template) == ("</s>", "<s>", TEMPLATE)
    settings = json.loads((exported / "tokenizer_config.json").read_text())
    # for programs that know no chat_template.jinja, and no class of Transformers 5
    assert (settings["chat_template"], settings["tokenizer_class"]) == (TEMPLATE, "PreTrainedTokenizerFast")
    assert not (exported / "chat_template.jinja").exists()


def test_smollm2s_tokenizer_survives(exported: Path, tmp_path: Path) -> None:
    ours = read_tokenizer(smollm2(), "m.gguf")
    files.save_tokenizer(ours, tmp_path, 8192)
    (tmp_path / "config.json").write_bytes((exported / "config.json").read_bytes())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "It's 2024: naïve 日本 🎉\t<|im_start|>user\n  x<|im_end|>"
    assert theirs(text)["input_ids"] == ours(text)["input_ids"]
    assert (len(theirs), theirs.eos_token, theirs.chat_template) == (49152, "<|im_end|>", ours.chat_template)
    assert theirs.model_max_length == 8192


def test_forerun_gives_the_same_tokens_again(source: Path, exported: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = [
        LLM(folder, drafter=None, dtype="float32").generate(IDS[0].tolist(), params) for folder in (source, exported)
    ]
    assert answers[0].token_ids == answers[1].token_ids


def test_large_weights_become_several_files(source: Path, exported: Path, tmp_path: Path) -> None:
    result = export_hf(source, tmp_path / "out", max_shard_bytes=100_000)
    shards = [name for name in result.files if name.endswith(".safetensors")]
    assert len(shards) > 1 and "model.safetensors.index.json" in result.files
    assert result.nbytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    whole, parts = (AutoModelForCausalLM.from_pretrained(folder) for folder in (exported, tmp_path / "out"))
    assert torch.equal(whole(IDS).logits, parts(IDS).logits)


def test_the_number_format_can_be_chosen(source: Path, tmp_path: Path) -> None:
    assert export_hf(source, tmp_path, "bfloat16").dtype == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_force_replaces_a_model_and_leaves_other_files(source: Path, exported: Path, tmp_path: Path) -> None:
    export_hf(source, tmp_path, max_shard_bytes=100_000)
    (tmp_path / "chat_template.jinja").write_text("another")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"exists.*--force"):
        export_hf(source, tmp_path)
    export_hf(source, tmp_path, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in exported.iterdir()} | {"notes.txt"}


def test_an_empty_folder_that_is_there_and_the_working_directory(
    source: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export_hf(source, Path()).files == tuple(sorted(path.name for path in exported.iterdir()))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in exported.iterdir())


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    result = export_hf(make_family("qwen3", tmp_path), tmp_path / "out")
    assert result.files == ("config.json", "generation_config.json", "model.safetensors")


def test_a_write_that_fails_leaves_what_was_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export_hf(source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "save_tokenizer", fail)
    with pytest.raises(ConfigError, match="No space left"):
        export_hf(source, out, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_bad_input(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError):
        export_hf(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(ConfigError, match="dtype is 'int3'"):
        export_hf(source, tmp_path / "out", "int3")
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"cannot be written: .*file is not a folder"):
            export_hf(source, place, force=True)
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="is read-only"):
        export_hf(source, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(files, "_MARGIN", 1 << 62)
    with pytest.raises(ConfigError, match=r"needs [\d,.]+ GB, and its disk has [\d,.]+ GB left"):
        export_hf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
