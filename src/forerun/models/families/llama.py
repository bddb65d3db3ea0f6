"""Families that are made like Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forerun.models.families.build import (
    attention,
    biases_of,
    decoder,
    feed_forward,
    fused_qkv,
    head_shape,
    layer,
    layer_windows,
    require,
    rotated_share,
)
from forerun.models.families.gguf_keys import (
    EXPERTS,
    FINETUNED,
    GELU_TANH,
    GRANITE_FACTORS,
    LAYER_NORM,
    LOCAL,
    POST_ATTENTION,
    QUERY_BIAS,
    SECTIONS,
    TEMPERATURE,
    UP_BIAS,
    WIDTH,
    Architecture,
    read_experts,
    read_granite_factors,
    refuse,
)
from forerun.models.spec.attention import HEAD_NORMS, QKV, Attention
from forerun.models.spec.decoder import DecoderSpec, Embeddings, Norms, Output
from forerun.models.spec.feed_forward import AnyFeedForward
from forerun.models.spec.layer import LLAMA_NORMS, LayerSpec
from forerun.utils.json_file import REQUIRED, Fields

_ONE_NORM = {"input_norm": "input_layernorm", "mlp_norm": "input_layernorm"}
"""Of layers whose attention and feed-forward layer read the same rows."""
BEHIND = {"attention_norm": "post_attention_layernorm", "feed_norm": "post_feedforward_layernorm"}
"""Norms of OLMo 2 and its successors, of what attention and feed-forward layer add."""
_NOT_GATED = {"gate": None}
_GATE_UP = {"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj"}


def _llama(config: Any) -> DecoderSpec:
    biases = biases_of(config, "attention_bias", "mlp_bias")
    own = layer(config, attention(config, biases=biases), feed_forward(config, biases=biases))
    return decoder(config, own)


def _mistral(config: Any, **of_attention: Any) -> DecoderSpec:
    return decoder(config, layer(config, attention(config, **of_attention), feed_forward(config)))


def _ministral3(config: Any) -> DecoderSpec:
    rope = config.rope_parameters
    growth = rope.get("llama_4_scaling_beta") or 0.0
    return _mistral(config, query_growth=growth, query_period=int(rope.get("original_max_position_embeddings") or 1))


def _arcee(config: Any) -> DecoderSpec:
    biases = biases_of(config, "attention_bias", "mlp_bias")
    return decoder(
        config, layer(config, attention(config, biases=biases), feed_forward(config, _NOT_GATED, biases=biases))
    )


def _qwen2(config: Any) -> DecoderSpec:
    return decoder(config, layer(config, attention(config, biases=QKV), feed_forward(config)))


def _qwen3(config: Any) -> DecoderSpec:
    own = attention(config, HEAD_NORMS, biases=biases_of(config, "attention_bias"))
    return decoder(config, layer(config, own, feed_forward(config)))


def _smollm3(config: Any) -> DecoderSpec:
    biases = biases_of(config, "attention_bias", "mlp_bias")
    own = layer(config, attention(config, biases=biases), feed_forward(config, biases=biases))
    return decoder(config, own, turned=list(map(bool, config.no_rope_layers)))


def _seed_oss(config: Any) -> DecoderSpec:
    biases = QKV if config.attention_bias else frozenset[str]()
    biases |= {"out"} if config.attention_out_bias else set()
    feed = feed_forward(config, biases=biases_of(config, "mlp_bias"))
    return decoder(config, layer(config, attention(config, biases=biases), feed))


def _ernie4_5(config: Any) -> DecoderSpec:
    biases = biases_of(config, "use_bias")
    own = attention(config, biases=biases, is_interleaved=True)
    return decoder(config, layer(config, own, feed_forward(config, biases=biases)))


def _helium(config: Any) -> DecoderSpec:
    biases = biases_of(config, "attention_bias", "mlp_bias")
    own = attention(config, biases=biases - {"out"}, is_interleaved=True)
    return decoder(config, layer(config, own, feed_forward(config, biases=biases)))


def _phi3(config: Any) -> DecoderSpec:
    own = attention(config, fused_qkv("self_attn.qkv_proj"), rotated_share=rotated_share(config))
    return decoder(config, layer(config, own, feed_forward(config, _GATE_UP)))


def _glm(config: Any, norms: Mapping[str, str] = LLAMA_NORMS) -> DecoderSpec:
    biases = QKV if config.attention_bias else frozenset[str]()
    own = attention(config, biases=biases, is_interleaved=True, rotated_share=rotated_share(config))
    return decoder(config, layer(config, own, feed_forward(config, _GATE_UP), norms))


def _glm4(config: Any) -> DecoderSpec:
    behind = {"attention_norm": "post_self_attn_layernorm", "feed_norm": "post_mlp_layernorm"}
    return _glm(config, LLAMA_NORMS | behind)


def granite_attention(config: Any) -> Attention:
    """Return Granite's attention."""
    return attention(config, biases=biases_of(config, "attention_bias"), scale=config.attention_multiplier)


