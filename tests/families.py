"""Tiny random models of the families of decoder-only models, by Transformers' model type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from forerun.models.families.table import FAMILIES, spec_of

VOCAB = 96
_NO_TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
_PLAIN = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **_NO_TOKENS}
_PLAIN["max_position_embeddings"] = 1024
_WIDE = {**_PLAIN, "intermediate_size": 128}
_GATED = {**_WIDE, "num_key_value_heads": 2}
_HEADS = {**_GATED, "head_dim": 16}
_WINDOW = {"sliding_window": 24}
_GPT = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, **_NO_TOKENS}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 24,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 3,
    "mamba_chunk_size": 16,
}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20}
_GEMMA = {**_HEADS, **_WINDOW, "query_pre_attn_scalar": 16}
# tied embeddings, scaled as Gemma scales them, repeat the last token for ever; caps as low as to bend random logits
_GEMMA2 = {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, "tie_word_embeddings": False}

TINY: dict[str, dict[str, Any]] = {
    "llama": _GATED,
    "mistral": {**_GATED, **_WINDOW},
    "qwen2": _GATED,
    "qwen3": {**_GATED, "head_dim": 32},
    "apertus": _GATED,
    "arcee": _GATED,
    "bamba": {**_GATED, **_MAMBA, "attn_layer_indices": [1]},
    "biogpt": _WIDE,
    "cohere": {**_GATED, "logit_scale": 0.5},
    "cohere2": {**_GATED, **_WINDOW},
    "deepseek_v2": {
        **_WIDE,
        **_LATENT,
        **_ROUTED,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {
        **_WIDE,
        "num_key_value_heads": 4,
        **_LATENT,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "cohere2_moe": {
        **_HEADS,
        **_WINDOW,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "logit_scale": 0.5,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "prefix_dense_intermediate_size": 96,
    },
    "dots1": {**_HEADS, **_ROUTED},
    "ernie4_5_moe": {
        **_HEADS,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
        "use_bias": True,
    },
    "exaone_moe": {
        **_HEADS,
        **_WINDOW,
        **_EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "first_k_dense_replace": 1,
    },
    "glm4_moe_lite": {**_WIDE, **_LATENT, **_ROUTED, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    "minicpm3": {**_WIDE, **_LATENT, "num_key_value_heads": 4, "dim_model_base": 32},
    "glm4_moe": {**_HEADS, **_ROUTED, "use_qk_norm": True, "attention_bias": True},
    "granitemoeshared": {
        **_GATED,
        **_LOCAL,
        "shared_intermediate_size": 96,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
    },
    "hunyuan_v1_moe": {**_HEADS, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {
        **_GATED,
        **_EXPERTS,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "tie_word_embeddings": False,
    },
    "minimax_m2": {**_HEADS, **_LOCAL},
    "qwen3_5_moe_text": {
        **_PLAIN,
        "num_key_value_heads": 2,
        "head_dim": 16,
        **_LINEAR,
        **_EXPERTS,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "ernie4_5": {**_HEADS, "use_bias": True},
    "exaone4": {**_GATED, **_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "falcon_h1": {
        **_HEADS,
        **_MAMBA,
        "mamba_d_ssm": 192,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.7,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.6, 0.9, 0.7, 0.5, 1.2],
        "mlp_multipliers": [0.8, 0.7],
    },
    "flex_olmo": {**_GATED, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {**_HEADS, "tie_word_embeddings": False},
    "gemma2": _GEMMA2,
    "gemma3_text": {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False},
    "gemma4_text": {
        **_HEADS,
        **_WINDOW,
        **_EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "head_dim": 12,
        "global_head_dim": 20,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": False,
    },
    "glm": _HEADS,
    "glm4": _HEADS,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": _WIDE,
    "gpt_oss": {**_HEADS, **_LOCAL, **_WINDOW},
    "granite": {
        **_GATED,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "granitemoehybrid": {
        **_GATED,
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
    },
    "granitemoe": {**_GATED, **_LOCAL},
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "hyperclovax": {**_GATED, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "jais2": {**_HEADS, "attention_bias": True},
    "mamba2": {
        **_NO_TOKENS,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 6,
        "head_dim": 32,
        "expand": 3,
        "n_groups": 2,
        "state_size": 20,
        "chunk_size": 16,
    },
    "lfm2": {**_GATED, "layer_types": ["conv", "full_attention"], "tie_word_embeddings": False},
    "lfm3": {
        **_HEADS,
        **_WINDOW,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
    "ministral": {**_HEADS, **_WINDOW},
    "ministral3": {
        **_HEADS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "mixtral": {**_GATED, **_LOCAL, "sliding_window": None},
    "nanochat": {**_GATED, "final_logit_softcapping": 4.0, "attention_bias": True},
    "nemotron": _GATED,
    "nemotron_h": {
        **_HEADS,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 20,
        "n_groups": 4,
        "ssm_state_size": 12,
        "chunk_size": 16,
    },
    "olmo": _GATED,
    "olmo2": _GATED,
    "olmo3": {**_GATED, **_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo_hybrid": {**_GATED, **_LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "olmoe": {**_GATED, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {**_PLAIN, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "phi": _GATED,
    "phi3": _GATED,
    "phimoe": {**_GATED, **_LOCAL, "router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {**_GATED, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": {**_HEADS, **_LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "qwen3_next": {**_HEADS, **_LINEAR, "layer_types": ["linear_attention", "full_attention"], "num_experts": 0},
    "seed_oss": {**_HEADS, "attention_bias": True},
    "smollm3": {**_GATED, "no_rope_layers": [1, 0]},
    "stablelm": _GATED,
    "starcoder2": {**_GATED, "tie_word_embeddings": False},
    "vaultgemma": {**_GEMMA2, "layer_types": ["sliding_attention", "full_attention"]},
    "bloom": {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4, **_NO_TOKENS},
    "codegen": {**_GPT, "rotary_dim": 8},
    "falcon": {**_PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gptj": {**_GPT, "rotary_dim": 8},
    "gpt_neo": {"vocab_size": VOCAB, "hidden_size": 64, "num_layers": 2, "num_heads": 4, **_NO_TOKENS}
    | {"attention_types": [[["global", "local"], 1]]},
    "mpt": {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 1024},
    "jamba": {**_GATED, "num_experts": 2},
    "kimi_linear": {
        **_WIDE,
        **_LATENT,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "mamba": {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 4},
    "recurrent_gemma": {**_WIDE, "lru_width": 64, "attention_window_size": 24},
}
"""Arguments of a tiny configuration of each family in docs/models.md."""
DESCRIBED = tuple(FAMILIES)
"""Those of the fused decoder."""
FAMILIES = DESCRIBED
"""Those that are tested in every way."""
ONLY_FUSED = {"bamba", "falcon", "falcon_h1", "granitemoehybrid", "lfm2", "lfm3", "mamba2", "nemotron_h"}
ONLY_FUSED |= {"lfm2_moe", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
"""Those that the general decoder refuses."""
SCANNED = {"olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
"""Those whose states Transformers computes in float32, whatever the model's type."""


