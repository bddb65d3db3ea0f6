"""What GGUF files say of families: the keys of all, and how each architecture's become Transformers' options.

Facts are those of llama.cpp: `conversion/*.py` say what files hold, `src/models/*.cpp` and `build_moe_ffn` in
src/llama-graph.cpp what is computed with it. Files that llama.cpp's converter makes of tiny models with experts or
recurrent layers (that of llama-cpp-python 0.3.36) give llama.cpp's logits in float32; those of `gpt-oss` where its
rotation is not scaled, those of `deepseek2` but for groups of a softmax, and those of a Bamba of whose heads a half is
rotated give Transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from forerun.errors import UnsupportedModelError
from forerun.utils.json_file import REQUIRED, Fields

# of layers
NEXT_TOKENS = "nextn_predict_layers"
RMS_NORM = "attention.layer_norm_rms_epsilon"
LAYER_NORM = "attention.layer_norm_epsilon"
WIDTH = "feed_forward_length"
# of attention
HEADS = "attention.head_count"
KEY_HEADS = "attention.head_count_kv"
KEY_LENGTH = "attention.key_length"
VALUE_LENGTH = "attention.value_length"
WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
TEMPERATURE = "attention.temperature_scale"
ATTENTION_CAP = "attn_logit_softcapping"
FINAL_CAP = "final_logit_softcapping"
# of rotations
ROTATED = "rope.dimension_count"
SECTIONS = "rope.dimension_sections"
FINETUNED = "rope.scaling.finetuned"
FACTOR = "rope.scaling.factor"
# of mixtures of experts
EXPERTS = "expert_count"
TOP = "expert_used_count"
EXPERT_WIDTH = "expert_feed_forward_length"
SHARED_COUNT = "expert_shared_count"
SHARED_WIDTH = "expert_shared_feed_forward_length"
LEADING = "leading_dense_block_count"
STEP = "interleave_moe_layer_step"
GATING = "expert_gating_func"
NORM = "expert_weights_norm"
_SCALE = "expert_weights_scale"
_GROUPS = "expert_group_count"
_TOP_GROUPS = "expert_group_used_count"
# of recurrent layers
RECURRENT = "attention.recurrent_layers"
INTERVAL = "full_attention_interval"
SHORT_CONV = "shortconv.l_cache"
_STATE = ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")  # each with "ssm." before it

GRANITE_FACTORS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    EXPERTS: (0,),
    NEXT_TOKENS: (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    ATTENTION_CAP: (0,),
    FINAL_CAP: (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    SECTIONS: (),
    TEMPERATURE: (0,),
}
"""Keys that stand for other computations than those of most architectures, and the values that do not."""
_NEUTRAL_OF_EXPERTS = {
    _SCALE: (0, 1),
    _GROUPS: (0, 1),
    SHARED_COUNT: (0,),
    SHARED_WIDTH: (0,),
    LEADING: (0,),
    STEP: (0, 1),
}
"""The same, of mixtures of experts."""
SOFTMAX = (1,)
SIGMOID = (2,)
SOFTMAX_OF_CHOSEN = (3,)
"""Values of expert_gating_func."""
OPTIONS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
LOCAL = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
ROUTED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
"""Transformers' options of the number of experts, of those that a row is given to, and of the width of each."""
_MOST_EXPERTS = 1 << 12
"""Of a layer; no model has a quarter of that."""
MOST_CONV_KERNEL = 16
"""Inputs of a convolution in the native kernels."""
QUERY_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
UP_BIAS = {**QUERY_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}
"""Options that tensors set (`Architecture.biases`)."""
POST_ATTENTION = {"mlp_norm": "post_attention_norm"}
"""Tensors of architectures that call the norm before the feed-forward layer so (`Architecture.tensors`)."""
GELU_TANH = "gelu_pytorch_tanh"
"""Transformers' name of the activation of Gemma and others, which files do not say."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})
Options = Callable[[Fields, int, Mapping[str, Any]], dict[str, Any]]
"""A function of a file's keys, the width of a head, and the tensors by name."""


