"""The PyTorch decoder of the Llama layers, which Mistral, Qwen2 and Qwen3 share, in few, large operations.

Query, key and value are one product, gate and up another; residuals are added inside the products that precede them;
the rotation of queries and keys is one complex multiplication. Everything else is served by `models/general.py`; both
are tested against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.partition import AttentionShape
from forerun.kernels.torch.elementwise import rms_norm, silu
from forerun.models.attention.base import Attention, LayerAttention, Layout
from forerun.models.attention.reference import ReferenceAttention
from forerun.models.base import HiddenStateOutputs, LayerRangeDecoder
from forerun.models.linear import FloatMaker, Linear, Maker, Part, of_rows
from forerun.models.rotation import Rotation, pair_halves, rotate


def head_shape(config: Any) -> tuple[int, int, int]:
    """Return the query heads, the key heads, and the width of a head."""
    heads: int = config.num_attention_heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    return heads, getattr(config, "num_key_value_heads", None) or heads, width


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    """[H + H_kv, D] weights of the norm over each query and key head (Qwen3)."""
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    form: AttentionShape


class LlamaDecoder(LayerRangeDecoder):
    """The decoder of a Transformers model of the Llama family, with its weights rearranged.

    Args:
        model: the loaded causal language model, on its device. Its layers are emptied one by one as their weights are
            copied, so that memory does not hold all of them twice; the model is of no use afterwards.
        maker: of embedding and linear layers; None: of the numbers as they are.
        output_tokens: int64, those whose logits are computed, in this order; None for all.
    """

    def __init__(self, model: Any, maker: Maker | None = None, output_tokens: Tensor | None = None) -> None:
        maker = maker or FloatMaker()
        config = model.config
        base = model.model
        self.num_heads, self.num_kv_heads, self.head_dim = head_shape(config)
        self.intermediate: int = config.intermediate_size
        self.eps_value: float = config.rms_norm_eps
        embedding = Part("model.embed_tokens.weight", base.embed_tokens.weight)
        self.embedding = maker.embedding(embedding)
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.compute_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.eps = torch.tensor(self.eps_value, dtype=self.compute_dtype, device=self.device)
        # the norms' weights in the type they are multiplied in, once and for all
        self.norm = base.norm.weight.detach().to(self.compute_dtype)
        is_tied = model.lm_head.weight is base.embed_tokens.weight
        head = embedding if is_tied else Part("lm_head.weight", model.lm_head.weight)
        self.lm_head = maker.linear(
            [head._replace(rows=output_tokens)], of_rows(model.lm_head.bias, output_tokens), is_head=True
        )
        if not is_tied:
            model.lm_head.to_empty(device="meta")
        self.inverse_frequencies = base.rotary_emb.inv_freq.detach().float().cpu()
        self.rope_scaling = float(base.rotary_emb.attention_scaling)
        self.rotation = Rotation(self.inverse_frequencies, self.rope_scaling, self.compute_dtype, self.device)
        self.attention: Attention = ReferenceAttention(self.dtype)
        self.layers: list[_Layer] = []
        for index, (layer, window) in enumerate(zip(base.layers, layer_windows(config), strict=True)):
            path, form = f"model.layers.{index}", AttentionShape(self.head_dim**-0.5, window)
            self.layers.append(self._rearranged(layer, path, form, maker))
            layer.to_empty(device="meta")
        self.num_layers = len(self.layers)
        heads, group, width = self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim
        layer_attentions = [LayerAttention(heads, group, width, width, layer.form) for layer in self.layers]
        self.planner = self.attention.planner(layer_attentions, self.device)

    def embed(self, layout: Layout) -> Tensor:
        """Return what enters the first layer, [T, hidden] (`LayerRangeDecoder.embed`)."""
        x: Tensor = self.embedding[layout.token_ids]
        return x

    def through(self, x: Tensor, layout: Layout, first: int, last: int, hidden_outputs: HiddenStateOutputs) -> Tensor:
        """Compute layers `first` to `last` - 1: [T, hidden] -> [T, hidden] (`LayerRangeDecoder.through`)."""
        turns = self.rotation.turns(layout)
        rows, heads, kv_heads, width = len(x), self.num_heads, self.num_kv_heads, self.head_dim
        rotated = heads + kv_heads
        for index in range(first, last):
            hidden_outputs.take(index, x)
            layer = self.layers[index]
            h = layer.qkv.forward(rms_norm(x, layer.input_norm, self.eps))
            if layer.head_norm is not None:
                h = self._normed_heads(h, layer.head_norm)
            h = h.to(self.compute_dtype).view(rows, -1, width)
            rotate(h[:, :rotated], turns)
            query, key, value = h[:, :heads], h[:, heads:rotated], h[:, rotated:]
            x = layer.out.add_to(x, self.attention.forward(index, query, key, value, layout, layer.form))
            h = layer.gate_up.forward(rms_norm(x, layer.mlp_norm, self.eps))
            x = layer.down.add_to(x, silu(h[:, : self.intermediate]).mul_(h[:, self.intermediate :]))
        return x

    def head(self, x: Tensor, layout: Layout, hidden_outputs: HiddenStateOutputs) -> Tensor:
        """Return the logits of the requested rows, [R, V], from the output of the last layer or, to exit early, any
        other (`LayerRangeDecoder.head`)."""
        hidden_outputs.take(self.num_layers, x, self._normed)
        x = self._normed(layout.select_logit_rows(x))
        return self.lm_head.forward(x) if layout.num_logits else x.new_empty(0, self.lm_head.out_features)

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, [n, hidden] float32 (`Decoder.embedding_rows`)."""
        return self.embedding[token_ids].float()

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer's weight, [n, hidden] float32 (`Decoder.output_rows`)."""
        return self.lm_head.rows(token_ids)

    def _normed(self, x: Tensor) -> Tensor:
        """Apply the final norm."""
        return rms_norm(x, self.norm, self.eps)

    def _rearranged(self, layer: Any, path: str, form: AttentionShape, maker: Maker) -> _Layer:
        attention = layer.self_attn

        def linear(*names: str, paired: int = 0, bias: Tensor | None = None) -> Linear:
            """Make the layer of these modules; the rows of the first `paired` ones are paired."""
            parts = []
            for number, name in enumerate(names):
                weight = layer.get_submodule(name).weight
                rows = torch.arange(len(weight), device=weight.device) if number < paired else None
                rows = None if rows is None else pair_halves(rows, self.head_dim)
                parts.append(Part(f"{path}.{name}.weight", weight, rows))
            return maker.linear(parts, bias)

        q, k, v = attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias
        bias = None if q is None else torch.cat([pair_halves(q, self.head_dim), pair_halves(k, self.head_dim), v])
        head_norm = None
        if hasattr(attention, "q_norm"):
            q_norm = pair_halves(attention.q_norm.weight, self.head_dim).expand(self.num_heads, -1)
            k_norm = pair_halves(attention.k_norm.weight, self.head_dim).expand(self.num_kv_heads, -1)
            head_norm = torch.cat([q_norm, k_norm]).detach()
        return _Layer(
            input_norm=layer.input_layernorm.weight.detach().to(self.compute_dtype),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", paired=2, bias=bias),
            head_norm=head_norm,
            out=linear("self_attn.o_proj", bias=attention.o_proj.bias),
            mlp_norm=layer.post_attention_layernorm.weight.detach().to(self.compute_dtype),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
            down=linear("mlp.down_proj"),
            form=form,
        )

    def _normed_heads(self, qkv: Tensor, weight: Tensor) -> Tensor:
        rows, rotated = len(qkv), self.num_heads + self.num_kv_heads
        h = qkv.view(rows, -1, self.head_dim)
        normed = F.rms_norm(h[:, :rotated], (self.head_dim,), None, self.eps_value).mul_(weight)
        return torch.cat([normed, h[:, rotated:]], 1)


def layer_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer."""
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return [window if kind == "sliding_attention" else None for kind in layer_types]
    return [window] * num_layers
