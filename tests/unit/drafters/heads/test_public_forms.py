"""Public heads, as other programs write them: read with every part, or refused with the part's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.head_files.folder import HeadHeader, head_header, load_head
from forerun.drafters.models.heads.fingerprint import same_target
from forerun.errors import ModelLoadError, UnsupportedModelError
from head_cases import EAGLE_1, SIZES, random_d2t, random_tensors

NUM_LAYERS = 12
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}
SHAPE = EagleConfig(version=3, draft_vocab_size=40, layers=(2, 6, 9), own_output_rows=True, **SIZES)
BIASED = replace(EAGLE_1, biases=("fc",))
EMBEDDING = torch.randn(96, 32, generator=torch.Generator().manual_seed(5))


def eagle_1(folder: Path) -> dict[str, Tensor]:
    """Write a head like the authors of EAGLE-1: a copy of the embedding, a bias."""
    tensors = random_tensors(BIASED)
    write(folder, {**LLAMA, "bias": True}, {**tensors, "embed_tokens.weight": EMBEDDING})
    return tensors


def eagle_3(folder: Path) -> dict[str, Tensor]:
    """Write a head like the authors of EAGLE-3: in half precision, layers not named, t2d beside d2t."""
    tensors, d2t = random_tensors(SHAPE), random_d2t(SHAPE)
    assert d2t is not None
    t2d = torch.zeros(96, dtype=torch.bool).index_fill(0, torch.arange(40) + d2t, True)
    stored = {name: tensor.half() for name, tensor in tensors.items()} | {"d2t": d2t, "t2d": t2d}
    write(folder, {**LLAMA, "draft_vocab_size": 40}, stored)
    return {name: tensor.half() for name, tensor in tensors.items()}


def speculators(folder: Path) -> dict[str, Tensor]:
    """Write a head like the library speculators: `layers.0`, the target's parts for the loss."""
    tensors, d2t = random_tensors(SHAPE), random_d2t(SHAPE)
    assert d2t is not None
    stored = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    stored |= {"d2t": d2t, "embed_tokens.weight": EMBEDDING, "verifier_norm.weight": torch.ones(32)}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 40,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": [9, 2, 6],
        "transformer_layer_config": {**LLAMA, "layer_types": ["sliding_attention"], "sliding_window": 64},
        "speculators_config": {"algorithm": "eagle3"},
    }
    write(folder, config, stored)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def change(folder: Path, tensors: Callable[[dict[str, Tensor]], object] | None = None, **config: Any) -> None:
    said = json.loads((folder / "config.json").read_text()) | config
    found = load_file(folder / "model.safetensors")
    if tensors is not None:
        tensors(found)
    write(folder, said, found)


def equal(one: Any, two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in two)


def test_eagle_1(tmp_path: Path) -> None:
    tensors = eagle_1(tmp_path)
    head = load_head(tmp_path, NUM_LAYERS)
    assert (head.config, head.form, head.d2t) == (BIASED, "EAGLE-1", None)
    assert head_header(tmp_path, NUM_LAYERS) == HeadHeader(BIASED, torch.float32, is_quantized=False)
    assert equal(head.tensors, tensors)


def test_eagle_3(tmp_path: Path) -> None:
    tensors = eagle_3(tmp_path)
    head = load_head(tmp_path, NUM_LAYERS)
    assert (head.config, head.form, head.fingerprint) == (SHAPE, "EAGLE-3", "")
    assert head_header(tmp_path, NUM_LAYERS) == HeadHeader(SHAPE, torch.float16, is_quantized=False)
    assert equal(head.tensors, tensors)
    assert head.d2t is not None and torch.equal(head.d2t, random_d2t(SHAPE))  # type: ignore[arg-type]


def test_speculators(tmp_path: Path) -> None:
    tensors = speculators(tmp_path)
    head = load_head(tmp_path)  # it names its layers
    assert head.form == "speculators"
    assert (head.config.norm_before_residual, head.config.sliding_window) == (True, 64)
    assert (head.config.layers, head.config.draft_vocab_size) == ((2, 6, 9), 40)
    assert equal(head.tensors, tensors)


def test_a_copy_of_the_embedding_tells_the_target(tmp_path: Path) -> None:
    eagle_1(tmp_path)
    found = load_head(tmp_path, NUM_LAYERS).fingerprint
    assert same_target(found, found)
    change(tmp_path, lambda tensors: tensors.update({"embed_tokens.weight": -EMBEDDING}))
    assert not same_target(found, load_head(tmp_path, NUM_LAYERS).fingerprint)


def test_layers_that_the_default_names_twice_are_fused_once(tmp_path: Path) -> None:
    """Of a target of six layers these are 2, 3 and 3."""
    shape = replace(SHAPE, layers=(2, 3), draft_vocab_size=96)
    write(tmp_path, LLAMA, {name: tensor.half() for name, tensor in random_tensors(shape).items()})
    assert load_head(tmp_path, 6).config.layers == (2, 3)


