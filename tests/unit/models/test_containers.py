"""Containers, as they are published: their text model is served, with the publisher's numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from forerun import LLM, SamplingParams
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models import Rows, load_model
from forerun.models.loading.configuration import text_config
from forerun.models.loading.folder_source import text_name, text_names
from forerun.models.loading.lora import Adapter
from forerun.models.loading.source import find_source
from published import CONTAINERS, TOKENS, Logits, container, difference, publish
from small_tokenizers import byte_level

REFUSED = {"Llama 4", "PaliGemma 2"}
GENERAL = {"Fuyu"}
STEEP = {"Qwen3.5", "Qwen3.5-MoE"}
"""Those whose text models, too, give differences of 1e-4 in float32 where they are computed alone."""
QUICK = {"LLaVA", "Qwen2-VL", "Qwen3-VL-MoE"}
SERVED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONTAINERS if name not in REFUSED
]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logits]:
    folder = tmp_path_factory.mktemp("llava")
    return folder, publish("LLaVA", folder)


@pytest.fixture
def folder(llava: tuple[Path, Logits], tmp_path: Path) -> Path:
    """Return a copy that a test may change."""
    for file in llava[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def rename(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", SERVED)
def test_the_logits_and_the_text_are_the_publishers(name: str, tmp_path: Path) -> None:
    logits = publish(name, tmp_path)
    model = load_model(tmp_path, "float32")
    assert model.kind == ("general" if name in GENERAL else "fused")
    assert difference(model, logits) < (2e-4 if name in STEEP else 1e-5)
    tokens = [5, 17, 3, 41]
    for _ in range(8):
        tokens.append(int(logits(tokens)[-1].argmax()))
    text = LLM(model).generate(tokens[:4], SamplingParams(temperature=0, max_tokens=8)).token_ids
    assert text == tokens[4:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"), [("Llama 4", "chunked_attention attend"), ("PaliGemma 2", "both directions")]
)
def test_what_is_not_served_is_refused_with_its_reason(name: str, reason: str, tmp_path: Path) -> None:
    container(name).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(tmp_path)


@pytest.mark.parametrize("name", SERVED)
def test_names_are_those_of_transformers_own_mapping(name: str, tmp_path: Path) -> None:
    """Of Transformers' private modules, this uses `get_model_conversion_mapping` and `rename_source_key`. Nothing of
    forerun does: where they change, this test says whether the prefixes are still the same."""
    publish(name, tmp_path)
    with torch.device("meta"):
        model: Any = container(name)
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    base, parameters = model.base_model_prefix, model.state_dict()
    decoder = next(path for path, module in model.named_modules() if module is model.get_decoder())
    expected = {}
    for stored in load_file(tmp_path / "model.safetensors"):
        theirs, _ = rename_source_key(stored, renamings, [], base, parameters)
        inside = theirs.removeprefix(f"{decoder}.")
        if inside != theirs or theirs.startswith("lm_head."):
            expected[stored] = theirs if inside == theirs else f"model.{inside}"
    assert text_names(load_file(tmp_path / "model.safetensors"), is_container=True) == expected


@pytest.mark.parametrize(
    ("published", "own"),
    [
        ("language_model.model.layers.0.self_attn.q_proj.qweight", "model.layers.0.self_attn.q_proj.qweight"),
        ("model.language_model.layers.0.mlp.up_proj.weight_scale", "model.layers.0.mlp.up_proj.weight_scale"),
        ("model.text_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight_packed", "lm_head.weight_packed"),
        ("model.language_model.lm_head", "lm_head"),
        ("language_model.backbone.layers.3.mixer.A_log", "backbone.layers.3.mixer.A_log"),
        ("thinker.model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("thinker.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("mtp.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight"),
    ],
)
def test_the_names_of_a_tensor(published: str, own: str) -> None:
    assert text_name(published) == own


def test_other_parts_of_a_container_are_left_out() -> None:
    parts = ["visual.blocks.0.norm1.weight", "vision_tower.layers.0.x", "model.connector.modality_projection.weight"]
    parts += [
        "thinker.visual.blocks.0.x",
        "thinker.audio_tower.layers.0.x",
        "talker.model.layers.0.x",
        "multi_modal_projector.x",
    ]
    assert text_names(parts, is_container=True) == {}
    assert text_names(parts, is_container=False) == {name: name for name in parts}


@pytest.mark.parametrize(
    ("pattern", "new"),
    [
        (r"^language_model\.(model\.)?(?=layers|embed|norm)", "model.language_model."),
        (r"^language_model\.model\.", "model.text_model."),
    ],
    ids=["language_model", "text_model"],
)
def test_a_container_in_other_layouts(pattern: str, new: str, folder: Path, llava: tuple[Path, Logits]) -> None:
    rename(folder, lambda found: {re.sub(pattern, new, name): tensor for name, tensor in found.items()})
    assert difference(load_model(folder, "float32"), llava[1]) < 1e-5


def test_an_output_layer_that_the_container_ties(tmp_path: Path) -> None:
    logits = publish("Qwen3-VL", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    change_config(tmp_path, lambda config: config["text_config"].pop("tie_word_embeddings", None))
    assert difference(load_model(tmp_path, "float32"), logits) < 1e-5


@pytest.mark.parametrize("size", ["1GB", "60KB"])
def test_an_output_layer_of_its_own_that_only_the_files_speak_of(size: str, tmp_path: Path) -> None:
    """Mistral Small 3's configuration says nothing, and Transformers' class would tie it."""
    logits = publish("Mistral Small 3", tmp_path / "whole")
    container("Mistral Small 3").save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "60KB")
    change_config(tmp_path, lambda config: config.pop("tie_word_embeddings"))
    change_config(tmp_path, lambda config: config["text_config"].pop("tie_word_embeddings", None))
    assert find_source(tmp_path).config().tie_word_embeddings is False
    assert difference(load_model(tmp_path, "float32"), logits) < 1e-5


def test_a_configuration_that_is_flat(tmp_path: Path) -> None:
    """So Qwen2-VL and Qwen2.5-VL are published."""
    logits = publish("Qwen2-VL", tmp_path)

    def flatten(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config |= {**text, "model_type": "qwen2_vl", "rope_theta": rope["rope_theta"], "rope_scaling": scaling}

    change_config(tmp_path, flatten)
    assert difference(load_model(tmp_path, "float32"), logits) < 1e-5


def test_defaults_of_a_type_without_a_causal_model_are_its_own() -> None:
    """GLM-4's own are heads of 128 and a rotation of half a head."""
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]}
    found = text_config(tf.Glm4vTextConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope), "config.json")
    assert (found.model_type, found.head_dim) == ("glm4", 16)
    assert found.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0}


