"""The architectures of GGUF files with mixtures of experts in all layers, or all but the first (`architectures.py`).

Files that llama.cpp's converter makes of tiny models of each (that of llama-cpp-python 0.3.36) give llama.cpp's logits
in float32; those of `gpt-oss` where its rotation is not scaled, those of `deepseek2` but for groups of a softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.loading.gguf.architecture import (
    GRANITE_FACTORS,
    NEXT_TOKENS,
    WIDTH,
    Architecture,
    granite_factors,
    latent,
    layer_count,
    refuse,
)
from forerun.models.loading.gguf.mixture import (
    EXPERTS,
    GATING,
    LEADING,
    LOCAL,
    NORM,
    OPTIONS,
    SHARED_COUNT,
    SHARED_WIDTH,
    SIGMOID,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
    STEP,
    corrected,
    experts_of_qwen,
    mixture,
    num_dense,
    shared_count,
)
from forerun.utils.json_file import REQUIRED, Fields

_ROUTED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
_FACTOR = "rope.scaling.factor"


def mixtral(fields: Fields) -> dict[str, Any]:
    """Return the options of a file of Llama's architecture with experts."""
    experts = mixture(fields, LOCAL, width=fields.integer(WIDTH, low=1))
    return {"model_type": "mixtral", "sliding_window": None, **experts}


def _glm4_moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {**corrected(fields, _ROUTED, "n_shared_experts"), "first_k_dense_replace": num_dense(fields)}


def _deepseek2(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of DeepSeek V3, or of V2, whose scores are a softmax; older files do not say of which."""
    function = fields.integer(GATING, 0)
    is_corrected = any(".exp_probs_b." in name for name in tensors)
    is_v3 = function in SIGMOID or (not function and is_corrected)
    if fields.string("rope.scaling.type", "linear") == "linear" and fields.number(_FACTOR, 1.0) not in (0, 1):
        refuse(fields, f"{_FACTOR} is {fields.number(_FACTOR)} and rope.scaling.type linear")
    found = corrected(fields, _ROUTED, "n_shared_experts", SIGMOID if is_v3 else SOFTMAX)
    if not is_v3 and found["norm_topk_prob"]:
        refuse(fields, f"{NORM} is True and {GATING} a softmax")
    method = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    own = {"model_type": "deepseek_v3"} if is_v3 else {"topk_method": method}
    return {**latent(fields, width), **found, **own, "first_k_dense_replace": num_dense(fields)}


def _deepseek_yarn(fields: Fields) -> dict[str, Any]:
    """Return the parameters of DeepSeek's YaRN scaling. It multiplies scores, and no cosines and sines; the converter
    writes a tenth of the logarithm's multiplier."""
    if (attention := fields.number("rope.scaling.attn_factor", 1.0)) != 1:
        refuse(fields, f"rope.scaling.attn_factor is {attention}")
    multiplier = 10 * fields.number("rope.scaling.yarn_log_multiplier", low=1e-6)
    factor = fields.number("rope.scaling.yarn_attn_factor", 1.0, low=0)
    return {"attention_factor": factor, "mscale": multiplier, "mscale_all_dim": multiplier}


def _exaone_moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    found = corrected(fields, OPTIONS, "num_shared_experts")
    dense = num_dense(fields)
    kinds = ["dense" if layer < dense else "sparse" for layer in range(layer_count(fields))]
    return {**found, "mlp_layer_types": kinds}


def _ernie4_5_moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    experts = mixture(fields, OPTIONS, reads=(SHARED_COUNT, SHARED_WIDTH, LEADING, STEP))
    return {
        **experts,
        "moe_num_shared_experts": shared_count(fields, experts["moe_intermediate_size"]),
        "moe_layer_start_index": num_dense(fields),
        "moe_layer_end_index": layer_count(fields) - 1,
        "moe_layer_interval": fields.integer(STEP, 1, low=1),
        "moe_norm_min": 1e-12,
    }


def _granitemoe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    if not fields.flag("rope.scaling.finetuned", True):
        refuse(fields, "rope.scaling.finetuned is False")
    shared = fields.integer(SHARED_WIDTH, 0, low=0)
    return {
        **granite_factors(fields, width),
        **mixture(fields, LOCAL, width=fields.integer(WIDTH, low=1), reads=(SHARED_WIDTH,)),
        "model_type": "granitemoeshared" if shared else "granitemoe",
        **({"shared_intermediate_size": shared} if shared else {}),
    }


def _hunyuan_moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    options = ("num_experts", "moe_topk", "intermediate_size")
    experts = mixture(fields, options, reads=(SHARED_COUNT, SHARED_WIDTH))
    wide = experts["intermediate_size"]
    if (count := fields.integer(SHARED_COUNT, 1)) != 1:
        refuse(fields, f"{SHARED_COUNT} is {count}")
    if (shared := fields.integer(SHARED_WIDTH, wide)) != wide:
        refuse(fields, f"{SHARED_WIDTH} is {shared} and the experts are {wide} wide")
    return experts


def _olmoe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    options = ("num_experts", "num_experts_per_tok", "intermediate_size")
    experts = mixture(fields, options, adds_to_one=False, width=fields.integer(WIDTH, low=1))
    return {**experts, "norm_topk_prob": False}


_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
EXPERT_ARCHITECTURES = {
    "deepseek2": Architecture(
        "deepseek_v2",
        is_latent=True,
        constants={"attention_bias": False, "mlp_bias": False, "rope_interleave": True},
        options=_deepseek2,
        reads=(EXPERTS, NEXT_TOKENS),
        yarn=_deepseek_yarn,
    ),
    "dots1": Architecture("dots1", biases=_BIAS, options=_glm4_moe, reads=(EXPERTS,)),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", biases={"use_bias": "blk.0.attn_q.bias"}, options=_ernie4_5_moe, reads=(EXPERTS,)
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        windowed="exaone_moe",
        period=4,
        window=REQUIRED,
        options=_exaone_moe,
        reads=(EXPERTS, NEXT_TOKENS),
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        biases={**_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
        is_partly_rotated=True,
        options=_glm4_moe,
        reads=(EXPERTS, NEXT_TOKENS),
    ),
    # The bounds of the rotation's scaling are whole numbers in llama.cpp, and were not so in training.
    "gpt-oss": Architecture(
        "gpt_oss",
        biases=_BIAS,
        windowed="gpt_oss",
        period=2,
        window=REQUIRED,
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        yarn=lambda fields: {"truncate": False},
        options=lambda fields, *_: mixture(fields, LOCAL, gating=SOFTMAX_OF_CHOSEN, adds_to_one=False),
        reads=(EXPERTS,),
    ),
    "granitemoe": Architecture("granitemoe", True, _BIAS, options=_granitemoe, reads=(EXPERTS, *GRANITE_FACTORS)),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", biases=_BIAS, options=_hunyuan_moe, reads=(EXPERTS,)),
    "minimax-m2": Architecture(
        "minimax_m2",
        is_partly_rotated=True,
        options=lambda fields, *_: mixture(fields, LOCAL, gating=SIGMOID),
        reads=(EXPERTS,),
    ),
    "olmoe": Architecture("olmoe", biases=_BIAS, options=_olmoe, reads=(EXPERTS,)),
    "qwen2moe": Architecture(
        "qwen2_moe",
        biases={"qkv_bias": "blk.0.attn_q.bias"},
        options=lambda fields, *_: experts_of_qwen(fields, adds_to_one=False),
        reads=(EXPERTS,),
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", biases=_BIAS, options=lambda fields, *_: experts_of_qwen(fields, shares=False), reads=(EXPERTS,)
    ),
}
