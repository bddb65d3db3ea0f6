"""Families whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forerun.models.families.build import (
    NO_MODULES,
    Modules,
    attention,
    biases_of,
    decoder,
    feed_forward,
    layer,
    layer_windows,
    mixture,
    not_computed,
    require,
    rotated_share,
)
from forerun.models.families.gguf_keys import (
    EXPERTS,
    FINETUNED,
    GRANITE_FACTORS,
    LEADING,
    LOCAL,
    NEXT_TOKENS,
    OPTIONS,
    POST_ATTENTION,
    QUERY_BIAS,
    ROUTED,
    SHARED_COUNT,
    SHARED_WIDTH,
    SIGMOID,
    SOFTMAX_OF_CHOSEN,
    STEP,
    WIDTH,
    Architecture,
    layer_count,
    num_dense,
    read_corrected_experts,
    read_experts,
    read_granite_factors,
    read_qwen_experts,
    refuse,
    shared_count,
)
from forerun.models.families.llama import BEHIND, cohere_layer, granite, granite_attention, hunyuan
from forerun.models.spec.attention import HEAD_NORMS, QKV, AnyAttention
from forerun.models.spec.decoder import DecoderSpec, Norms, Output
from forerun.models.spec.feed_forward import EXPERT, AnyFeedForward, Experts
from forerun.models.spec.layer import LLAMA_NORMS, LayerSpec
from forerun.utils.json_file import REQUIRED, Fields

_OF_MIXTRAL = {"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
"""Names in files, and in Transformers."""
_CORRECTION = "e_score_correction_bias"


def shared_mlp(module: str) -> dict[str, str]:
    """Return the modules of an expert of all rows."""
    return {f"shared_{each}": f"{module}.{each}_proj" for each in ("gate", "up", "down")}


def some_with_experts(
    config: Any, own: AnyAttention, dense: AnyFeedForward, experts: AnyFeedForward, are_sparse: Sequence[bool]
) -> list[LayerSpec]:
    """Return layers of which some have experts. are_sparse: which."""
    without = layer(config, own, dense)
    having = replace(without, feed_forward=experts)
    return [having if is_sparse else without for is_sparse in are_sparse]


def behind_dense(config: Any) -> list[bool]:
    """Return which layers have experts: all behind the first ones."""
    return [index >= config.first_k_dense_replace for index in range(config.num_hidden_layers)]


def sparse_of(config: Any) -> list[bool]:
    """Return which layers have experts, where a configuration has the type of each."""
    return [kind == "sparse" for kind in config.mlp_layer_types]


def _local(config: Any, modules: Modules = NO_MODULES, **differing: Any) -> Experts:
    """Return the experts of Mixtral and of those that have its options. Arguments as of `mixture`."""
    return mixture(
        config,
        modules,
        **{
            "num_experts": config.num_local_experts,
            "moe_intermediate_size": config.intermediate_size,
            **differing,
        },
    )


def _mixtral(config: Any) -> DecoderSpec:
    return decoder(config, layer(config, attention(config), _local(config)), renamed=_OF_MIXTRAL)


def _minimax_m2(config: Any) -> DecoderSpec:
    own = attention(config, HEAD_NORMS, has_wide_norms=True, rotated_share=rotated_share(config))
    experts = _local(config, e_score_correction_bias=f"mlp.{_CORRECTION}", scoring="sigmoid")
    return decoder(config, layer(config, own, experts), renamed=_OF_MIXTRAL)


def _phimoe(config: Any) -> DecoderSpec:
    # of scaled rotations it has its own factors, and of experts two, whatever the configuration says
    if config.rope_parameters["rope_type"] != "default":
        not_computed(f"rope_parameters={config.rope_parameters!r}")
    require(config, "num_experts_per_tok", 2)
    experts = _local(
        config,
        router="mlp.router",
        scoring="sparsemixer",
        distance=2 * config.router_jitter_noise,
        norm_topk_prob=False,
    )
    return decoder(
        config,
        layer(config, attention(config, biases=biases_of(config, "attention_bias")), experts),
        norms=Norms(config.rms_norm_eps, "layer", has_biases=True),
        output=Output(has_bias=bool(config.lm_head_bias)),
        renamed={"block_sparse_moe.gate.": "mlp.router.", **_OF_MIXTRAL},
    )


def _gpt_oss(config: Any) -> DecoderSpec:
    experts = _local(
        config,
        biases=frozenset({"router", *EXPERT}),
        activation="clamped_swiglu",
        router="mlp.router",
        is_transposed=True,
        swiglu=(config.swiglu_alpha, config.swiglu_limit),
    )
    own = attention(config, biases=biases_of(config, "attention_bias"), sinks="self_attn.sinks")
    return decoder(config, layer(config, own, experts))


def _are_sparse_of_qwen(config: Any) -> list[bool]:
    """Return which layers of Qwen2-MoE or a successor have experts."""
    dense = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", 1)
    indices = range(config.num_hidden_layers)
    return [index not in dense and config.num_experts > 0 and (index + 1) % step == 0 for index in indices]


def _qwen_experts(config: Any) -> Experts:
    """Return the experts of Qwen2-MoE or a successor."""
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    return mixture(
        config,
        shared_mlp("mlp.shared_expert") if shared else {},
        num_experts=config.num_experts,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=shared,
        shared_expert_gate="mlp.shared_expert_gate" if shared else None,
        norm_topk_prob=getattr(config, "norm_topk_prob", True),
    )


def qwen_layers(config: Any, own: AnyAttention) -> list[LayerSpec]:
    """Return the layers of Qwen2-MoE or a successor, of which some, all or none have experts."""
    dense = feed_forward(config)
    are_sparse = _are_sparse_of_qwen(config) if hasattr(config, "num_experts") else []
    if not any(are_sparse):
        return [layer(config, own, dense)] * config.num_hidden_layers
    return some_with_experts(config, own, dense, _qwen_experts(config), are_sparse)


def _qwen2_moe(config: Any) -> DecoderSpec:
    own = attention(config, biases=QKV if config.qkv_bias else frozenset())
    return decoder(config, qwen_layers(config, own))


def _qwen3_moe(config: Any) -> DecoderSpec:
    own = attention(config, HEAD_NORMS, biases=biases_of(config, "attention_bias"))
    return decoder(config, qwen_layers(config, own))


def _olmoe(config: Any, norms: Mapping[str, str] = LLAMA_NORMS) -> DecoderSpec:
    experts = mixture(
        config,
        num_experts=config.num_experts,
        moe_intermediate_size=config.intermediate_size,
        norm_topk_prob=config.norm_topk_prob,
    )
    own = attention(config, HEAD_NORMS, biases=biases_of(config, "attention_bias"), has_wide_norms=True)
    return decoder(config, layer(config, own, experts, norms))


def _flex_olmo(config: Any) -> DecoderSpec:
    return _olmoe(config, BEHIND)


def granite_experts(config: Any) -> tuple[Experts, dict[str, str]]:
    """Return the experts of Granite 3 and 4, and the names of files."""
    moe = "block_sparse_moe"
    shared = getattr(config, "shared_intermediate_size", 0)
    both = "shared_mlp.input_linear"
    modules = {"shared_gate": both, "shared_up": both, "shared_down": "shared_mlp.output_linear"}
    experts = _local(
        config,
        modules if shared else {},
        router=f"{moe}.router",
        experts={role: f"{moe}.experts.{{}}.{role[7:]}_proj" for role in EXPERT},
        stacked=f"{moe}.experts",
        shared_intermediate_size=shared,
    )
    names = {f"{moe}.input_linear.weight": f"{moe}.experts.gate_up_proj"}
    names |= {f"{moe}.output_linear.weight": f"{moe}.experts.down_proj", f"{moe}.router.layer.": f"{moe}.router."}
    return experts, names


def _granitemoe(config: Any) -> DecoderSpec:
    experts, renamed = granite_experts(config)
    return granite(config, layer(config, granite_attention(config), experts), renamed=renamed)


def corrected_experts(config: Any, count: int, shared: int) -> Experts:
    """Return the experts of DeepSeek V3 and its successors: sigmoids, with what is added for the choice alone.

    count: of them. shared: of those that every row is given to.
    """
    groups = getattr(config, "n_group", None) or 1
    return mixture(
        config,
        shared_mlp("mlp.shared_experts") if shared else {},
        num_experts=count,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=config.moe_intermediate_size * shared,
        e_score_correction_bias=f"mlp.gate.{_CORRECTION}",
        unrounded=True,
        scoring="sigmoid",
        n_group=groups if groups > 1 else 0,
        topk_group=config.topk_group if groups > 1 else 0,
        norm_topk_prob=config.norm_topk_prob,
        least_sum=1e-20,
        routed_scaling_factor=config.routed_scaling_factor,
    )


def _glm4_moe(config: Any) -> DecoderSpec:
    own = attention(
        config,
        HEAD_NORMS if config.use_qk_norm else {},
        biases=QKV if config.attention_bias else frozenset(),
        rotated_share=rotated_share(config),
    )
    experts = corrected_experts(config, config.n_routed_experts, config.n_shared_experts)
    return decoder(config, some_with_experts(config, own, feed_forward(config), experts, behind_dense(config)))


def _dots1(config: Any) -> DecoderSpec:
    own = attention(config, HEAD_NORMS, biases=biases_of(config, "attention_bias"))
    experts = corrected_experts(config, config.n_routed_experts, config.n_shared_experts or 0)
    return decoder(config, some_with_experts(config, own, feed_forward(config), experts, behind_dense(config)))


def _exaone_moe(config: Any) -> DecoderSpec:
    own = attention(config, HEAD_NORMS)
    experts = corrected_experts(config, config.num_experts, config.num_shared_experts)
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    return decoder(
        config,
        some_with_experts(config, own, feed_forward(config), experts, sparse_of(config)),
        turned=[config.sliding_window is None or is_windowed for is_windowed in windows],
        renamed={f"mlp.{_CORRECTION}": f"mlp.gate.{_CORRECTION}"},
    )


def _ernie4_5_moe(config: Any) -> DecoderSpec:
    first = config.moe_layer_start_index
    last = config.moe_layer_end_index
    step = config.moe_layer_interval
    shared = config.moe_num_shared_experts
    biases = biases_of(config, "use_bias")
    experts = mixture(
        config,
        shared_mlp("mlp.shared_experts") if shared else {},
        biases=frozenset(f"shared_{role}" for role in ("gate", "up", "down") if role in biases),
        num_experts=config.num_experts,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=config.moe_intermediate_size * shared,
        e_score_correction_bias=f"mlp.gate.moe_statics.{_CORRECTION}",
        bias_shape=(1, config.num_experts),
        unrounded=True,
        least_sum=config.moe_norm_min,
    )
    own = attention(config, biases=biases, is_interleaved=True)
    indices = range(config.num_hidden_layers)
    are_sparse = [(index + 1) % step == 0 and first <= index <= last for index in indices]
    return decoder(
        config,
        some_with_experts(config, own, feed_forward(config, biases=biases), experts, are_sparse),
        output=Output(has_bias=bool(config.use_bias)),
        renamed={"mlp.moe_statics.": "mlp.gate.moe_statics."},
    )


def _hunyuan_v1_moe(config: Any) -> DecoderSpec:
    count = config.num_experts
    top = config.moe_topk
    if isinstance(count, list) or isinstance(top, list):
        raise ValueError("layers have different numbers of experts")
    experts = mixture(
        config,
        shared_mlp("mlp.shared_mlp"),
        num_experts=count,
        num_experts_per_tok=top,
        moe_intermediate_size=config.intermediate_size,
        router="mlp.gate.wg",
        shared_intermediate_size=config.intermediate_size,
        unrounded=True,
    )
    return hunyuan(config, experts)


def _cohere2_moe(config: Any) -> DecoderSpec:
    are_dense = [kind == "dense" for kind in config.mlp_layer_types]
    shared = config.num_shared_experts
    is_mean = config.shared_expert_combination_strategy == "average"
    experts = mixture(
        config,
        shared_mlp("mlp.shared_experts") if shared else {},
        out_scale=0.5 if shared and is_mean else 1.0,
        num_experts=config.num_experts,
        moe_intermediate_size=config.intermediate_size,
        shared_intermediate_size=config.intermediate_size * shared,
        scoring=config.expert_selection_fn,
        norm_topk_prob=config.norm_topk_prob or config.expert_selection_fn == "softmax",
    )
    turned_dense = config.prefix_dense_sliding_window_pattern == 1
    dense = feed_forward(config, intermediate_size=config.prefix_dense_intermediate_size or config.intermediate_size)
    norms = Norms(config.layer_norm_eps, "layer") if config.rms_norm_eps is None else Norms(config.rms_norm_eps)
    windows = layer_windows(config)
    return decoder(
        config,
        [cohere_layer(config, dense if is_dense else experts) for is_dense in are_dense],
        turned=[
            window is not None or (is_dense and turned_dense)
            for window, is_dense in zip(windows, are_dense, strict=True)
        ],
        norms=norms,
        output=Output(scale=config.logit_scale),
    )


MOE_FAMILIES: Mapping[str, Callable[[Any], DecoderSpec]] = {
    "cohere2_moe": _cohere2_moe,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone_moe": _exaone_moe,
    "flex_olmo": _flex_olmo,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}


def _read_glm4_moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_corrected_experts(fields, ROUTED, "n_shared_experts"), "first_k_dense_replace": num_dense(fields)}


def _read_exaone_moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    found = read_corrected_experts(fields, OPTIONS, "num_shared_experts")
    dense = num_dense(fields)
    kinds = ["dense" if layer < dense else "sparse" for layer in range(layer_count(fields))]
    return {**found, "mlp_layer_types": kinds}


def _read_ernie4_5_moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    experts = read_experts(fields, OPTIONS, reads=(SHARED_COUNT, SHARED_WIDTH, LEADING, STEP))
    return {
        **experts,
        "moe_num_shared_experts": shared_count(fields, experts["moe_intermediate_size"]),
        "moe_layer_start_index": num_dense(fields),
        "moe_layer_end_index": layer_count(fields) - 1,
        "moe_layer_interval": fields.integer(STEP, 1, low=1),
        "moe_norm_min": 1e-12,
    }


def _read_granitemoe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    if not fields.flag(FINETUNED, True):
        refuse(fields, f"{FINETUNED} is False")
    shared = fields.integer(SHARED_WIDTH, 0, low=0)
    return {
        **read_granite_factors(fields, width),
        **read_experts(fields, LOCAL, width=fields.integer(WIDTH, low=1), reads=(SHARED_WIDTH,)),
        "model_type": "granitemoeshared" if shared else "granitemoe",
        **({"shared_intermediate_size": shared} if shared else {}),
    }


def _read_hunyuan_moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    options = ("num_experts", "moe_topk", "intermediate_size")
    experts = read_experts(fields, options, reads=(SHARED_COUNT, SHARED_WIDTH))
    wide = experts["intermediate_size"]
    if (count := fields.integer(SHARED_COUNT, 1)) != 1:
        refuse(fields, f"{SHARED_COUNT} is {count}")
    if (shared := fields.integer(SHARED_WIDTH, wide)) != wide:
        refuse(fields, f"{SHARED_WIDTH} is {shared} and the experts are {wide} wide")
    return experts


def _read_olmoe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    options = ("num_experts", "num_experts_per_tok", "intermediate_size")
    experts = read_experts(fields, options, adds_to_one=False, width=fields.integer(WIDTH, low=1))
    return {**experts, "norm_topk_prob": False}


MOE_ARCHITECTURES: Mapping[str, Architecture] = {
    "dots1": Architecture("dots1", biases=QUERY_BIAS, options=_read_glm4_moe, reads=(EXPERTS,)),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", biases={"use_bias": "blk.0.attn_q.bias"}, options=_read_ernie4_5_moe, reads=(EXPERTS,)
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        windowed="exaone_moe",
        period=4,
        window=REQUIRED,
        options=_read_exaone_moe,
        reads=(EXPERTS, NEXT_TOKENS),
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        biases={**QUERY_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
        is_partly_rotated=True,
        options=_read_glm4_moe,
        reads=(EXPERTS, NEXT_TOKENS),
        tensors=POST_ATTENTION,
    ),
    # The bounds of the rotation's scaling are whole numbers in llama.cpp, and were not so in training.
    "gpt-oss": Architecture(
        "gpt_oss",
        biases=QUERY_BIAS,
        windowed="gpt_oss",
        period=2,
        window=REQUIRED,
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        yarn=lambda fields: {"truncate": False},
        options=lambda fields, *_: read_experts(fields, LOCAL, gating=SOFTMAX_OF_CHOSEN, adds_to_one=False),
        reads=(EXPERTS,),
        tensors=POST_ATTENTION,
    ),
    "granitemoe": Architecture(
        "granitemoe", True, QUERY_BIAS, options=_read_granitemoe, reads=(EXPERTS, *GRANITE_FACTORS)
    ),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", biases=QUERY_BIAS, options=_read_hunyuan_moe, reads=(EXPERTS,)),
    "minimax-m2": Architecture(
        "minimax_m2",
        is_partly_rotated=True,
        options=lambda fields, *_: read_experts(fields, LOCAL, gating=SIGMOID),
        reads=(EXPERTS,),
    ),
    "olmoe": Architecture("olmoe", biases=QUERY_BIAS, options=_read_olmoe, reads=(EXPERTS,)),
    "qwen2moe": Architecture(
        "qwen2_moe",
        biases={"qkv_bias": "blk.0.attn_q.bias"},
        options=lambda fields, *_: read_qwen_experts(fields, adds_to_one=False),
        reads=(EXPERTS,),
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        biases=QUERY_BIAS,
        options=lambda fields, *_: read_qwen_experts(fields, shares=False),
        reads=(EXPERTS,),
    ),
}