class Architecture(NamedTuple):
    """What a GGUF file of an architecture is in Transformers.

    Attributes:
        model_type: Transformers' name.
        is_permuted: llama.cpp's converter permutes rows of queries and keys: there, one rotation turns rows that lie
            side by side, and in Transformers rows that lie half a head apart.
        biases: option of the configuration -> the tensor whose presence, in any layer, sets it.
        windowed: the model type whose layers have the file's sliding window; None: windows are refused.
        period: every so many layers one has no window, where the file says nothing else; None: all layers have it.
        window: that of a file that says none; 0: none.
        local_base: base of the rotation of layers with a window where the file says none, 0: that of the others; None:
            all layers are rotated alike.
        eps: option of the norms' epsilon; None: a constant.
        is_partly_rotated: files say how much of a head is rotated.
        is_latent: keys and values are made of latents (`read_latent`); the width of a head is what is rotated.
        differing: counts that may be others in some layers, which `options` reads; that of the first stands for all.
        by_layer: counts that may be 0 in layers which lack what is counted; all others have the same.
        attends: there are heads of attention, and feed-forward layers.
        constants: options that files do not say.
        options: returns further options.
        heads_are_tiled: the converter puts the value heads of recurrent layers into the order of
            `Recurrence.heads_are_tiled`.
        reads: keys among NEUTRAL that may have any value.
        tensors: role of `tensor_names.TENSORS`, or "norm" (the final one) -> the name of its tensor, where that is
            another.
        yarn: returns parameters of a rotation that is scaled so, which files do not say, or in another way.
    """

    model_type: str
    is_permuted: bool = False
    biases: Mapping[str, str] = _NOTHING
    windowed: str | None = None
    period: int | None = None
    window: int = 0
    local_base: float | None = None
    eps: str | None = "rms_norm_eps"
    is_partly_rotated: bool = False
    is_latent: bool = False
    differing: tuple[str, ...] = ()
    by_layer: tuple[str, ...] = ()
    attends: bool = True
    constants: Mapping[str, Any] = _NOTHING
    options: Options = lambda fields, width, tensors: {}
    heads_are_tiled: bool = False
    reads: tuple[str, ...] = ()
    tensors: Mapping[str, str] = _NOTHING
    yarn: Callable[[Fields], Mapping[str, Any]] = lambda fields: {}

    @property
    def eps_key(self) -> str:
        """Return the key of the norms' epsilon."""
        return RMS_NORM if self.eps == "rms_norm_eps" else LAYER_NORM


def refuse(fields: Fields, what: str) -> NoReturn:
    """Raise UnsupportedModelError for a valid value that no Transformers model of the architecture computes."""
    raise UnsupportedModelError(
        f"{fields.place}: {what}, which Transformers' model does not compute. Serve it with llama.cpp, or give the "
        "model's Transformers folder or hub id."
    )


def layer_count(fields: Fields) -> int:
    """Return the number of the model's layers. Further ones, which predict further tokens, stand behind them."""
    count = fields.integer("block_count", low=1) - fields.integer(NEXT_TOKENS, 0, low=0)
    if count < 1:
        raise fields.wrong(NEXT_TOKENS, "less than block_count")
    return count


def counts_of(fields: Fields, key: str) -> list[int]:
    """Return a count of each layer. A file may have one for all."""
    count = layer_count(fields)
    value = fields.values.get(key)
    found = fields.list_of(key, int) if isinstance(value, list) else [fields.integer(key, low=1)] * count
    if len(found) < count or min(found) < 1:
        raise fields.wrong(key, f"a list of {count} counts")
    return found[:count]


def read_granite_factors(fields: Fields, width: int) -> dict[str, Any]:
    """Return the factors of Granite and its successors. width: of a head."""
    return {
        "attention_multiplier": fields.number("attention.scale", 0.0) or width**-0.5,
        "embedding_multiplier": fields.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": fields.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": fields.number("logit_scale"),
    }


def read_latent(fields: Fields, width: int) -> dict[str, Any]:
    """Return the sizes of attention with latents.

    Newer files say of keys and values what is kept of them, which has one head, and with further keys what each head
    has; older ones that alone.

    Args:
        width: numbers of a key that are rotated.

    Raises:
        ModelLoadError: a key is missing, or its value cannot be.
        UnsupportedModelError: keys of what is kept say something else.
    """
    if width % 2:
        refuse(fields, f"rope.dimension_count is {width}, an odd number")
    heads = fields.integer(HEADS, low=1)
    rank = fields.integer("attention.kv_lora_rank", low=1)
    said = {key: fields.integer(key, None) for key in (KEY_HEADS, KEY_LENGTH, VALUE_LENGTH)}
    ending = ""
    kept = {KEY_HEADS: heads}
    if f"{KEY_LENGTH}_mla" in fields:
        kept = {KEY_HEADS: 1, KEY_LENGTH: rank + width, VALUE_LENGTH: rank}
        ending = "_mla"
    for key, value in kept.items():
        if said[key] != value:
            refuse(fields, f"{key} is {said[key]}, and {value} with latents of {rank} numbers")
    value_width = REQUIRED if ending else fields.integer("embedding_length", low=1) // heads
    return {
        "q_lora_rank": fields.integer("attention.q_lora_rank", None, low=1),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": width,
        "qk_nope_head_dim": fields.integer(KEY_LENGTH + ending, low=width + 1) - width,
        "v_head_dim": fields.integer(VALUE_LENGTH + ending, value_width, low=1),
    }