def granite(config: Any, layers: LayerSpec | Sequence[LayerSpec], **differing: Any) -> DecoderSpec:
    """Return a decoder of these layers with Granite's factors. differing: as of `decoder`."""
    return decoder(
        config,
        layers,
        embeddings=Embeddings(scale=config.embedding_multiplier),
        residual_scale=config.residual_multiplier,
        output=Output(scale=1 / config.logits_scaling),
        **differing,
    )


def _granite(config: Any) -> DecoderSpec:
    feed = feed_forward(config, biases=biases_of(config, "mlp_bias"))
    return granite(config, layer(config, granite_attention(config), feed))


def _hyperclovax(config: Any) -> DecoderSpec:
    behind = {"attention_norm": "post_norm1", "feed_norm": "post_norm2"} if config.use_post_norm else {}
    feed = feed_forward(config, biases=biases_of(config, "mlp_bias"))
    found = granite(config, layer(config, granite_attention(config), feed, LLAMA_NORMS | behind))
    return replace(found, output=Output(scale=config.logits_scaling))


def _olmo(config: Any) -> DecoderSpec:
    own = attention(config, biases=biases_of(config, "attention_bias"))
    return decoder(config, layer(config, own, feed_forward(config)), norms=Norms(1e-5, "layer", has_weights=False))


def _olmo2(config: Any) -> DecoderSpec:
    own = attention(config, HEAD_NORMS, biases=biases_of(config, "attention_bias"), has_wide_norms=True)
    return decoder(config, layer(config, own, feed_forward(config), BEHIND))


def _exaone4(config: Any) -> DecoderSpec:
    windows = layer_windows(config)
    turned = [config.sliding_window is None or window is not None for window in windows]
    return decoder(config, layer(config, attention(config, HEAD_NORMS), feed_forward(config), BEHIND), turned=turned)


def cohere_layer(config: Any, feed: AnyFeedForward) -> LayerSpec:
    """Return a layer of Cohere's Command R."""
    require(config, "use_qk_norm", None, False)
    own = attention(config, biases=biases_of(config, "attention_bias"), is_interleaved=True)
    return layer(config, own, feed, _ONE_NORM, is_parallel=True)


def _cohere(config: Any, turned: Sequence[bool] | None = None) -> DecoderSpec:
    return decoder(
        config,
        cohere_layer(config, feed_forward(config)),
        turned=turned,
        norms=Norms(config.layer_norm_eps, "layer"),
        output=Output(scale=config.logit_scale),
    )


def _cohere2(config: Any) -> DecoderSpec:
    return _cohere(config, turned=[window is not None for window in layer_windows(config)])


def _starcoder2(config: Any) -> DecoderSpec:
    biases = biases_of(config, "use_bias")
    feed = feed_forward(config, {"gate": None, "up": "mlp.c_fc", "down": "mlp.c_proj"}, biases=biases)
    norms = Norms(config.norm_epsilon, "layer", has_biases=True)
    return decoder(config, layer(config, attention(config, biases=biases), feed), norms=norms)


