"""Small GGUF files: of models, as llama.cpp's converter writes them, and byte by byte, as nobody should."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

import gguf_experts
import gguf_latents
import gguf_recurrent

MAGIC = b"GGUF"
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
}
"""Sizes of small configurations of Transformers, beside the widths."""
ARCHITECTURES = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "qwen2_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "bamba": "granitehybrid",
    "cohere": "command-r",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
    "falcon_h1": "falcon-h1",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "glm": "chatglm",
    "granitemoehybrid": "granitehybrid",
    "gpt_neox": "gptneox",
    "hunyuan_v1_dense": "hunyuan-dense",
    "olmo3": "olmo2",
    "phi": "phi2",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
"""Model type -> GGUF's architecture, where it is another name."""
_PERMUTED = {"llama", "mistral3", "granite", "granitehybrid", "granitemoe", "nemotron_h", "smollm3", "olmo", "arcee"}
_WITH_ONE = {"gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next"}
"""Architectures whose rows of queries and keys the converter permutes, and to whose norms it adds 1."""
_SCALES = {
    **dict.fromkeys(("Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "IQ1_M": (),
    "NVFP4": (),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,)),
}
"""Types that the gguf package does not make -> where a block's scales, of two bytes each, stand."""
_SMALL = {"IQ1_M": (55, 0x10), "NVFP4": (slice(0, 4), 0x18)}
"""Those whose scales lie elsewhere -> bytes to set to a value, so that scales are small."""


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    type_name: str | Callable[[str], str] = "F32",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    tokens: Sequence[str] | None = None,
    split: int = 0,
    fused: str = "",
) -> dict[str, torch.Tensor]:
    """Write a model's weights as llama.cpp's converter does, matrices in a type of blocks and vectors in float32.

    Args:
        type_name: of all matrices, or of the one with a name of Transformers'; of a part of one, with a name that the
            gguf package knows.
        keys: metadata beyond, or in place of, what the model's configuration says; None leaves a key out. Those of the
            architecture have no prefix.
        tensors: beyond the weights, in float32.
        tokens: of a byte-level tokenizer; None for a file without one.
        split: tensors per part of the model, named as llama.cpp names them; 0: one file.
        fused: "qkv": queries, keys and values are one tensor; "experts": gates of experts and what they are of;
            "latents": what makes keys and values of them.

    Returns:
        What the file's numbers stand for, by Transformers' names.
    """
    config = model.config.get_text_config()
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    kind_of = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind_of, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in {**_metadata(config), **_tokenizer(tokens), **(keys or {})}.items():
        if value is not None:
            add_key(
                writer, key if key.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{key}", value
            )
    meaning, state = {}, model.state_dict()
    for name in [name for name in state if fused == "qkv" and ".q_proj." in name]:
        parts = [state.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        state[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    for name, tensor in state.items():
        if (name == "lm_head.weight" and model.config.tie_word_embeddings) or name.startswith("model.visual."):
            continue
        name = name.replace("model.language_model.", "model.")
        found, numbers = [], tensor.float()
        parts = gguf_experts.written(name, numbers, config, is_fused=fused == "experts")
        parts = parts or gguf_latents.written(name, numbers, config, is_whole=fused == "latents")
        parts = parts or gguf_recurrent.written(name, numbers, config)
        is_plain = tensor.dim() == 1 or gguf_recurrent.is_exact(name) or gguf_experts.is_exact(name)
        for their_name, part in parts.items():
            own_type = type_name if isinstance(type_name, str) else type_name(name if len(parts) == 1 else their_name)
            own_type = "F32" if is_plain else own_type
            packed, means = pack(part.numpy(), own_type)
            found.append(means)
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
            if architecture in _PERMUTED and heads:
                packed = _permuted(packed, getattr(config, heads))
            if architecture in _WITH_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
                packed = packed + 1
            if "query_key_value" in name:
                packed = _by_part(packed, config.num_attention_heads)
            kind = gguf.GGMLQuantizationType[own_type]
            known = their_name.startswith("blk.")
            their_name = their_name if known else names.get_name(their_name, (".weight", ".bias"))
            writer.add_tensor(their_name, packed, raw_dtype=kind)
        joined = gguf_experts.read(name, gguf_latents.read(name, found, config), config)
        meaning[name] = tensor if is_plain else gguf_recurrent.read(name, joined, config)
    for name, tensor in {**_factors(config), **(tensors or {})}.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meaning


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key of the type that a value of Python stands for."""
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def pack(numbers: np.ndarray, type_name: str) -> tuple[np.ndarray, torch.Tensor]:
    """Numbers in blocks (bytes of a row in the last dimension), and what these stand for. Vectors stay as they are. The
    blocks of types that the package does not make have nothing to do with the numbers: they are drawn."""
    if numbers.ndim == 1 or type_name == "F32":
        return numbers, torch.from_numpy(numbers.copy())
    kind = gguf.GGMLQuantizationType[type_name]
    packed = _drawn(numbers.shape, type_name) if type_name in _SCALES else gguf.quants.quantize(numbers, kind)
    return packed, torch.from_numpy(np.array(gguf.quants.dequantize(packed, kind), np.float32))


def _drawn(shape: tuple[int, ...], type_name: str) -> np.ndarray:
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    random = np.random.default_rng(sum(shape))
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), np.uint8)
    for place in _SCALES[type_name]:
        scale = random.uniform(1e-4, 4e-4, blocks.shape[:-1] + (1,)).astype(np.float16)
        blocks[..., place : place + 2] = scale.view(np.uint8)
    if type_name in _SMALL:
        place, value = _SMALL[type_name]
        blocks[..., place] = value
    return blocks.reshape(*shape[:-1], -1)


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of queries and keys."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _by_part(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of all queries, of all keys, and of all values, of those that each head has side by side."""
    return rows.reshape(heads, 3, len(rows) // heads // 3, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def _metadata(config: Any) -> dict[str, Any]:
    def number(*names: str) -> float | None:
        return next((float(value) for name in names if (value := getattr(config, name, None)) is not None), None)

    if config.model_type == "mamba2":
        return gguf_recurrent.metadata(config)
    kinds = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    rope = kinds.get("full_attention", kinds)
    sections, layer_types = rope.get("mrope_section"), getattr(config, "layer_types", None)
    config = copy(config)
    config.allow_global_per_layer_attribute_access = True
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.layer_norm_rms_epsilon": number("rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": number("layer_norm_eps", "norm_epsilon", "norm_eps"),
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.value_length": getattr(config, "head_dim", None),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.freq_base_swa": kinds.get("sliding_attention", {}).get("rope_theta"),
        "rope.dimension_count": int(width * (rope.get("partial_rotary_factor") or 1.0)),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in layer_types]
        if config.model_type in ("olmo3", "exaone4", "exaone_moe")
        else None,
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
        "attention.scale": number("attention_multiplier"),
        "embedding_scale": number("embedding_multiplier"),
        "residual_scale": number("residual_multiplier"),
        "logit_scale": number("logit_scale", "logits_scaling"),
        "attn_logit_softcapping": number("attn_logit_softcapping"),
        "final_logit_softcapping": number("final_logit_softcapping"),
        "use_parallel_residual": getattr(config, "use_parallel_residual", None),
        "rope.dimension_sections": [*sections, 0] if sections else None,
        **gguf_recurrent.metadata(config),
        **gguf_experts.metadata(config),
        **(_yarn(rope) if rope["rope_type"] == "yarn" else {}),
        **gguf_latents.metadata(config),
        **(_gemma4(config) if config.model_type == "gemma4_text" else {}),
    }


def _gemma4(config: Any) -> dict[str, Any]:
    """What the converter writes of Gemma 4, whose layers differ."""
    kinds = [config.per_layer_config[index] for index in range(config.num_hidden_layers)]
    local, full = (config.per_layer_config[kind].head_dim for kind in ("sliding_attention", "full_attention"))
    first, factor = config.num_hidden_layers - config.num_kv_shared_layers, 1 + config.use_double_wide_mlp
    widths = [config.intermediate_size * (factor if index >= first else 1) for index in range(len(kinds))]
    return {
        "attention.head_count_kv": [each.num_key_value_heads for each in kinds],
        "feed_forward_length": widths if config.use_double_wide_mlp else config.intermediate_size,
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), full),
        **{f"{key}_swa": local for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")},
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "expert_used_count": config.top_k_experts if config.enable_moe_block else None,
        "expert_count": config.num_experts if config.enable_moe_block else None,
    }


def _factors(config: Any) -> dict[str, np.ndarray]:
    """By how much frequencies are divided in Gemma 4's layers of full attention."""
    if config.model_type != "gemma4_text":
        return {}
    width, share = config.per_layer_config["full_attention"].head_dim, config.rope_parameters["full_attention"]
    rotated = int(width * share["partial_rotary_factor"] / 2)
    return {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (width // 2 - rotated), np.float32)}


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
    }


def _tokenizer(tokens: Sequence[str] | None) -> dict[str, Any]:
    if tokens is None:
        return {}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": ["a b"],
    }


def text(value: str | bytes) -> bytes:
    """A string as GGUF writes it."""
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key of the metadata with a value of a type, by the number of the type."""
    return text(key) + struct.pack("<I", kind) + value


def info(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor of the list of tensors. shape: in the file's order, the length of a row first."""
    return text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)


def raw(
    entries: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file, whatever its parts say."""
    counts = (len(infos) if num_tensors is None else num_tensors, len(entries) if num_keys is None else num_keys)
    header = MAGIC + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(infos)
    return header + b"\0" * (-len(header) % alignment) * bool(infos) + data
