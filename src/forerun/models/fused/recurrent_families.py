"""How the families with recurrent layers differ from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.models.fused.options import Difference, biases_of, rotated_share
from forerun.models.fused.spec import GATED_QUERY, HEAD_NORMS, Recurrence

TILED = "linear_heads_are_tiled"
"""Key of forerun's: value heads lie as in llama.cpp's files (`Recurrence.heads_are_tiled`)."""


def _delta_rule(config: Any, **differing: Any) -> Recurrence:
    """Return the gated delta rule (2412.06464) as Qwen3-Next and its successors have it."""
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    key_width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
    return Recurrence(
        **{
            "kind": "delta_rule",
            "num_taps": config.linear_conv_kernel_dim,
            "channels": 2 * key_heads * key_width + heads * value_width,
            "heads": heads,
            "key_heads": key_heads,
            "key_width": key_width,
            "value_width": value_width,
            "heads_are_tiled": getattr(config, TILED, False),
            "numbers": {
                "taps": "linear_attn.conv1d",
                "rate": "linear_attn.A_log",
                "step_bias": "linear_attn.dt_bias",
                "norm": "linear_attn.norm",
            },
            "norm_width": value_width,
            "norm_eps": config.rms_norm_eps,
            **differing,
        }
    )


def _qwen3_5(config: Any) -> Difference:
    recurrent = {
        "mixed": "linear_attn.in_proj_qkv",
        "mixed_gate": "linear_attn.in_proj_z",
        "beta": "linear_attn.in_proj_b",
        "decay": "linear_attn.in_proj_a",
        "mixed_out": "linear_attn.out_proj",
    }
    return {
        "modules": recurrent | GATED_QUERY | HEAD_NORMS,
        "qkv_groups": config.num_attention_heads,
        "biases": biases_of(config, "attention_bias"),
        "norm_offset": 1.0,
        "rotated_share": rotated_share(config),
        "recurrence": _delta_rule(config),
    }


RECURRENT_FAMILIES: Mapping[str, Callable[[Any], Difference]] = {
    "qwen3_5_text": _qwen3_5,
}