def _stablelm(config: Any) -> DecoderSpec:
    is_parallel = bool(config.use_parallel_residual)
    own = attention(config, biases=biases_of(config, "use_qkv_bias"), rotated_share=rotated_share(config))
    norms = _ONE_NORM if is_parallel else LLAMA_NORMS
    return decoder(
        config,
        layer(config, own, feed_forward(config), norms, is_parallel=is_parallel),
        norms=Norms(config.layer_norm_eps, "layer", has_biases=True),
    )


def _nanochat(config: Any) -> DecoderSpec:
    own = attention(config, HEAD_NORMS, biases=biases_of(config, "attention_bias"), norms_rotated=True)
    feed = feed_forward(config, {"gate": None, "up": "mlp.fc1", "down": "mlp.fc2"})
    return decoder(
        config,
        layer(config, own, feed),
        norms=Norms(config.rms_norm_eps, has_weights=False),
        embeddings=Embeddings(is_normed=True),
        output=Output(softcap=config.final_logit_softcapping),
        turns_back=True,
    )


def _nemotron(config: Any) -> DecoderSpec:
    biases = biases_of(config, "attention_bias", "mlp_bias")
    own = attention(config, biases=biases, rotated_share=rotated_share(config))
    return decoder(
        config,
        layer(config, own, feed_forward(config, _NOT_GATED, biases=biases)),
        norms=Norms(config.norm_eps, "layer", offset=1.0, has_biases=True),
    )


def _jais2(config: Any) -> DecoderSpec:
    biases = biases_of(config, "attention_bias", "mlp_bias")
    return decoder(
        config,
        layer(config, attention(config, biases=biases), feed_forward(config, _NOT_GATED, biases=biases)),
        norms=Norms(config.layer_norm_eps, "layer", has_biases=True),
    )


def _apertus(config: Any) -> DecoderSpec:
    own = attention(config, HEAD_NORMS, biases=biases_of(config, "attention_bias"))
    feed = feed_forward(config, _NOT_GATED, xielu="mlp.act_fn" if config.hidden_act == "xielu" else None)
    return decoder(
        config, layer(config, own, feed, {"input_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"})
    )


def hunyuan(config: Any, feed: AnyFeedForward | None = None) -> DecoderSpec:
    """Return Hunyuan, or what has its attention with another feed-forward layer."""
    norms = {"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"}
    own = attention(config, norms, biases=biases_of(config, "attention_bias"), norms_rotated=True)
    rope = config.rope_parameters
    ropes: dict[str | None, dict[str, Any]] | None = None
    if rope["rope_type"] == "dynamic" and rope.get("alpha"):  # which makes it the same at any length
        (_, _, width) = head_shape(config)
        theta = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
        ropes = {None: {"rope_type": "default", "rope_theta": theta}}
    return decoder(config, layer(config, own, feed or feed_forward(config)), ropes=ropes)


LLAMA_FAMILIES: Mapping[str, Callable[[Any], DecoderSpec]] = {
    "apertus": _apertus,
    "arcee": _arcee,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "glm": _glm,
    "glm4": _glm4,
    "granite": _granite,
    "helium": _helium,
    "hunyuan_v1_dense": hunyuan,
    "hyperclovax": _hyperclovax,
    "jais2": _jais2,
    "llama": _llama,
    "ministral": _mistral,
    "ministral3": _ministral3,
    "mistral": _mistral,
    "nanochat": _nanochat,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}