def test_end_tokens_of_a_container_are_before_its_text_models(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change_config(folder, lambda config: config.update(eos_token_id=[7, 9]))
    change_config(folder, lambda config: config["text_config"].update(eos_token_id=3))
    assert load_model(folder).eos_token_ids == {7, 9}
    change_config(folder, lambda config: config.pop("eos_token_id"))
    assert load_model(folder).eos_token_ids == {3}


def test_a_chat_template_in_the_file_of_the_processor(folder: Path) -> None:
    byte_level().save_pretrained(folder)
    assert not find_source(folder).tokenizer().chat_template
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert find_source(folder).tokenizer().chat_template == "{{ messages }}"


def test_quantized_it_has_the_bits_of_its_text_model_alone(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = tmp_path_factory.mktemp("alone")
    named = text_names(load_file(folder / "model.safetensors"), is_container=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({own: tensors[name] for name, own in named.items()}, alone / "model.safetensors", {"format": "pt"})
    find_source(folder).config().save_pretrained(alone)
    for form in ("int8", "int4"):
        found = [load_model(each, "float32", quantize=form) for each in (folder, alone)]
        ours, theirs = (model.forward([Rows(model.new_cache(), TOKENS)]).logits for model in found)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj", "down_proj"], r".*language_model\.layers\.1\.mlp\.(up|down)_proj"]
)
def test_an_adapter_trained_on_a_container(
    targets: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    torch.manual_seed(1)
    base = tf.LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    pattern = {"model.language_model.layers.1.mlp.down_proj": 32}
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, alpha_pattern=pattern)
    wrapped: Any = peft.get_peft_model(base, settings)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    wrapped.save_pretrained(folder / "adapter")
    wrapped.eval()

    def logits(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            found: Tensor = wrapped(input_ids=torch.tensor([tokens])).logits[0]
        return found

    assert difference(load_model(folder, "float32", adapter=folder / "adapter"), logits) < 1e-5


def test_an_adapter_with_two_names_of_a_tensor(tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    paths = ("language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj")
    tensors = {f"base_model.model.{path}.lora_A.weight": torch.zeros(1, 64) for path in paths}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="by two names"):
        Adapter.read(tmp_path)


def test_other_parts_are_not_read(folder: Path, llava: tuple[Path, Logits]) -> None:
    def damage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each if name.startswith("language") else each.to(torch.int8) for name, each in tensors.items()}

    rename(folder, damage)
    assert difference(load_model(folder, "float32"), llava[1]) < 1e-5


def test_one_tensor_by_two_names(folder: Path) -> None:
    name, own = "language_model.model.norm.weight", "model.norm.weight"
    rename(folder, lambda tensors: {**tensors, own: tensors[name].clone()})
    with pytest.raises(ModelLoadError, match=rf"safetensors: tensor .*norm\.weight is there twice.* of {own}\. Down"):
        load_model(folder)


def test_a_container_that_lacks_a_weight(folder: Path) -> None:
    rename(folder, lambda tensors: {name: each for name, each in tensors.items() if "layers.1.mlp.up_proj" not in name})
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights, among them model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text"])
def test_a_text_model_that_attends_in_both_directions(name: str, folder: Path) -> None:
    value = {"gemma3_text": True, "gemma4_text": "all"}[name]
    config = {"model_type": name, "use_bidirectional_attention": value, "layer_types": ["full_attention"] * 2}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(UnsupportedModelError, match="both directions"):
        load_model(folder)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "clip"}, r"clip_text_model\) has no causal language model in Transformers"),
        ({"model_type": "florence2"}, "florence2 cannot be served: an encoder-decoder"),
        ({"model_type": "llava", "text_config": {"quantization_config": {"quant_method": "exotic"}}}, "exotic"),
    ],
    ids=lambda given: given["model_type"] if isinstance(given, dict) else "",
)
def test_containers_that_cannot_be_served(config: dict[str, Any], reason: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(folder)
