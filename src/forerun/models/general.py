"""Any Transformers decoder-only model, through its own modules, with forerun's attention and packed linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from forerun.errors import UnsupportedModelError
from forerun.models.attention import attend
from forerun.models.linear import pack_module
from forerun.models.rows import Layout

ATTENTION_NAME = "forerun"
_KNOWN_OPTIONS = {"sliding_window", "softcap", "s_aux"}
# what models pass along that does not change the attention of a decoder at inference
_HARMLESS_OPTIONS = {
    "position_ids",
    "position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "use_cache",
    "is_causal",
    "cache_position",
    "past_key_values",
    "num_items_in_batch",
    "return_dict",
    "target_dtype",
    "head_mask",
    "layer_past",
}


def forerun_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in the form Transformers calls. query: [1, H, T, D]; key, value: [1, H_kv, T, D] -> [1, T, H, D_v].

    Raises:
        UnsupportedModelError: the model asks for something that attend() does not do.
    """
    if layout is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not pass the batch's layout on to its attention.")
    for name, option in options.items():
        if option is not None and name not in _KNOWN_OPTIONS and name not in _HARMLESS_OPTIONS:
            raise UnsupportedModelError(
                f"{type(module).__name__} asks its attention for {name!r}, which forerun does not know. "
                "Serve this model with Transformers, or report the architecture."
            )
    compute_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    layout.attended.add(int(module.layer_idx))
    mixed = attend(
        int(module.layer_idx),
        query[0].transpose(0, 1).to(compute_dtype),
        key[0].transpose(0, 1).to(compute_dtype),
        value[0].transpose(0, 1).to(compute_dtype),
        layout,
        dtype=query.dtype,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    return mixed.view(1, query.shape[2], query.shape[1], -1), None


AttentionInterface.register(ATTENTION_NAME, forerun_attention)


class GeneralDecoder:
    """A Transformers model whose attention is ours, loaded with attn_implementation=ATTENTION_NAME."""

    def __init__(self, model: Any) -> None:
        pack_module(model)
        self.model = model
        self.num_layers: int = model.config.get_text_config(decoder=True).num_hidden_layers

    def forward(self, layout: Layout) -> Tensor:
        """Logits of the wanted rows, [R, V]."""
        keep: Tensor | int = 0 if layout.logit_rows is None else layout.logit_rows
        output = self.model(
            input_ids=layout.token_ids[None],
            position_ids=layout.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            layout=layout,
        )
        logits: Tensor = output.logits[0]
        return logits
