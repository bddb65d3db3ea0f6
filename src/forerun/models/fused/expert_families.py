"""How the families whose feed-forward layers are mixtures of experts differ from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.models.fused.llama_families import cohere, granite, hunyuan
from forerun.models.fused.options import Difference, biases_of, layer_windows, rotated_share
from forerun.models.spec.attention import HEAD_NORMS, QKV
from forerun.models.spec.feed_forward import EXPERT, Experts

_OF_MIXTRAL = {"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
"""Names in files, and in Transformers."""
_CORRECTION = "e_score_correction_bias"


def mlp(module: str) -> dict[str, str]:
    """Return the modules of an expert of all rows."""
    return {f"shared_{each}": f"{module}.{each}_proj" for each in ("gate", "up", "down")}


def _mixtral(config: Any) -> Difference:
    experts = Experts(
        num_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.intermediate_size,
    )
    return {"experts": experts, "renamed": _OF_MIXTRAL}


def mixed_of_qwen(config: Any) -> list[bool]:
    """Return which layers of Qwen2-MoE or a successor have experts."""
    dense = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", 1)
    layers = range(config.num_hidden_layers)
    return [layer not in dense and config.num_experts > 0 and (layer + 1) % step == 0 for layer in layers]


def experts_of_qwen(config: Any) -> Difference:
    """Return the experts of Qwen2-MoE or a successor, and the modules of the one of all rows."""
    if not any(mixed_of_qwen(config)):
        return {}
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    experts = Experts(
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=shared,
        shared_expert_gate="mlp.shared_expert_gate" if shared else None,
        norm_topk_prob=getattr(config, "norm_topk_prob", True),
    )
    return {"experts": experts, "mixed": mixed_of_qwen(config), "modules": mlp("mlp.shared_expert") if shared else {}}


def _qwen3_moe(config: Any) -> Difference:
    found = experts_of_qwen(config)
    return {**found, "modules": HEAD_NORMS, "biases": biases_of(config, "attention_bias")}


def _olmoe(config: Any) -> Difference:
    return {
        "modules": HEAD_NORMS,
        "biases": biases_of(config, "attention_bias"),
        "has_wide_norms": True,
        "experts": Experts(
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            moe_intermediate_size=config.intermediate_size,
            norm_topk_prob=config.norm_topk_prob,
        ),
    }


def experts_of_granite(config: Any) -> Difference:
    """Return the experts of Granite 3 and 4, and the names of files."""
    moe = "block_sparse_moe"
    experts = Experts(
        num_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.intermediate_size,
        router=f"{moe}.router",
        experts={role: f"{moe}.experts.{{}}.{role[7:]}_proj" for role in EXPERT},
        stacked=f"{moe}.experts",
        shared_intermediate_size=getattr(config, "shared_intermediate_size", 0),
    )
    stacks = {f"{moe}.input_linear.weight": f"{moe}.experts.gate_up_proj"}
    stacks |= {f"{moe}.output_linear.weight": f"{moe}.experts.down_proj", f"{moe}.router.layer.": f"{moe}.router."}
    both = "shared_mlp.input_linear"
    shared = {"shared_gate": both, "shared_up": both, "shared_down": "shared_mlp.output_linear"}
    return {"experts": experts, "renamed": stacks, "modules": shared if experts.shared_intermediate_size else {}}


def _granitemoe(config: Any) -> Difference:
    return {**granite(config), **experts_of_granite(config)}


def corrected(config: Any, count: int, shared: int, **differing: Any) -> Difference:
    """Return the experts of DeepSeek V3 and its successors: sigmoids, with what is added for the choice alone."""
    groups = getattr(config, "n_group", None) or 1
    width = config.moe_intermediate_size
    options = {
        "e_score_correction_bias": f"mlp.gate.{_CORRECTION}",
        "unrounded": True,
        "scoring": "sigmoid",
        "n_group": groups if groups > 1 else 0,
        "topk_group": config.topk_group if groups > 1 else 0,
        "norm_topk_prob": config.norm_topk_prob,
        "least_sum": 1e-20,
        "routed_scaling_factor": config.routed_scaling_factor,
    }
    experts = Experts(
        num_experts=count,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=width,
        shared_intermediate_size=width * shared,
        **options,
        **differing,
    )
    return {"experts": experts, "modules": mlp("mlp.shared_experts") if shared else {}}


def behind_dense(config: Any) -> list[bool]:
    """Return which layers have experts: all behind the first ones."""
    return [layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers)]


def _glm4_moe(config: Any) -> Difference:
    found = corrected(config, config.n_routed_experts, config.n_shared_experts)
    return {
        **found,
        "modules": found["modules"] | (HEAD_NORMS if config.use_qk_norm else {}),
        "mixed": behind_dense(config),
        "biases": QKV if config.attention_bias else frozenset(),
        "rotated_share": rotated_share(config),
    }


def _dots1(config: Any) -> Difference:
    found = corrected(config, config.n_routed_experts, config.n_shared_experts or 0)
    modules = found["modules"] | HEAD_NORMS
    return {**found, "modules": modules, "mixed": behind_dense(config), "biases": biases_of(config, "attention_bias")}


def _exaone_moe(config: Any) -> Difference:
    found = corrected(config, config.num_experts, config.num_shared_experts)
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        **found,
        "modules": found["modules"] | HEAD_NORMS,
        "mixed": [kind == "sparse" for kind in config.mlp_layer_types],
        "turned": [config.sliding_window is None or is_windowed for is_windowed in windows],
        "renamed": {f"mlp.{_CORRECTION}": f"mlp.gate.{_CORRECTION}"},
    }


def _ernie4_5_moe(config: Any) -> Difference:
    first = config.moe_layer_start_index
    last = config.moe_layer_end_index
    step = config.moe_layer_interval
    layers = range(config.num_hidden_layers)
    shared = config.moe_num_shared_experts
    experts = Experts(
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=config.moe_intermediate_size * shared,
        e_score_correction_bias=f"mlp.gate.moe_statics.{_CORRECTION}",
        bias_shape=(1, config.num_experts),
        unrounded=True,
        least_sum=config.moe_norm_min,
    )
    own = biases_of(config, "use_bias") | ({"head"} if config.use_bias else set())
    return {
        "experts": experts,
        "modules": mlp("mlp.shared_experts") if shared else {},
        "mixed": [(layer + 1) % step == 0 and first <= layer <= last for layer in layers],
        "biases": own | {f"shared_{role}" for role in ("gate", "up", "down") if role in own},
        "is_interleaved": True,
        "renamed": {"mlp.moe_statics.": "mlp.gate.moe_statics."},
    }


def _hunyuan_v1_moe(config: Any) -> Difference:
    count = config.num_experts
    top = config.moe_topk
    if isinstance(count, list) or isinstance(top, list):
        raise ValueError("layers have different numbers of experts")
    experts = Experts(
        num_experts=count,
        num_experts_per_tok=top,
        moe_intermediate_size=config.intermediate_size,
        router="mlp.gate.wg",
        shared_intermediate_size=config.intermediate_size,
        unrounded=True,
    )
    found = hunyuan(config)
    return {**found, "experts": experts, "modules": found["modules"] | mlp("mlp.shared_mlp")}


def _minimax_m2(config: Any) -> Difference:
    experts = Experts(
        num_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.intermediate_size,
        e_score_correction_bias=f"mlp.{_CORRECTION}",
        scoring="sigmoid",
    )
    return {
        "experts": experts,
        "modules": HEAD_NORMS,
        "has_wide_norms": True,
        "rotated_share": rotated_share(config),
        "renamed": _OF_MIXTRAL,
    }


def _gpt_oss(config: Any) -> Difference:
    experts = Experts(
        num_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.intermediate_size,
        router="mlp.router",
        is_transposed=True,
        swiglu=(config.swiglu_alpha, config.swiglu_limit),
    )
    return {
        "experts": experts,
        "activation": "clamped_swiglu",
        "sinks": "self_attn.sinks",
        "biases": biases_of(config, "attention_bias") | {"router", *EXPERT},
    }


def _cohere2_moe(config: Any) -> Difference:
    dense = [kind == "dense" for kind in config.mlp_layer_types]
    shared = config.num_shared_experts
    is_mean = config.shared_expert_combination_strategy == "average"
    experts = Experts(
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.intermediate_size,
        shared_intermediate_size=config.intermediate_size * shared,
        scoring=config.expert_selection_fn,
        norm_topk_prob=config.norm_topk_prob or config.expert_selection_fn == "softmax",
    )
    turned_dense = config.prefix_dense_sliding_window_pattern == 1
    windows = layer_windows(config)
    norms: Difference = {"norm_kind": "rms", "eps": config.rms_norm_eps} if config.rms_norm_eps is not None else {}
    return {
        **cohere(config),
        **norms,
        "modules": {"mlp_norm": "input_layernorm"} | (mlp("mlp.shared_experts") if shared else {}),
        "experts": experts,
        "mixed": [not each for each in dense],
        "intermediate": config.prefix_dense_intermediate_size or config.intermediate_size,
        "turned": [window is not None or (each and turned_dense) for window, each in zip(windows, dense, strict=True)],
        "feed_scales": [0.5 if shared and is_mean and not each else 1.0 for each in dense],
    }


def _phimoe(config: Any) -> Difference:
    experts = Experts(
        num_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.intermediate_size,
        router="mlp.router",
        scoring="sparsemixer",
        distance=2 * config.router_jitter_noise,
        norm_topk_prob=False,
    )
    # of scaled rotations it has its own factors, and of experts two, whatever the configuration says
    unserved = ["rope_parameters"] if config.rope_parameters["rope_type"] != "default" else []
    return {
        "experts": experts,
        "norm_kind": "layer",
        "biases": biases_of(config, "attention_bias") | {"norms"} | ({"head"} if config.lm_head_bias else set()),
        "renamed": {"block_sparse_moe.gate.": "mlp.router.", **_OF_MIXTRAL},
        "unserved": [*unserved, *(["num_experts_per_tok"] if experts.num_experts_per_tok != 2 else [])],
    }


EXPERT_FAMILIES: Mapping[str, Callable[[Any], Difference]] = {
    "cohere2_moe": _cohere2_moe,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone_moe": _exaone_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": lambda config: {**experts_of_qwen(config), "biases": QKV if config.qkv_bias else frozenset()},
    "qwen3_moe": _qwen3_moe,
}
