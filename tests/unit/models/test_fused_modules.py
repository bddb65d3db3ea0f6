"""The Llama family's parameters without Transformers' modelling code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

from families import tiny_model
from forerun.kernels.cpu import native_for
from forerun.models import load_model
from forerun.models.families.table import frequencies, spec_of
from forerun.models.loading import load
from forerun.models.loading.fused_modules import FusedModules
from gguf_files import write_gguf
from published import publish

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)),
    "biases": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SIZES)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES)),
    "lfm3": lambda: tiny_model("lfm3"),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES, head_dim=16, attention_bias=True)),
}
ROTATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": SCALED,
    "longrope": {**SCALED, "short_factor": [1.5] * 4, "long_factor": [1.5] * 4},
}


@pytest.mark.parametrize("name", MODELS)
def test_they_have_transformers_names_and_shapes(name: str) -> None:
    theirs = MODELS[name]()
    ours = FusedModules(theirs.config, spec_of(theirs.config), torch.bfloat16)
    shapes = {key: tensor.shape for key, tensor in theirs.named_parameters()}
    assert {key: tensor.shape for key, tensor in ours.named_parameters()} == shapes
    assert all(each.is_meta and each.dtype == torch.bfloat16 for each in ours.parameters())


@pytest.mark.parametrize("kind", ROTATIONS)
def test_the_rotation_is_transformers(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 5000.0, **ROTATIONS[kind]}
    config = tf.LlamaConfig(**SIZES, max_position_embeddings=256, rope_parameters=rope)
    theirs: Any = tf.LlamaModel(config).rotary_emb
    ((found, scaling),) = frequencies(config, spec_of(config))
    assert torch.equal(found, theirs.inv_freq) and scaling == theirs.attention_scaling


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_read_to_the_same_bits(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(tmp_path)

    def tensors() -> dict[str, torch.Tensor]:
        return dict(load_model(tmp_path, dtype).decoder.named_tensors())  # type: ignore[attr-defined]

    if native_for(torch.device("cpu")) is None:
        pytest.skip("no native kernels")
    read = load.read_model
    monkeypatch.setattr(load, "read_model", None)
    ours = tensors()
    monkeypatch.setattr(load, "read_fused", lambda *_: None)  # Transformers reads it
    monkeypatch.setattr(load, "read_model", read)
    theirs = tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_what_the_self_test_has_tried_is_told(tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", MODELS["llama"](), "Q8_0")
    model = load_model(tmp_path / "it.gguf")
    count = 3 if native_for(torch.device("cpu")) is None else 2
    assert re.fullmatch(rf"{count} of 3 layers and 32 of 32 outputs, \d+ rows in \d\.\d\d s", model.exactness.tried)


def test_a_window_in_the_last_layer_is_tried_too(tmp_path: Path) -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    config = tf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, layer_types=kinds)
    tf.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    assert load_model(tmp_path).exactness.tried.startswith("3 of 3 layers and 32 of 32 outputs, ")


@pytest.mark.skipif(native_for(torch.device("cpu")) is None, reason="without native kernels, more is imported")
def test_generate_imports_no_modelling_code_and_opens_the_file_once(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()  # models beside a target are looked at: one may draft for it
    write_gguf(tmp_path / "alone" / "it.gguf", MODELS["llama"](), "Q8_0")
    MODELS["llama"]().save_pretrained(tmp_path / "folder")
    publish("LLaVA", tmp_path / "container")
    code = """
import sys
from forerun.cli.main import app
opened = []
sys.addaudithook(lambda event, values: event == "open" and values[1] and opened.append(str(values[0])))
for path in sys.argv[1:]:
    app(["generate", "1 2 3", "--model", path, "--dtype", "float32", "--max-tokens", "1"], standalone_mode=False)
    print()
    print([name for name in sys.modules if name.startswith("transformers.") and "modeling_" in name
           and name != "transformers.modeling_rope_utils"])
    print([name for name in ("torch._dynamo", "transformers.activations", "transformers.models")
           if name in sys.modules])
    print(opened.count(path))
"""
    command = [sys.executable, "-c", code, *(str(tmp_path / each) for each in ("alone/it.gguf", "folder", "container"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert lines[1:4] == ["[]", "[]", "1"], "of the file: models, others, times that its header is read"
    # what Transformers' configuration classes import by themselves: a table of names, and no model
    assert "transformers.modeling_utils" not in lines[5] and "modeling_llama" not in lines[5]
    assert lines[9] == lines[5] and "conversion_mapping" not in lines[9], "of a container"
