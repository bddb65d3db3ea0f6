"""Replicas of models as they are published: small and random, of Transformers' own classes, in the layouts of their
publishers.

    PYTHONPATH=src:tests python -m published     # writes the table of docs/models.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedModel

from families import TINY

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_QWEN2_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
_QWEN2_5_VISION = {**_QWEN_VISION, "fullatt_block_indexes": [0]}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_MROPE3 = {"rope_parameters": {**_MROPE["rope_parameters"], "mrope_interleaved": True}}


@dataclass(frozen=True)
class Container:
    """A container: its class, the family of its text model and options of that, its other parts' configurations."""

    cls: str
    text: str
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"vision_config": _SMALL})
    whole: Mapping[str, Any] = field(default_factory=dict)
    text_type: str | None = None

CONTAINERS = {
    "aya_vision": Container("AyaVisionForConditionalGeneration", "cohere2"),
    "cohere2_vision": Container("Cohere2VisionForConditionalGeneration", "cohere2"),
    "exaone4_5": Container("Exaone4_5_ForConditionalGeneration", "exaone4", parts={"vision_config": _QWEN2_5_VISION}),
    "fast_vlm": Container("FastVlmForConditionalGeneration", "qwen2", parts={}),
    "gemma3": Container("Gemma3ForConditionalGeneration", "gemma3_text"),
    "glm4v": Container("Glm4vForConditionalGeneration", "glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1,1,2], "partial_rotary_factor":0.5}, "head_dim": 16}, {"vision_config": _QWEN_VISION}, text_type="glm4v_text"),
    "glm4v_moe": Container("Glm4vMoeForConditionalGeneration", "glm4_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1,1,2], "partial_rotary_factor":0.5}, "use_qk_norm": False}, {"vision_config": _QWEN_VISION}, text_type="glm4v_moe_text"),
    "got_ocr2": Container("GotOcr2ForConditionalGeneration", "qwen2", parts={"vision_config": {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16, "mlp_dim": 32, "global_attn_indexes": [0]}}),
    "idefics2": Container("Idefics2ForConditionalGeneration", "mistral", {"sliding_window": None}),
    "idefics3": Container("Idefics3ForConditionalGeneration", "llama"),
    "internvl": Container("InternVLForConditionalGeneration", "qwen3", parts={"vision_config": {**_SMALL, "image_size": [28, 28], "patch_size": [14, 14]}}, whole={"tie_word_embeddings": False}),
    "janus": Container("JanusForConditionalGeneration", "llama", parts={}),
    "kimi_k25": Container("Kimi_K25ForConditionalGeneration", "deepseek_v3", parts={}),
    "lfm2_vl": Container("Lfm2VlForConditionalGeneration", "lfm2"),
    "lighton_ocr": Container("LightOnOcrForConditionalGeneration", "qwen3"),
    "llava": Container("LlavaForConditionalGeneration", "llama"),
    "llava_next": Container("LlavaNextForConditionalGeneration", "granite"),
    "llava_onevision": Container("LlavaOnevisionForConditionalGeneration", "qwen2"),
    "mistral3": Container("Mistral3ForConditionalGeneration", "mistral", {"sliding_window": None}, whole={"tie_word_embeddings": False}),
    "ministral3": Container("Mistral3ForConditionalGeneration", "ministral3", whole={"tie_word_embeddings": False}),
    "ovis2": Container("Ovis2ForConditionalGeneration", "qwen2"),
    "perception_lm": Container("PerceptionLMForConditionalGeneration", "llama", parts={}),
    "qwen2_vl": Container("Qwen2VLForConditionalGeneration", "qwen2", _MROPE, {"vision_config": _QWEN2_VISION}, text_type="qwen2_vl_text"),
    "qwen2_5_vl": Container("Qwen2_5_VLForConditionalGeneration", "qwen2", _MROPE, {"vision_config": _QWEN2_5_VISION}, text_type="qwen2_5_vl_text"),
    "qwen3_vl": Container("Qwen3VLForConditionalGeneration", "qwen3", {**_MROPE3, "head_dim": 16}, {"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}}, text_type="qwen3_vl_text"),
    "qwen3_vl_moe": Container("Qwen3VLMoeForConditionalGeneration", "qwen3_moe", _MROPE3, {"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}}, text_type="qwen3_vl_moe_text"),
    "qwen3_5": Container("Qwen3_5ForConditionalGeneration", "qwen3_5_text", parts={"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": []}}),
    "qwen3_5_moe": Container("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", parts={"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": []}}),
    "smolvlm": Container("SmolVLMForConditionalGeneration", "llama"),
    "video_llava": Container("VideoLlavaForConditionalGeneration", "llama"),
    "vipllava": Container("VipLlavaForConditionalGeneration", "llama"),
    "voxtral": Container("VoxtralForConditionalGeneration", "llama", parts={}),
    "qwen2_audio": Container("Qwen2AudioForConditionalGeneration", "qwen2", parts={"audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}}),
    "granite_speech": Container("GraniteSpeechForConditionalGeneration", "granite", parts={}),
    "hyperclovax_vision_v2": Container("HyperCLOVAXVisionV2ForConditionalGeneration", "hyperclovax", parts={"vision_config": _QWEN2_5_VISION}),
    "paligemma": Container("PaliGemmaForConditionalGeneration", "gemma2"),
    "llama4": Container("Llama4ForConditionalGeneration", "llama4_text"),
    "gemma4": Container("Gemma4ForConditionalGeneration", "gemma4_text"),
    "gemma3n": Container("Gemma3nForConditionalGeneration", "gemma3n_text"),
}


def container(name: str, seed: int = 0) -> PreTrainedModel:
    """Make a tiny random container in float32."""
    made = CONTAINERS[name]
    text = {**TINY.get(made.text, TINY["qwen2"]), **made.options, "model_type": made.text_type or made.text}
    cls: Any = getattr(tf, made.cls)
    config = cls.config_class(text_config=text, **made.parts, **made.whole)
    torch.manual_seed(seed)
    model: PreTrainedModel = cls._from_config(config)
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
    return model.eval()
