"""Families that are made like GPT-2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.models.families.build import (
    attention,
    biases_of,
    decoder,
    feed_forward,
    fused_qkv,
    head_shape,
    layer,
    require,
    rotated_share,
)
from forerun.models.families.gguf_keys import Architecture
from forerun.models.spec.attention import ATTENTION
from forerun.models.spec.decoder import DecoderSpec, Embeddings, Norms, Output
from forerun.models.spec.feed_forward import FEED
from forerun.models.spec.layer import LLAMA_NORMS
from forerun.utils.json_file import Fields

_ALL = ATTENTION | FEED
_NONE = frozenset[str]()
_OF_GPT2: Mapping[str, Any] = {"base": "transformer", "layer_list": "h", "output": Output(norm="ln_f")}


def _layer_norm(eps: float) -> Norms:
    return Norms(eps, "layer", has_biases=True)


def _unrotated(config: Any) -> list[bool]:
    return [False] * config.num_hidden_layers


def _gpt2(config: Any, *, is_transposed: bool = True, **differing: Any) -> DecoderSpec:
    """Return GPT-2, or a successor. differing: of its attention, as of `attention`."""
    require(config, "add_cross_attention", False, None)
    (_, _, width) = head_shape(config)
    own = attention(
        config,
        {**fused_qkv("attn.c_attn"), "out": "attn.c_proj"},
        biases=_ALL,
        scale=width**-0.5 if config.scale_attn_weights else 1.0,
        **differing,
    )
    feed = feed_forward(
        config,
        {"gate": None, "up": "mlp.c_fc", "down": "mlp.c_proj"},
        biases=_ALL,
        intermediate_size=config.n_inner or 4 * config.hidden_size,
    )
    norms = {"input_norm": "ln_1", "mlp_norm": "ln_2"}
    return decoder(
        config,
        layer(config, own, feed, norms, is_transposed=is_transposed),
        norms=_layer_norm(config.layer_norm_epsilon),
        embeddings=Embeddings("wte", positions="wpe"),
        turned=_unrotated(config),
        **_OF_GPT2,
    )


def _gpt_bigcode(config: Any) -> DecoderSpec:
    # its attention of several key heads has each head's query, key and value side by side
    heads = config.num_attention_heads
    kv_heads = 1 if config.multi_query else heads
    groups = 1 if config.multi_query else heads
    return _gpt2(config, is_transposed=False, num_kv_heads=kv_heads, qkv_groups=groups)


def _gpt_neox(config: Any) -> DecoderSpec:
    heads = config.num_attention_heads
    own = attention(
        config,
        {**fused_qkv("attention.query_key_value"), "out": "attention.dense"},
        biases=biases_of(config, "attention_bias"),
        num_kv_heads=heads,
        qkv_groups=heads,
        head_dim=config.hidden_size // heads,
        rotated_share=rotated_share(config),
    )
    feed = feed_forward(config, {"gate": None, "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}, biases=FEED)
    return decoder(
        config,
        layer(config, own, feed, is_parallel=bool(config.use_parallel_residual)),
        norms=_layer_norm(config.layer_norm_eps),
        base="gpt_neox",
        embeddings=Embeddings("embed_in"),
        output=Output(norm="final_layer_norm"),
    )


def _gptj(config: Any) -> DecoderSpec:
    (_, _, width) = head_shape(config)
    modules = {"query": "attn.q_proj", "key": "attn.k_proj", "value": "attn.v_proj", "out": "attn.out_proj"}
    own = attention(config, modules, is_interleaved=True, rotated_share=config.rotary_dim / width)
    feed = feed_forward(
        config,
        {"gate": None, "up": "mlp.fc_in", "down": "mlp.fc_out"},
        biases=FEED,
        intermediate_size=config.n_inner or 4 * config.hidden_size,
    )
    return decoder(
        config,
        layer(config, own, feed, {"input_norm": "ln_1", "mlp_norm": "ln_1"}, is_parallel=True),
        norms=_layer_norm(config.layer_norm_epsilon),
        base="transformer",
        layer_list="h",
        embeddings=Embeddings("wte"),
        output=Output(norm="ln_f", has_bias=True),
    )


_OF_OPT = {"out": "self_attn.out_proj", "gate": None, "up": "fc1", "down": "fc2"}
_NORMS_OF_OPT = {"input_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}


def _opt(config: Any) -> DecoderSpec:
    require(config, "do_layer_norm_before", True)
    require(config, "layer_norm_elementwise_affine", True)
    require(config, "_remove_final_layer_norm", False, None)
    require(config, "word_embed_proj_dim", config.hidden_size)
    biases = _ALL if config.enable_bias else _NONE
    feed = feed_forward(config, _OF_OPT, biases=biases, intermediate_size=config.ffn_dim)
    return decoder(
        config,
        layer(config, attention(config, _OF_OPT, biases=biases), feed, _NORMS_OF_OPT),
        norms=_layer_norm(1e-5),
        base="model.decoder",
        embeddings=Embeddings(positions="embed_positions", first_position=2),
        output=Output(norm="final_layer_norm"),
        turned=_unrotated(config),
    )


def _biogpt(config: Any) -> DecoderSpec:
    own = layer(
        config, attention(config, _OF_OPT, biases=_ALL), feed_forward(config, _OF_OPT, biases=_ALL), _NORMS_OF_OPT
    )
    scale = config.hidden_size**0.5 if config.scale_embedding else 1.0
    return decoder(
        config,
        own,
        norms=_layer_norm(1e-5),
        base="biogpt",
        embeddings=Embeddings(scale=scale, positions="embed_positions", first_position=2),
        output=Output("layer_norm", "output_projection"),
        turned=_unrotated(config),
    )


def _falcon(config: Any) -> DecoderSpec:
    require(config, "alibi", False, None)
    heads = config.num_attention_heads
    is_new = config.new_decoder_architecture
    if is_new:
        require(config, "parallel_attn", True)
    kv_heads = config.num_kv_heads
    if not is_new:
        kv_heads = 1 if config.multi_query else heads
    norms = LLAMA_NORMS
    if config.parallel_attn:
        norms = {"input_norm": "input_layernorm", "mlp_norm": "input_layernorm"}
    if is_new and config.num_ln_in_parallel_attn in (None, 2):
        norms = {"input_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    biases = _ALL if config.bias else _NONE
    own = attention(
        config,
        {**fused_qkv("self_attention.query_key_value"), "out": "self_attention.dense"},
        biases=biases,
        num_kv_heads=kv_heads,
        qkv_groups=kv_heads,
    )
    feed = feed_forward(
        config,
        {"gate": None, "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
        biases=biases,
        intermediate_size=config.ffn_hidden_size,
    )
    return decoder(
        config,
        layer(config, own, feed, norms, is_parallel=bool(config.parallel_attn)),
        norms=_layer_norm(config.layer_norm_epsilon),
        embeddings=Embeddings("word_embeddings"),
        **_OF_GPT2,
    )


def _phi(config: Any) -> DecoderSpec:
    own = attention(config, {"out": "self_attn.dense"}, biases=_ALL, rotated_share=rotated_share(config))
    feed = feed_forward(config, {"gate": None, "up": "mlp.fc1", "down": "mlp.fc2"}, biases=_ALL)
    norms = {"input_norm": "input_layernorm", "mlp_norm": "input_layernorm"}
    return decoder(
        config,
        layer(config, own, feed, norms, is_parallel=True),
        norms=_layer_norm(config.layer_norm_eps),
        output=Output(norm="final_layernorm", has_bias=True),
    )


GPT_FAMILIES: Mapping[str, Callable[[Any], DecoderSpec]] = {
    "biogpt": _biogpt,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "opt": _opt,
    "phi": _phi,
}


def _read_gpt_neox(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": fields.flag("use_parallel_residual")}


GPT_ARCHITECTURES: Mapping[str, Architecture] = {
    "gptneox": Architecture(
        "gpt_neox",
        biases={"attention_bias": "blk.0.attn_qkv.bias"},
        eps="layer_norm_eps",
        is_partly_rotated=True,
        constants={"hidden_act": "gelu"},
        options=_read_gpt_neox,
    ),
    "phi2": Architecture("phi", eps="layer_norm_eps", is_partly_rotated=True, constants={"hidden_act": "gelu_new"}),
}
