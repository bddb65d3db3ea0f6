"""What GGUF files say of mixtures of experts, as llama.cpp computes it (`build_moe_ffn` in src/llama-graph.cpp)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from forerun.models.loading.gguf.architecture import WIDTH, refuse
from forerun.utils.json_file import REQUIRED, Fields

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
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = (1,), (2,), (3,)
"""Values of expert_gating_func."""
_NEUTRAL = {
    _SCALE: (0, 1),
    _GROUPS: (0, 1),
    SHARED_COUNT: (0,),
    SHARED_WIDTH: (0,),
    LEADING: (0,),
    STEP: (0, 1),
}
"""Keys that stand for other computations than those of most architectures, and the values that do not."""
_MOST = 1 << 12
"""Experts of a layer; no model has a quarter of that."""
OPTIONS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
LOCAL = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
"""Transformers' options of the number of experts, of those that a row is given to, and of the width of each."""


def mixture(
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
    neutral: dict[str, tuple[object, ...]] = {**_NEUTRAL, GATING: (0, *same)}
    neutral |= {} if adds_to_one is None else {NORM: (adds_to_one,)}
    for key, values in neutral.items():
        value: Any = fields.values.get(key)
        if key not in reads and value is not None and value not in values:
            refuse(fields, f"{key} is {value!r:.60}")
    count = fields.integer(EXPERTS, low=1, high=_MOST)
    top = fields.integer(TOP, low=1)
    if top > count:
        raise fields.wrong(TOP, f"{count} at most, which is {EXPERTS}")
    return dict(zip(options, (count, top, fields.integer(EXPERT_WIDTH, width, low=1)), strict=True))


def corrected(
    fields: Fields, options: tuple[str, str, str], shared: str, gating: tuple[int, ...] = SIGMOID
) -> dict[str, Any]:
    """Return the options of DeepSeek's experts and those of its successors.

    shared: option of the number of those that have all rows. gating: as of `mixture`.
    """
    reads = (_SCALE, _GROUPS, SHARED_COUNT, SHARED_WIDTH, LEADING)
    found = mixture(fields, options, gating=gating, adds_to_one=None, reads=reads)
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


def experts_of_qwen(fields: Fields, *, adds_to_one: bool = True, shares: bool = True) -> dict[str, Any]:
    """Return the options of Qwen2-MoE's experts and those of its successors. shares: one has all rows."""
    wide = fields.integer(WIDTH, None, low=1)
    top = fields.integer(TOP, low=1)
    width = REQUIRED if wide is None else wide // top  # as llama.cpp
    found: dict[str, Any] = mixture(
        fields, adds_to_one=adds_to_one, width=width, reads=(SHARED_WIDTH, SHARED_COUNT) if shares else ()
    )
    found |= {"norm_topk_prob": adds_to_one, "mlp_only_layers": [], "decoder_sparse_step": 1}
    default = REQUIRED if wide is None else wide
    return found | ({"shared_expert_intermediate_size": fields.integer(SHARED_WIDTH, default, low=1)} if shares else {})
