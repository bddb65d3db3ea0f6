"""Families that are made like Gemma."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.models.families.build import (
    ACTIVATIONS,
    NO_MODULES,
    Modules,
    activation,
    attention,
    biases_of,
    decoder,
    feed_forward,
    layer,
    mixture,
)
from forerun.models.families.gguf_keys import (
    ATTENTION_CAP,
    EXPERTS,
    FINAL_CAP,
    GELU_TANH,
    HEADS,
    KEY_HEADS,
    PATTERN,
    WIDTH,
    Architecture,
    counts_of,
    layer_count,
    read_experts,
    refuse,
)
from forerun.models.families.moe import shared_mlp
from forerun.models.spec.attention import HEAD_NORMS
from forerun.models.spec.decoder import DecoderSpec, Embeddings, Norms, Output, PerLayerInputs
from forerun.models.spec.feed_forward import EXPERT, Experts
from forerun.models.spec.layer import LayerSpec, PerLayerInput
from forerun.utils.json_file import Fields

_SANDWICH = {
    "input_norm": "input_layernorm",
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "feed_norm": "post_feedforward_layernorm",
}
_BEFORE = {"input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
_BESIDE_EXPERTS = {
    **shared_mlp("mlp"),
    "expert_norm": "pre_feedforward_layernorm_2",
    "shared_norm": "post_feedforward_layernorm_1",
    "routed_norm": "post_feedforward_layernorm_2",
}
"""Modules of a layer of Gemma 4 whose experts stand beside its own feed-forward layer."""


def _decoder(config: Any, own: LayerSpec, softcap: float | None = None) -> DecoderSpec:
    """Return a decoder whose norms add 1 to their weights."""
    norms = Norms(config.rms_norm_eps, offset=1.0)
    scaled = Embeddings(scale=config.hidden_size**0.5)
    return decoder(config, own, norms=norms, embeddings=scaled, output=Output(softcap=softcap))


def _gemma(config: Any) -> DecoderSpec:
    own = attention(config, biases=biases_of(config, "attention_bias"))
    return _decoder(config, layer(config, own, feed_forward(config)))


def _gemma2(
    config: Any, norms: Mapping[str, str] = _SANDWICH, modules: Modules = NO_MODULES, **differing: Any
) -> DecoderSpec:
    """Return Gemma 2, or a successor. modules, differing: of its attention, as of `attention`."""
    own = attention(
        config,
        modules,
        biases=biases_of(config, "attention_bias"),
        **{
            "scale": config.query_pre_attn_scalar**-0.5,
            "softcap": config.attn_logit_softcapping,
            **differing,
        },
    )
    feed = feed_forward(config, activation=ACTIVATIONS.get(config.hidden_activation, ""))
    return _decoder(config, layer(config, own, feed, norms), config.final_logit_softcapping)


def _gemma3(config: Any) -> DecoderSpec:
    # Transformers keeps a cap of its scores, and does not read it
    return _gemma2(config, modules=HEAD_NORMS, softcap=None)


def _vaultgemma(config: Any) -> DecoderSpec:
    return _gemma2(config, _BEFORE)


def _gemma4(config: Any) -> DecoderSpec:
    """Return Gemma 4: heads of its layers of full attention have another width."""
    inputs = None
    if width := config.hidden_size_per_layer_input:
        names = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
        inputs = PerLayerInputs(width, config.vocab_size_per_layer_input, *names)
    experts = _gemma4_experts(config) if config.enable_moe_block else None
    return decoder(
        config,
        [_gemma4_layer(config, index, experts) for index in range(config.num_hidden_layers)],
        embeddings=Embeddings(scale=config.hidden_size**0.5, per_layer=inputs),
        output=Output(softcap=config.final_logit_softcapping),
    )


def _gemma4_layer(config: Any, index: int, experts: Experts | None) -> LayerSpec:
    """Return a layer. From some on, they read the keys and values of the last layer of their type before these."""
    kind = config.layer_types[index]
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    lacking = ["value"] if config.attention_k_eq_v and kind != "sliding_attention" else []
    keys_of = None
    width = config.intermediate_size
    if index >= first_shared:
        keys_of = max(other for other in range(first_shared) if config.layer_types[other] == kind)
        lacking = ["key", "value", "key_norm"]
        width *= 2 if config.use_double_wide_mlp else 1
    own = attention(
        config.per_layer_config[kind],
        {**HEAD_NORMS, **dict.fromkeys(lacking)},
        biases=biases_of(config, "attention_bias"),
        scale=1.0,
        norms_values=True,
        keys_of=keys_of,
    )
    inputs = None
    if config.hidden_size_per_layer_input:
        modules = {role: role for role in (*PerLayerInput.ROLES, *PerLayerInput.NORMS)}
        inputs = PerLayerInput(width=config.hidden_size_per_layer_input, activation=activation(config), modules=modules)
    feed = experts or feed_forward(config, intermediate_size=width)
    return layer(config, own, feed, _SANDWICH, per_layer_input=inputs, scalar="layer_scalar")


def _gemma4_experts(config: Any) -> Experts:
    if config.use_double_wide_mlp and config.num_kv_shared_layers:
        raise ValueError("feed-forward layers of several widths beside experts")
    return mixture(
        config,
        _BESIDE_EXPERTS,
        num_experts=config.num_experts,
        num_experts_per_tok=config.top_k_experts,
        moe_intermediate_size=config.moe_intermediate_size,
        router="router.proj",
        experts={role: f"experts.{{}}.{role[7:]}_proj" for role in EXPERT},
        stacked="experts",
        shared_intermediate_size=config.intermediate_size,
        router_norm="router.scale",
        per_expert_scale="router.per_expert_scale",
    )


GEMMA_FAMILIES: Mapping[str, Callable[[Any], DecoderSpec]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "vaultgemma": _vaultgemma,
}


def _scores_of_27b(fields: Fields, width: int, layers_of_27b: int) -> dict[str, Any]:
    """Return the option of the scale of scores in Gemma 2 and 3. No key says that 27B, known by its layers, scales them
    by another width than that of a head."""
    if fields.integer("block_count") == layers_of_27b:
        width = fields.integer("embedding_length") // fields.integer(HEADS)
    return {"query_pre_attn_scalar": width}


def _caps(fields: Fields, attention: float, final: float) -> dict[str, Any]:
    """Return the bounds of scores and logits. attention, final: where the file says none; 0: not bounded."""
    return {
        "attn_logit_softcapping": fields.number(ATTENTION_CAP, attention, low=0) or None,
        "final_logit_softcapping": fields.number(FINAL_CAP, final, low=0) or None,
    }


def _read_gemma2(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {**_scores_of_27b(fields, width, 46), **_caps(fields, 50.0, 30.0)}


def _read_gemma3(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {**_scores_of_27b(fields, width, 62), **_caps(fields, 0.0, 0.0)}


def _read_gemma4(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Gemma 4. width: of a head in layers of full attention."""
    count = layer_count(fields)
    sliding = fields.list_of(PATTERN, bool)
    local = fields.integer("attention.key_length_swa", width, low=1)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (other := fields.integer(key, local)) != local:
            refuse(fields, f"{key} is {other} and the heads of layers with a window are {local} wide")
    shared = fields.integer("attention.shared_kv_layers", 0, low=0, high=count - 1)
    own = [index for index in range(count - shared) if not sliding[index]]
    are_keys = {f"blk.{index}.attn_v.weight" not in tensors for index in own} or {False}
    heads = [
        {each for each, kind in zip(counts_of(fields, KEY_HEADS), sliding, strict=False) if kind is is_local}
        for is_local in (True, False)
    ]
    heads = [each or heads[1 - place] for place, each in enumerate(heads)]
    if len(are_keys) > 1 or max(map(len, heads)) > 1 or (heads[0] != heads[1] and are_keys == {False}):
        refuse(fields, f"{KEY_HEADS} or the tensors attn_v differ between layers of one kind")
    widths = counts_of(fields, WIDTH)
    is_double = widths[-1] != widths[0]
    if widths != [widths[0]] * (count - shared) + [widths[0] * (1 + is_double)] * shared:
        refuse(fields, f"{WIDTH} differs from layer to layer")
    experts = (
        read_experts(fields, ("num_experts", "top_k_experts", "moe_intermediate_size"))
        if fields.integer(EXPERTS, 0, low=0)
        else {}
    )
    inputs = fields.integer("embedding_length_per_layer_input", 0, low=0)
    table = "per_layer_token_embd.weight"
    return {
        "head_dim": local,
        "global_head_dim": width,
        "num_key_value_heads": min(heads[0]),
        "num_global_key_value_heads": min(heads[1]),
        "attention_k_eq_v": are_keys == {True},
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_double,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": tensors[table].shape[0] if table in tensors else 1,
        "final_logit_softcapping": fields.number(FINAL_CAP, 0.0, low=0) or None,
        "enable_moe_block": bool(experts),
        **experts,
    }


GEMMA_ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": Architecture("gemma", constants={"hidden_act": GELU_TANH}),
    "gemma2": Architecture(
        "gemma2",
        windowed="gemma2",
        period=2,
        window=4096,
        constants={"hidden_activation": GELU_TANH},
        options=_read_gemma2,
        reads=(ATTENTION_CAP, FINAL_CAP),
    ),
    "gemma3": Architecture(
        "gemma3_text",
        windowed="gemma3_text",
        period=6,
        local_base=10000.0,
        constants={"hidden_activation": GELU_TANH},
        options=_read_gemma3,
        reads=(FINAL_CAP,),
    ),
    "gemma4": Architecture(
        "gemma4_text",
        windowed="gemma4_text",
        period=6,
        local_base=10000.0,
        differing=(KEY_HEADS, WIDTH),
        constants={"hidden_activation": GELU_TANH, "attention_bias": False},
        options=_read_gemma4,
        reads=(FINAL_CAP, EXPERTS),
        tensors={"shared_gate": "ffn_gate", "shared_up": "ffn_up", "shared_down": "ffn_down"},
    ),
}
