"""Replicas of models in the layouts of their publishers: small and random, of Transformers' own classes.

PYTHONPATH=src:tests python -m published     # writes the table of docs/models.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import publications
from families import TINY
from forerun.errors import UnsupportedModelError
from forerun.models import Model, Rows, load_model

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
START, END = "<!-- table: python -m published -->", "<!-- end of the table of layouts -->"
TOKENS = list(range(1, 41))
Logits = Callable[[list[int]], Tensor]
"""The logits, [tokens, vocabulary], that the publisher's code gives."""

_SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION = {"vision_config": {**_SIGHT, "image_size": 28, "patch_size": 14}}
_INTERN = {"vision_config": {**_SIGHT, "image_size": [28, 28], "patch_size": [14, 14]}}
_GOT = {"mlp_dim": 32, "output_channels": 16, "global_attn_indexes": [0], "image_size": 32}
_OVIS = {"image_size": 28, "patch_size": 14, "vocab_size": 64}
_QWEN2 = {"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}}
_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_QWEN2_5 = {"vision_config": {**_QWEN, "fullatt_block_indexes": [0]}}
_QWEN3 = {"vision_config": {**_QWEN, "deepstack_visual_indexes": []}}
_AUDIO = {"audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}}
_LLAMA4 = {"vision_config": {**_SIGHT, "image_size": 28, "vision_output_dim": 32, "projector_output_dim": 32}}
_HEARING = {"audio_config": {**_AUDIO["audio_config"], "output_dim": 64, "downsample_hidden_size": 16}}
_APART = {"tie_word_embeddings": False}


def _turning(*sections: int, **options: Any) -> dict[str, Any]:
    """Return the rotation of a text model that also rotates by a patch's height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections], **options}}


@dataclass(frozen=True)
class Container:
    """A container: its class, the family whose tiny text model it holds with other options, and its other parts.

    Attributes:
        text_type: of the text model in the container; None: the family.
        names: pattern and replacement of names, where the publisher's are not those that Transformers saves.
        scale: of the logits, which the text model has and Transformers' container leaves out.
    """

    cls: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    text_type: str | None = None
    names: tuple[str, str] | None = None
    scale: float = 1.0


CONTAINERS = {
    "Aya Vision": Container("AyaVisionForConditionalGeneration", "cohere2", parts=_VISION, scale=0.0625),
    "Command A Vision": Container("Cohere2VisionForConditionalGeneration", "cohere2", parts=_VISION, scale=0.0625),
    "EXAONE 4.5": Container("Exaone4_5_ForConditionalGeneration", "exaone4", parts=_QWEN2_5),
    "Fuyu": Container("FuyuForCausalLM", "llama", text_type="persimmon"),
    "Gemma 3": Container("Gemma3ForConditionalGeneration", "gemma3_text", parts=_VISION),
    "Gemma 4": Container(
        "Gemma4ForConditionalGeneration",
        "gemma3_text",
        {"pad_token_id": 0, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16, "global_head_dim": 16},
        text_type="gemma4_text",
    ),
    "GLM-4.1V": Container(
        "Glm4vForConditionalGeneration",
        "glm4",
        _turning(1, 1, 2, partial_rotary_factor=0.5),
        {"vision_config": _QWEN},
        "glm4v_text",
    ),
    "GLM-4.5V": Container(
        "Glm4vMoeForConditionalGeneration",
        "glm4_moe",
        {**_turning(1, 1, 2, partial_rotary_factor=0.5), "use_qk_norm": False},
        {"vision_config": _QWEN},
        "glm4v_moe_text",
    ),
    "GOT-OCR 2": Container("GotOcr2ForConditionalGeneration", "qwen2", parts={"vision_config": {**_SIGHT, **_GOT}}),
    "Granite Speech": Container(
        "GraniteSpeechForConditionalGeneration",
        "granite",
        parts={
            "encoder_config": {"hidden_dim": 32, "num_layers": 1, "num_heads": 2, "dim_head": 16, "input_dim": 16},
            "projector_config": {**_SIGHT, "model_type": "blip_2_qformer", "encoder_hidden_size": 32},
        },
        scale=0.5,
    ),
    "Granite Vision": Container("LlavaNextForConditionalGeneration", "granite", parts=_VISION, scale=0.5),
    "HyperCLOVA X Vision": Container(
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        "hyperclovax",
        parts=_QWEN2_5,
        names=(r"^model\.language_model\.", "model.language_model.model."),
    ),
    "Idefics 2": Container("Idefics2ForConditionalGeneration", "mistral", {"sliding_window": None}, _VISION),
    "Idefics 3": Container("Idefics3ForConditionalGeneration", "llama", parts=_VISION),
    "InternVL 3": Container("InternVLForConditionalGeneration", "qwen2", parts={**_INTERN, **_APART}),
    "InternVL 3.5": Container("InternVLForConditionalGeneration", "qwen3", parts={**_INTERN, **_APART}),
    "Janus": Container(
        "JanusForConditionalGeneration",
        "llama",
        parts={**_VISION, "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 32}},
    ),
    "Kimi K2.5": Container(
        "Kimi_K25ForConditionalGeneration",
        "deepseek_v3",
        parts={"vision_config": {**_SIGHT, "patch_size": 14}, "projection_hidden_size": 32},
        names=(r"^language_model\.model\.blocks", "language_model.model.layers"),
    ),
    "LFM2-VL": Container("Lfm2VlForConditionalGeneration", "lfm2", parts=_VISION),
    "LightOnOCR": Container("LightOnOcrForConditionalGeneration", "qwen3", parts=_VISION),
    "LLaVA": Container("LlavaForConditionalGeneration", "llama", parts=_VISION),
    "LLaVA-NeXT": Container("LlavaNextForConditionalGeneration", "mistral", parts=_VISION),
    "LLaVA-OneVision": Container("LlavaOnevisionForConditionalGeneration", "qwen2", parts=_VISION),
    "Llama 4": Container("Llama4ForConditionalGeneration", "llama", {"num_local_experts": 2}, _LLAMA4, "llama4_text"),
    "Ministral 3": Container("Mistral3ForConditionalGeneration", "ministral3", parts={**_VISION, **_APART}),
    "Mistral Small 3": Container(
        "Mistral3ForConditionalGeneration", "mistral", {"sliding_window": None}, {**_VISION, **_APART}
    ),
    "Ovis 2": Container("Ovis2ForConditionalGeneration", "qwen2", parts={"vision_config": {**_SIGHT, **_OVIS}}),
    "PaliGemma 2": Container("PaliGemmaForConditionalGeneration", "gemma2", parts=_VISION),
    "Qwen2-Audio": Container("Qwen2AudioForConditionalGeneration", "qwen2", parts=_AUDIO),
    "Qwen2-VL": Container("Qwen2VLForConditionalGeneration", "qwen2", _turning(2, 3, 3), _QWEN2, "qwen2_vl_text"),
    "Qwen2.5-VL": Container(
        "Qwen2_5_VLForConditionalGeneration", "qwen2", _turning(2, 3, 3), _QWEN2_5, "qwen2_5_vl_text"
    ),
    "Qwen2.5-Omni": Container(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "qwen2",
        _turning(2, 3, 3),
        {**_QWEN2_5, **_HEARING},
        "qwen2_5_omni_text",
        names=("^", "thinker."),
    ),
    "Qwen3-Omni": Container(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "qwen3_moe",
        _turning(4, 2, 2, mrope_interleaved=True),
        {**_QWEN3, **_HEARING},
        "qwen3_omni_moe_text",
        names=("^", "thinker."),
    ),
    "Qwen3-VL": Container(
        "Qwen3VLForConditionalGeneration",
        "qwen3",
        _turning(8, 4, 4, mrope_interleaved=True),
        {**_QWEN3, "tie_word_embeddings": True},
        "qwen3_vl_text",
    ),
    "Qwen3-VL-MoE": Container(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_moe",
        _turning(4, 2, 2, mrope_interleaved=True),
        _QWEN3,
        "qwen3_vl_moe_text",
    ),
    "Qwen3.5": Container("Qwen3_5ForConditionalGeneration", "qwen3_5_text", parts=_QWEN3),
    "Qwen3.5-MoE": Container("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", parts=_QWEN3),
    "SmolVLM": Container("SmolVLMForConditionalGeneration", "llama", parts=_VISION),
    "Voxtral": Container("VoxtralForConditionalGeneration", "llama", parts=_AUDIO),
}


def container(name: str, seed: int = 0) -> PreTrainedModel:
    """Make a tiny random container in float32."""
    made = CONTAINERS[name]
    text = {**TINY[made.family], **made.options, "model_type": made.text_type or made.family}
    cls: Any = getattr(tf, made.cls)
    torch.manual_seed(seed)
    model: PreTrainedModel = cls._from_config(cls.config_class(text_config=text, **made.parts))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "conv" in key:
                parameter.normal_(0, 0.5)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.12)
            elif "bias" in key:
                parameter.normal_(0, 0.3)
            elif "norm" in key or key.endswith(("A_log", ".D")):
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.generation_config.eos_token_id = None
    model.set_experts_implementation("eager")
    return model.eval()


def publish(name: str, folder: Path) -> Logits:
    """Save a container as its publisher does; its logits."""
    model, made = container(name), CONTAINERS[name]
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if made.names is not None:
        tensors = {re.sub(*made.names, key): tensor for key, tensor in tensors.items()}
    if name == "Qwen3-VL-MoE":  # whose stacks of experts Qwen has as [count, in, out]
        is_stack = re.compile(r"mlp\.experts\.\w+$")
        tensors = {key: each.mT.contiguous() if is_stack.search(key) else each for key, each in tensors.items()}
    save_file(tensors, file, {"format": "pt"})

    def logits(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model(torch.tensor([tokens])).logits[0]
        return found * made.scale

    return logits


def quantized(name: str, folder: Path) -> Logits:
    """Save a quantized checkpoint as its publisher does; the logits of the numbers that it stands for."""
    path, model = publications.publish(name, folder)
    for each in path.iterdir():
        each.rename(folder / each.name)

    def logits(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model(torch.tensor([tokens])).logits[0]
        return found

    return logits


LAYOUTS: list[tuple[str, Callable[[Path], Logits]]] = [
    *((f"{name}, `{made.cls}`", partial(publish, name)) for name, made in CONTAINERS.items()),
    *((name, partial(quantized, name)) for name in publications.PUBLICATIONS),
]
"""Names of layouts, and what saves a replica in a folder and returns its publisher's logits."""


def difference(model: Model, logits: Logits) -> float:
    """Return the largest difference of a model's logits."""
    return float((model.forward([Rows(model.new_cache(), TOKENS)]).logits - logits(TOKENS)).abs().max())


def row(name: str, make: Callable[[Path], Logits]) -> str:
    """Return a layout's row of the table."""
    with TemporaryDirectory() as folder:
        logits = make(Path(folder))
        try:
            model = load_model(folder, "float32")
        except UnsupportedModelError as error:
            found = re.search(r"cannot be served: ([^.;]+)", str(error))
            return f"| {name} | refused: {found[1] if found else error} | |"
        form = f", integers ({model.quantize})" if model.quantize else ""
        return f"| {name} | {model.kind} decoder{form} | {difference(model, logits):.0e} |"


def main() -> None:
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    text = PAGE.read_text(encoding="utf-8")
    rows = "\n".join(row(*layout) for layout in LAYOUTS)
    before, after = text.partition(START)[0], text.partition(END)[2]
    head = "| layout | served by | largest difference of logits |\n|---|---|---|\n"
    PAGE.write_text(f"{before}{START}\n\n{head}{rows}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