def _read_llama(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Mixtral, whose files are of Llama's architecture, where there are experts."""
    if not fields.integer(EXPERTS, 0):
        return {}
    experts = read_experts(fields, LOCAL, width=fields.integer(WIDTH, low=1))
    return {"model_type": "mixtral", "sliding_window": None, **experts}


def _read_granite(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    if not fields.flag(FINETUNED, True):  # Granite's models without positions
        refuse(fields, f"{FINETUNED} is False")
    return read_granite_factors(fields, width)


def _read_smollm3(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    # in llama.cpp a constant, too: one layer in four is not rotated
    return {"no_rope_layers": [int((index + 1) % 4 != 0) for index in range(fields.integer("block_count"))]}


def _read_olmo(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    if (eps := fields.number(LAYER_NORM, 1e-5)) != 1e-5:
        refuse(fields, f"{LAYER_NORM} is {eps}")
    return {"clip_qkv": fields.number("attention.clamp_kqv", 0.0, low=0) or None}


def _read_cohere(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": fields.number("logit_scale", 0.0) or 1.0}


def _read_stablelm(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    # the key is True in files of other models too, and llama.cpp does not read it
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors}


LLAMA_ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": Architecture("arcee", True, UP_BIAS, constants={"hidden_act": "relu2"}),
    "chatglm": Architecture("glm", biases=QUERY_BIAS, is_partly_rotated=True),
    "cohere2": Architecture(
        "cohere2",
        windowed="cohere2",
        period=4,
        window=REQUIRED,
        eps="layer_norm_eps",
        options=_read_cohere,
        reads=("logit_scale",),
    ),
    "command-r": Architecture(
        "cohere", biases=QUERY_BIAS, eps="layer_norm_eps", options=_read_cohere, reads=("logit_scale",)
    ),
    "ernie4_5": Architecture("ernie4_5", biases={"use_bias": "blk.0.attn_q.bias"}),
    "exaone4": Architecture("exaone4", windowed="exaone4", period=4),
    # with sections its rows lie in another order
    "glm4": Architecture("glm4", biases=QUERY_BIAS, is_partly_rotated=True),
    "granite": Architecture("granite", True, UP_BIAS, options=_read_granite, reads=GRANITE_FACTORS),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", biases=QUERY_BIAS),
    "llama": Architecture("llama", True, UP_BIAS, windowed="mistral", options=_read_llama, reads=(EXPERTS,)),
    "mistral3": Architecture(
        "mistral", True, windowed="mistral", constants={"sliding_window": None}, reads=(TEMPERATURE,)
    ),
    "nemotron": Architecture(
        "nemotron", biases=UP_BIAS, eps="norm_eps", is_partly_rotated=True, constants={"hidden_act": "relu2"}
    ),
    "olmo": Architecture("olmo", True, eps=None, options=_read_olmo, reads=("attention.clamp_kqv",)),
    "olmo2": Architecture("olmo2", windowed="olmo3", period=4, local_base=0.0),
    # llama.cpp leaves its window out, for the keys of other converters; Transformers gives it to all layers
    "phi3": Architecture("phi3", windowed="phi3", is_partly_rotated=True),
    "qwen2": Architecture("qwen2"),
    # In a text, the positions of all sections of the multimodal rotation are the same, so it is the plain one.
    "qwen2vl": Architecture("qwen2", reads=(SECTIONS,)),
    "qwen3": Architecture("qwen3", biases=QUERY_BIAS),
    "qwen3vl": Architecture("qwen3", biases=QUERY_BIAS, reads=(SECTIONS,)),
    "seed_oss": Architecture(
        "seed_oss", biases={**UP_BIAS, "attention_out_bias": "blk.0.attn_output.bias"}, tensors=POST_ATTENTION
    ),
    "smollm3": Architecture("smollm3", True, UP_BIAS, options=_read_smollm3),
    "stablelm": Architecture(
        "stablelm",
        biases={"use_qkv_bias": "blk.0.attn_q.bias"},
        eps="layer_norm_eps",
        is_partly_rotated=True,
        options=_read_stablelm,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        biases={"use_bias": "blk.0.attn_q.bias"},
        eps="norm_epsilon",
        constants={"hidden_act": GELU_TANH},
    ),
}