def read_experts(
    fields: Fields,
    options: tuple[str, str, str] = OPTIONS,
    *,
    gating: tuple[int, ...] = SOFTMAX,
    adds_to_one: bool | None = True,
    width: Any = REQUIRED,
    reads: Collection[str] = (),
) -> dict[str, int]:
    """Return the options of a mixture of experts.

    Args:
        options: names, as OPTIONS.
        gating: what is computed; a file need not say it.
        adds_to_one: the scores of the chosen are divided by their sum, whatever a file says; None: it says it. Then
            the softmax of all scores and that of the chosen are the same.
        width: of an expert, where the file says none.
        reads: further keys that the architecture reads.

    Raises:
        ModelLoadError: a key is missing, or its value cannot be.
        UnsupportedModelError: a value stands for another computation.
    """
    same = SOFTMAX + SOFTMAX_OF_CHOSEN if adds_to_one and gating == SOFTMAX else gating
    neutral: dict[str, tuple[object, ...]] = {**_NEUTRAL_OF_EXPERTS, GATING: (0, *same)}
    neutral |= {} if adds_to_one is None else {NORM: (adds_to_one,)}
    for key, values in neutral.items():
        value: Any = fields.values.get(key)
        if key not in reads and value is not None and value not in values:
            refuse(fields, f"{key} is {value!r:.60}")
    count = fields.integer(EXPERTS, low=1, high=_MOST_EXPERTS)
    top = fields.integer(TOP, low=1)
    if top > count:
        raise fields.wrong(TOP, f"{count} at most, which is {EXPERTS}")
    return dict(zip(options, (count, top, fields.integer(EXPERT_WIDTH, width, low=1)), strict=True))


def read_corrected_experts(
    fields: Fields, options: tuple[str, str, str], shared: str, gating: tuple[int, ...] = SIGMOID
) -> dict[str, Any]:
    """Return the options of DeepSeek's experts and those of its successors.

    shared: option of the number of those that have all rows. gating: as of `read_experts`.
    """
    reads = (_SCALE, _GROUPS, SHARED_COUNT, SHARED_WIDTH, LEADING)
    found = read_experts(fields, options, gating=gating, adds_to_one=None, reads=reads)
    count, top, width = found.values()
    groups = fields.integer(_GROUPS, 1, low=0) or 1
    top_groups = fields.integer(_TOP_GROUPS, 1, low=0) or 1
    if count % groups:
        raise fields.wrong(_GROUPS, f"a divisor of {count}, which is {EXPERTS}")
    if top_groups > groups:
        raise fields.wrong(_TOP_GROUPS, f"{groups} at most, which is {_GROUPS}")
    if top > count // groups * top_groups:
        raise fields.wrong(TOP, f"{count // groups * top_groups} at most, which are in {_TOP_GROUPS} groups")
    return {
        **found,
        shared: shared_count(fields, width),
        "n_group": groups,
        "topk_group": top_groups,
        "routed_scaling_factor": fields.number(_SCALE, 0.0) or 1.0,
        "norm_topk_prob": fields.flag(NORM, False),
    }


def shared_count(fields: Fields, width: int) -> int:
    """Return the experts that every row is given to. width: of an expert."""
    count = fields.integer(SHARED_COUNT, 0, low=0)
    if (wide := fields.integer(SHARED_WIDTH, 0, low=0)) not in (0, count * width):
        refuse(fields, f"{SHARED_WIDTH} is {wide}, and {SHARED_COUNT} {count} of the width {width}")
    return count


def num_dense(fields: Fields) -> int:
    """Return the number of the first layers, which have no experts."""
    return fields.integer(LEADING, 0, low=0)


def read_qwen_experts(fields: Fields, *, adds_to_one: bool = True, shares: bool = True) -> dict[str, Any]:
    """Return the options of Qwen2-MoE's experts and those of its successors. shares: one has all rows."""
    wide = fields.integer(WIDTH, None, low=1)
    top = fields.integer(TOP, low=1)
    width = REQUIRED if wide is None else wide // top  # as llama.cpp
    found: dict[str, Any] = read_experts(
        fields, adds_to_one=adds_to_one, width=width, reads=(SHARED_WIDTH, SHARED_COUNT) if shares else ()
    )
    found |= {"norm_topk_prob": adds_to_one, "mlp_only_layers": [], "decoder_sparse_step": 1}
    default = REQUIRED if wide is None else wide
    return found | ({"shared_expert_intermediate_size": fields.integer(SHARED_WIDTH, default, low=1)} if shares else {})


def read_state(fields: Fields) -> dict[str, int]:
    """Return the sizes of the states by key, checked against each other, and "head_width", that of a value head."""
    found = {key: fields.integer(f"ssm.{key}", low=1, high=2**31 - 1) for key in _STATE}
    if found["conv_kernel"] > MOST_CONV_KERNEL:
        raise fields.wrong("ssm.conv_kernel", f"{MOST_CONV_KERNEL} at most")
    for key, part in (("time_step_rank", "group_count"), ("inner_size", "time_step_rank")):
        if found[key] % found[part]:
            raise fields.wrong(f"ssm.{key}", f"a multiple of {found[part]}, which is ssm.{part}")
    return found | {"head_width": found["inner_size"] // found["time_step_rank"]}


def read_by_layer(fields: Fields, key: str) -> list[int]:
    """Return a count of each layer."""
    number = fields.integer("block_count", low=1)
    value = fields.values.get(key)
    counts = fields.list_of(key, int) if isinstance(value, list) else [fields.integer(key)] * number
    if len(counts) != number:
        raise fields.wrong(key, f"a list of {number} counts")
    return counts
