"""Models as GGUF files: the same numbers, the target's tokenizer metadata as it is, and what is refused.

That llama.cpp serves them was tried by hand: docs/scaling.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as tf

from families import tiny_model
from forerun.errors import ConfigError, IncompatibleDrafterError, UnsupportedModelError
from forerun.export.gguf import export_llama_cpp
from forerun.models import load_tokenizer, load_transformers_model
from forerun.models.loading.gguf.file import GgufFile
from forerun.models.loading.gguf.tokenizer import read_tokenizer
from gguf_files import write_gguf
from gguf_metadata import byte_level

IDS = torch.tensor([[3, 14, 15, 92, 65]])
METADATA = byte_level("llama-bpe", add_bos_token=True) | {
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.chat_templates": ["tool_use"],
    "tokenizer.chat_template.tool_use": "{{ tools }}",
}
NUM_TOKENS = len(METADATA["tokenizer.ggml.tokens"])
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
ROPE["original_max_position_embeddings"] = 8192


def llama(**changes: Any) -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4}
    common = {"num_key_value_heads": 2, "vocab_size": NUM_TOKENS, "max_position_embeddings": 512, "eos_token_id": 0}
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**shape, **common, **changes}))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "draft"
    llama().save_pretrained(folder)
    read_tokenizer(METADATA, "m.gguf").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    keys: dict[str, Any] = {**METADATA, "tokenizer.ggml.scores": [0.5] * NUM_TOKENS, "split.count": None}
    write_gguf(path, llama(num_hidden_layers=1), keys=keys)
    return path


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0"])
def test_a_draft_with_its_targets_tokenizer(type_name: str, draft: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft.gguf"
    exported = export_llama_cpp(draft, out, target, type_name=type_name, num_draft_tokens=5)
    assert exported.command == (f"llama-server -m {target} -md {out} --spec-type draft-simple --spec-draft-n-max 5")
    ours, theirs = GgufFile.open(out), GgufFile.open(target)
    copied = {key for key in theirs.metadata if key.startswith("tokenizer.")}
    assert len(copied) > 7
    for key in copied:
        assert (ours.metadata[key], ours.kinds[key]) == (theirs.metadata[key], theirs.kinds[key])
    types = {tensor.type_name for tensor in ours.tensors.values() if len(tensor.shape) == 2}
    assert types == ({"Q8_0", "F16"} if type_name == "Q8_0" else {type_name})  # 72 is no multiple of 32
    read, written = load_transformers_model(out, "float32"), load_transformers_model(draft, "float32")
    difference = (read(IDS).logits - written(IDS).logits).abs().max()
    assert difference == 0 if type_name == "F32" else 0 < difference < 0.02
    reader = gguf.GGUFReader(out)  # what llama.cpp's own package makes of it
    assert reader.fields["general.file_type"].contents() == {"F32": 0, "F16": 1, "Q8_0": 7}[type_name]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_families(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "model")
    read_tokenizer(METADATA, "m.gguf").save_pretrained(tmp_path / "model")
    export_llama_cpp(tmp_path / "model", tmp_path / "out.gguf", type_name="F32")
    assert torch.equal(load_transformers_model(tmp_path / "out.gguf", "float32")(IDS).logits, model(IDS).logits)


def test_scaled_rotation_and_untied_output(draft: Path, tmp_path: Path) -> None:
    model = llama(rope_parameters=ROPE, max_position_embeddings=65536, tie_word_embeddings=True, attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.normal_()
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(draft).save_pretrained(tmp_path / "model")
    export_llama_cpp(tmp_path / "model", tmp_path / "out.gguf", type_name="F32")
    read = load_transformers_model(tmp_path / "out.gguf", "float32")
    torch.testing.assert_close(read(IDS).logits, model(IDS).logits)
    assert read.config.rope_parameters["rope_type"] == "llama3" and read.config.tie_word_embeddings


def test_a_target_with_its_own_tokenizer(draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "target.gguf"
    assert export_llama_cpp(draft, out).command == f"llama-server -m {out}"
    ours, text = load_tokenizer(draft), "hello wo 123'S<tool></s>\n  é 日"
    theirs = load_tokenizer(out)
    assert theirs(text)["input_ids"] == ours(text)["input_ids"]
    assert theirs.chat_template == ours.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert theirs.eos_token_id == ours.eos_token_id == 0
    assert GgufFile.open(out).metadata["tokenizer.ggml.pre"] == "llama-bpe"
    assert "-md" in export_llama_cpp(draft, tmp_path / "draft.gguf", out).command  # and it drafts for itself


def test_a_rule_that_llama_cpp_has_not(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"a rule that llama.cpp does not have.*the key pre"):
        export_llama_cpp("bundled-draft", tmp_path / "out.gguf")
    export_llama_cpp("bundled-draft", tmp_path / "out.gguf", pre="gpt-2")
    ids = load_tokenizer("bundled").get_vocab()
    assert load_tokenizer(tmp_path / "out.gguf").get_vocab() == ids


def test_padding_rows_are_left_out(draft: Path, target: Path, tmp_path: Path) -> None:
    model = llama(vocab_size=NUM_TOKENS + 9)
    model.save_pretrained(tmp_path / "wide")
    load_tokenizer(draft).save_pretrained(tmp_path / "wide")
    export_llama_cpp(tmp_path / "wide", tmp_path / "out.gguf", target, type_name="F32")
    logits = load_transformers_model(tmp_path / "out.gguf", "float32")(IDS).logits
    assert torch.equal(logits, model(IDS).logits[..., :NUM_TOKENS])


def test_drafts_that_cannot_draft(draft: Path, target: Path, tmp_path: Path) -> None:
    def refused(error: type[Exception], reason: str, model: Path, *target: Path, **options: Any) -> None:
        with pytest.raises(error, match=reason):
            export_llama_cpp(model, tmp_path / "out.gguf", *target, **options)
        assert not (tmp_path / "out.gguf").exists()

    reduced = tmp_path / "reduced"
    llama().save_pretrained(reduced)
    load_tokenizer(draft).save_pretrained(reduced)
    config = json.loads((reduced / "config.json").read_text())
    (reduced / "config.json").write_text(json.dumps({**config, "output_token_ids": [1, 2, 3]}))
    refused(IncompatibleDrafterError, "proposes 3 of 271 tokens .*llama.cpp computes all", reduced, target)
    refused(UnsupportedModelError, "a part of its vocabulary", reduced)
    bare = tmp_path / "bare.gguf"
    write_gguf(bare, llama(num_hidden_layers=1))
    refused(UnsupportedModelError, "no tokenizer in its metadata", draft, bare)
    refused(ConfigError, "which is no GGUF file", draft, draft)
    other = tmp_path / "other.gguf"
    tokens = list(METADATA["tokenizer.ggml.tokens"])
    keys = {**METADATA, "tokenizer.ggml.tokens": [*tokens[:-3], "x!", "y!", "z!"]}
    write_gguf(other, llama(num_hidden_layers=1), keys=keys)
    refused(IncompatibleDrafterError, "cannot draft for", draft, other)
    small = tmp_path / "small"
    llama(vocab_size=NUM_TOKENS - 2).save_pretrained(small)
    load_tokenizer(draft).save_pretrained(small)
    refused(IncompatibleDrafterError, "269 rows of logits, and .* lists 271 tokens", small, target)
    gemma = tiny_model("gemma2")
    gemma.save_pretrained(tmp_path / "gemma")
    load_tokenizer(draft).save_pretrained(tmp_path / "gemma")
    refused(UnsupportedModelError, "gemma2.*convert_hf_to_gguf.py", tmp_path / "gemma")


def test_bad_options(draft: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    for options, reason in (
        ({"type_name": "Q4_0"}, "one of F16, Q8_0, F32"),
        ({"pre": "gpt-2"}, "pre is given with a target"),
        ({"pre": "gpt-3", "target": None}, "must be one of"),
        ({"out": tmp_path / "out.bin"}, "must end with .gguf"),
        ({"out": tmp_path / "no" / "x.gguf", "file": True}, "is not a folder"),
    ):
        if options.pop("file", False):  # type: ignore[attr-defined]
            (tmp_path / "no").write_text("")
        with pytest.raises(ConfigError, match=reason):
            export_llama_cpp(draft, **{"out": out, "target": target, **options})  # type: ignore[arg-type]
    out.write_text("here")
    with pytest.raises(ConfigError, match="exists"):
        export_llama_cpp(draft, out, target)
    export_llama_cpp(draft, out, target, force=True)
    assert GgufFile.open(out).tensors
