"""The architectures of GGUF files with recurrent layers (`architectures.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.loading.gguf.architecture import NEXT_TOKENS, SECTIONS, Architecture
from forerun.utils.json_file import Fields

_RECURRENT, _INTERVAL = "attention.recurrent_layers", "full_attention_interval"
_MOST_TAPS = 16


def _state(fields: Fields) -> dict[str, int]:
    """Return the sizes of the states by key, checked against each other."""
    keys = ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")
    found = {key: fields.integer(f"ssm.{key}", low=1, high=2**31 - 1) for key in keys}
    if found["conv_kernel"] > _MOST_TAPS:
        raise fields.wrong("ssm.conv_kernel", f"{_MOST_TAPS} at most")
    for key, part in (("time_step_rank", "group_count"), ("inner_size", "time_step_rank")):
        if found[key] % found[part]:
            raise fields.wrong(f"ssm.{key}", f"a multiple of {found[part]}, which is ssm.{part}")
    return found


def _qwen35(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    # further layers, which predict further tokens, stand behind the model's
    count = fields.integer("block_count", low=1) - fields.integer(NEXT_TOKENS, 0, low=0)
    if count < 1:
        raise fields.wrong(NEXT_TOKENS, "less than block_count")
    interval, flags, state = fields.integer(_INTERVAL, 4, low=1), fields.values.get(_RECURRENT), _state(fields)
    if flags is None:
        flags = [bool((layer + 1) % interval) for layer in range(count)]
    elif not isinstance(flags, list):  # the same of all layers
        flags = [flags] * count
    if len(flags) < count or not all(flag in (0, 1) for flag in flags):
        raise fields.wrong(_RECURRENT, f"a list of {count} flags")
    return {
        "num_hidden_layers": count,
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in flags[:count]],
        "linear_conv_kernel_dim": state["conv_kernel"],
        "linear_key_head_dim": state["state_size"],
        "linear_value_head_dim": state["inner_size"] // state["time_step_rank"],
        "linear_num_key_heads": state["group_count"],
        "linear_num_value_heads": state["time_step_rank"],
    }


RECURRENT_ARCHITECTURES = {
    # Positions in a text are the same in all sections, as of "qwen2vl".
    "qwen35": Architecture(
        "qwen3_5_text",
        is_partly_rotated=True,
        constants={"attention_bias": False},
        options=_qwen35,
        heads_are_tiled=True,
        reads=(SECTIONS, NEXT_TOKENS),
    ),
}