def tiny_config(name: str, **options: Any) -> Any:
    """Make the configuration of a tiny model of the family."""
    return CONFIG_MAPPING[name](**{**TINY[name], **options})


RECURRENT = [name for name in DESCRIBED if spec_of(tiny_config(name)).recurrence is not None]
"""Those with layers whose states only rows that are computed change."""


def tiny_model(name: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Make a tiny random model of the family in float32, with weights wide enough that its text does not loop."""
    config = tiny_config(name, **options)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(
        config, experts_implementation="eager"
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "conv" in key:
                parameter.normal_(0, 0.5)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.12)
            elif "sinks" in key or "bias" in key or "alpha" in key:
                parameter.normal_(0, 0.3)
            elif "norm" in key or "router" in key or key.endswith(("A_log", ".D")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        for key, buffer in model.named_buffers():
            if key.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(0, 0.3)
            elif key.endswith("layer_scalar"):
                buffer.fill_(0.8)
    model.generation_config.eos_token_id = None
    model.set_experts_implementation("eager")
    return model.eval()


class Folders(dict[str, Path]):
    """Saved families by name, each made when it is first wanted."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: str) -> Path:
        self[name] = make_family(name, self._root)
        return self[name]


def make_family(name: str, folder: Path, seed: int = 0, **options: Any) -> Path:
    """Save a tiny random model of the family."""
    tiny_model(name, seed, **options).save_pretrained(folder / name)
    return folder / name