def test_layers_as_the_programs_name_them(tmp_path: Path) -> None:
    eagle_3(tmp_path)
    with pytest.raises(ModelLoadError, match="Give the target too"):
        load_head(tmp_path)
    for config in ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, {}):
        change(tmp_path, **config)
        assert load_head(tmp_path, NUM_LAYERS).config.layers == ((1, 2, 3))
    change(tmp_path, eagle_aux_hidden_state_layer_ids=[3, 4, 5])
    assert load_head(tmp_path).config.layers == (3, 4, 5)
    with pytest.raises(UnsupportedModelError, match="state of layer 5, and the target has 5"):
        load_head(tmp_path, 5)  # what leaves the last layer, before the final norm


@pytest.mark.parametrize("make", [eagle_1, eagle_3, speculators])
def test_every_missing_tensor_is_named(make: Callable[[Path], dict[str, Tensor]], tmp_path: Path) -> None:
    for name in make(tmp_path):
        make(tmp_path)
        stored = {name, name.replace("midlayer.", "layers.0.")}
        change(tmp_path, lambda tensors, stored=stored: [tensors.pop(each, None) for each in stored])
        with pytest.raises(ModelLoadError, match=f"{name}.* is missing"):
            load_head(tmp_path, NUM_LAYERS)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"fc.weight": torch.zeros(32, 64)}, r"fc\.weight has shape \[32, 64\], and must have \[32, 96\]"),
        ({"fc.weight": torch.zeros(32, 96, dtype=torch.int8)}, "stored as I8"),
        ({"norm.bias": torch.ones(32)}, "has 'norm', which is no matrix"),
        ({"midlayer.self_attn.q_proj.bias": torch.ones(32)}, r"k_proj\.bias \[16\] is missing"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(8)}, r"k_norm\.weight \[8\] is missing"),
        ({"layers.0.hidden_norm.weight": torch.ones(32)}, "under two names"),
        ({"layers.1.hidden_norm.weight": torch.ones(32)}, r"layers\.1\.hidden_norm\.weight is none"),
        ({"norm.weight": torch.full((32,), torch.inf)}, "32 numbers that are NaN or infinite"),
        ({"d2t": torch.full((40,), 60)}, "outside of the target's 96"),
        ({"t2d": torch.ones(96, dtype=torch.bool)}, "t2d and d2t do not name the same"),
        ({"embed_tokens.weight": torch.ones(96, 16)}, r"embed_tokens\.weight has shape"),
    ],
)
def test_tensors_that_do_not_fit(tensors: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    eagle_3(tmp_path)
    change(tmp_path, lambda found: found.update(tensors))
    with pytest.raises(ModelLoadError, match=said):
        load_head(tmp_path, NUM_LAYERS)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3', and EAGLE heads are served whose layers"),
        ({"model_type": "gemma4_assistant"}, "attends to keys and values of its target's last layers"),
        ({"model_type": "qwen3"}, r"midlayer\.self_attn\.[qk]_norm\.weight \[8\] is missing"),
        ({"num_hidden_layers": 2}, r"layers\.1\.self_attn\.q_proj\.weight \[32, 32\] is missing"),
        ({"attention_bias": True}, r"midlayer\.self_attn\.k_proj\.bias \[16\] is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"norm_before_fc": True}, r"input_norm\.weight \[96\] is missing"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_config": {"norm_before_fc": True}}, r"input_norm\.weight \[96\] is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotation llama3 has no 'low_freq_factor' among"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling: rope_type is 'spiral', but must be default, "),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2}}, "rope_parameters: factor is -2, but must be"),
        ({"target_hidden_size": 64}, "32 wide and its target 64"),
        ({"speculators_model_type": "peagle"}, "'peagle', and of these heads only 'eagle3'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "must rise"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}, "layer -1"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"layer_types": ["chunked_attention"]}, "layer_types is"),
        ({"draft_vocab_size": 97}, "97 output tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    eagle_3(tmp_path)
    change(tmp_path, **config)
    with pytest.raises(ModelLoadError, match=said):
        load_head(tmp_path, NUM_LAYERS)


def test_speculators_must_say_what_programs_take_differently(tmp_path: Path) -> None:
    speculators(tmp_path)
    change(tmp_path, norm_before_residual=None)
    with pytest.raises(ModelLoadError, match="norm_before_residual is None, but must be true or false"):
        load_head(tmp_path)


def test_an_eagle_1_head_with_an_output_layer(tmp_path: Path) -> None:
    eagle_1(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": EMBEDDING}))
    with pytest.raises(UnsupportedModelError, match=r"output layer of its own \(lm_head\.weight\)"):
        load_head(tmp_path, NUM_LAYERS)


def test_pickles_are_refused_and_damage_is_told(tmp_path: Path) -> None:
    eagle_3(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (content[:-5], b"", b"\xff" * 64, content[:8] + b"[" * 400):
        weights.write_bytes(damaged)
        with pytest.raises(ModelLoadError, match="the weights are damaged"):
            load_head(tmp_path, NUM_LAYERS)
    weights.rename(tmp_path / "model-00001.safetensors")
    with pytest.raises(ModelLoadError, match=r"there is model-00001\.safetensors"):
        load_head(tmp_path, NUM_LAYERS)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelLoadError, match=r"pickled \(pytorch_model\.bin\), and a pickle can run code"):
        load_head(tmp_path, NUM_LAYERS)
