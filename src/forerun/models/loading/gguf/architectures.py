"""The architectures of GGUF files that are read, each by what its files say in their own way.

Facts are those of llama.cpp: `conversion/*.py` say what files hold, `src/models/*.cpp` what is computed with it. To add
an architecture of a family that is described (`fused/families.py`), add an entry to ARCHITECTURES.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.loading.gguf.architecture import (
    GRANITE_FACTORS,
    KEY_HEADS,
    LAYER_NORM,
    NEXT_TOKENS,
    SECTIONS,
    TEMPERATURE,
    WIDTH,
    Architecture,
    Options,
    granite_factors,
    latent,
    refuse,
)
from forerun.models.loading.gguf.expert_architectures import EXPERT_ARCHITECTURES, mixtral
from forerun.models.loading.gguf.gemma4_architecture import gemma4
from forerun.models.loading.gguf.mixture import EXPERTS
from forerun.models.loading.gguf.recurrent_architectures import RECURRENT_ARCHITECTURES
from forerun.utils.json_file import REQUIRED, Fields


def _llama(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return mixtral(fields) if fields.integer(EXPERTS, 0) else {}


def _gemma(layers_of_27b: int) -> Options:
    """Return the options of Gemma 2 and 3. No key says that 27B, known by its layers, scales scores by another width
    than that of a head."""

    def options(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
        if fields.integer("block_count") == layers_of_27b:
            width = fields.integer("embedding_length") // fields.integer("attention.head_count")
        return {"query_pre_attn_scalar": width}

    return options


def _caps(fields: Fields, attention: float, final: float) -> dict[str, Any]:
    """Return the bounds of scores and logits. attention, final: where the file says none; 0: not bounded."""
    return {
        "attn_logit_softcapping": fields.number(_CAPS[0], attention, low=0) or None,
        "final_logit_softcapping": fields.number(_CAPS[1], final, low=0) or None,
    }


def _granite(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    if not fields.flag("rope.scaling.finetuned", True):  # Granite's models without positions
        refuse(fields, "rope.scaling.finetuned is False")
    return granite_factors(fields, width)


def _smollm3(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    # in llama.cpp a constant, too: one layer in four is not rotated
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(fields.integer("block_count"))]}


def _olmo(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    if (eps := fields.number(LAYER_NORM, 1e-5)) != 1e-5:
        refuse(fields, f"{LAYER_NORM} is {eps}")
    return {"clip_qkv": fields.number("attention.clamp_kqv", 0.0, low=0) or None}


def _cohere(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": fields.number("logit_scale", 0.0) or 1.0}


def _stablelm(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    # the key is True in files of other models too, and llama.cpp does not read it
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors}


def _gpt_neox(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": fields.flag("use_parallel_residual")}


_CAPS = "attn_logit_softcapping", "final_logit_softcapping"
_GELU = "gelu_pytorch_tanh"
_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_UP_BIAS = {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", True, _UP_BIAS, windowed="mistral", options=_llama, reads=(EXPERTS,)),
    "mistral3": Architecture(
        "mistral", True, windowed="mistral", constants={"sliding_window": None}, reads=(TEMPERATURE,)
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", biases=_ATTENTION_BIAS),
    # In a text, the positions of all sections of the multimodal rotation are the same, so it is the plain one.
    "qwen2vl": Architecture("qwen2", reads=(SECTIONS,)),
    "qwen3vl": Architecture("qwen3", biases=_ATTENTION_BIAS, reads=(SECTIONS,)),
    "arcee": Architecture("arcee", True, _UP_BIAS, constants={"hidden_act": "relu2"}),
    "chatglm": Architecture("glm", biases=_ATTENTION_BIAS, is_partly_rotated=True),
    "cohere2": Architecture(
        "cohere2",
        windowed="cohere2",
        period=4,
        window=REQUIRED,
        eps="layer_norm_eps",
        options=_cohere,
        reads=("logit_scale",),
    ),
    "command-r": Architecture(
        "cohere", biases=_ATTENTION_BIAS, eps="layer_norm_eps", options=_cohere, reads=("logit_scale",)
    ),
    "ernie4_5": Architecture("ernie4_5", biases={"use_bias": "blk.0.attn_q.bias"}),
    "exaone4": Architecture("exaone4", windowed="exaone4", period=4),
    "gemma": Architecture("gemma", constants={"hidden_act": _GELU}),
    "gemma2": Architecture(
        "gemma2",
        windowed="gemma2",
        period=2,
        window=4096,
        constants={"hidden_activation": _GELU},
        options=lambda *file: {**_gemma(46)(*file), **_caps(file[0], 50.0, 30.0)},
        reads=_CAPS,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        windowed="gemma3_text",
        period=6,
        local_base=10000.0,
        constants={"hidden_activation": _GELU},
        options=lambda *file: {**_gemma(62)(*file), **_caps(file[0], 0.0, 0.0)},
        reads=_CAPS[1:],
    ),
    "gemma4": Architecture(
        "gemma4_text",
        windowed="gemma4_text",
        period=6,
        local_base=10000.0,
        differing=(KEY_HEADS, WIDTH),
        constants={"hidden_activation": _GELU, "attention_bias": False},
        options=gemma4,
        reads=(_CAPS[1], EXPERTS),
    ),
    # with sections its rows lie in another order
    "glm4": Architecture("glm4", biases=_ATTENTION_BIAS, is_partly_rotated=True),
    "gptneox": Architecture(
        "gpt_neox",
        biases={"attention_bias": "blk.0.attn_qkv.bias"},
        eps="layer_norm_eps",
        is_partly_rotated=True,
        constants={"hidden_act": "gelu"},
        options=_gpt_neox,
    ),
    "granite": Architecture(
        "granite",
        True,
        _UP_BIAS,
        options=_granite,
        reads=GRANITE_FACTORS,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", biases=_ATTENTION_BIAS),
    # its factors are constants in llama.cpp, too
    "minicpm3": Architecture(
        "minicpm3",
        is_latent=True,
        constants={
            "attention_bias": False,
            "mlp_bias": False,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        options=lambda fields, width, tensors: latent(fields, width),
    ),
    "nemotron": Architecture(
        "nemotron",
        biases=_UP_BIAS,
        eps="norm_eps",
        is_partly_rotated=True,
        constants={"hidden_act": "relu2"},
    ),
    "olmo": Architecture("olmo", True, eps=None, options=_olmo, reads=("attention.clamp_kqv",)),
    "olmo2": Architecture("olmo2", windowed="olmo3", period=4, local_base=0.0),
    "phi2": Architecture("phi", eps="layer_norm_eps", is_partly_rotated=True, constants={"hidden_act": "gelu_new"}),
    # llama.cpp leaves its window out, for the keys of other converters; Transformers gives it to all layers
    "phi3": Architecture("phi3", windowed="phi3", is_partly_rotated=True),
    "seed_oss": Architecture("seed_oss", biases={**_UP_BIAS, "attention_out_bias": "blk.0.attn_output.bias"}),
    "smollm3": Architecture("smollm3", True, _UP_BIAS, options=_smollm3),
    "stablelm": Architecture(
        "stablelm",
        biases={"use_qkv_bias": "blk.0.attn_q.bias"},
        eps="layer_norm_eps",
        is_partly_rotated=True,
        options=_stablelm,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        biases={"use_bias": "blk.0.attn_q.bias"},
        eps="norm_epsilon",
        constants={"hidden_act": _GELU},
    ),
    **EXPERT_ARCHITECTURES,
    **RECURRENT_ARCHITECTURES,
}
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    EXPERTS: (0,),
    NEXT_TOKENS: (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    **dict.fromkeys(_CAPS, (0,)),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    SECTIONS: (),
    TEMPERATURE: (0,),
}
"""Keys that stand for other computations than these architectures', and the values that do not."""
