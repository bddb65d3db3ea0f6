"""A Transformers model's weights in the form in which the Triton kernels read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.config import KERNELS_VARIABLE
from forerun.errors import UnsupportedModelError
from forerun.kernels.quantised_embedding import QuantisedEmbedding
from forerun.kernels.quantised_weight import QuantisedWeight
from forerun.kernels.triton.availability import check_heads
from forerun.kernels.triton.linear import FloatProduct, Product
from forerun.kernels.triton.quantised_linear import RowCodes, code_product
from forerun.models.linear import Part, of_rows
from forerun.models.llama import head_shape
from forerun.models.quantising import QuantisedMaker
from forerun.models.triton_layers import TritonLayer


class WeightPacker:
    """Takes the layers of a model of the Llama family one after another, and empties each.

    Attributes:
        num_heads, num_kv_heads, head_dim: of attention.
        takes: the type in which products take their inputs, that of all that is not in codes.
        norm: the final norm's weight, float32.

    Raises:
        UnsupportedModelError: the heads have a shape that the kernels do not compute, or codes of different forms stand
            side by side.
    """

    def __init__(self, model: Any, dtype: torch.dtype, maker: QuantisedMaker | None) -> None:
        self._model, self._maker = model, maker
        self.num_heads, self.num_kv_heads, self.head_dim = head_shape(model.config)
        check_heads(type(model).__name__, self.num_heads, self.num_kv_heads, self.head_dim)
        self.takes = dtype
        self._row_codes = RowCodes(model.device)
        self.norm = _numbers(model.model.norm.weight)

    def outer(self, output_tokens: Tensor | None) -> tuple[Tensor | QuantisedEmbedding, Product]:
        """Embedding and output layer. output_tokens: int64, the rows of the latter that are wanted; None: all."""
        model = self._model
        table, head = model.model.embed_tokens, model.lm_head
        is_tied = head.weight is table.weight
        part = Part("model.embed_tokens.weight", table.weight)
        embedding = table.weight.detach() if self._maker is None else self._maker.embedding(part)
        part = part if is_tied else Part("lm_head.weight", head.weight)
        product = self._product([part._replace(rows=output_tokens)], of_rows(head.bias, output_tokens), is_head=True)
        if not is_tied:
            head.to_empty(device="meta")
        return embedding, product

    def layer(self, index: int, window: int | None) -> TritonLayer:
        """The weights of a layer, of which the model keeps nothing."""
        layer, path = self._model.model.layers[index], f"model.layers.{index}"
        attention = layer.self_attn

        def product(*names: str) -> Product:
            modules = [layer.get_submodule(name) for name in names]
            parts = [Part(f"{path}.{name}.weight", module.weight) for name, module in zip(names, modules, strict=True)]
            biases = [module.bias for module in modules if module.bias is not None]
            return self._product(parts, torch.cat(biases) if biases else None)

        head_norms = None
        if hasattr(attention, "q_norm"):
            head_norms = torch.stack([_numbers(attention.q_norm.weight), _numbers(attention.k_norm.weight)])
        packed = TritonLayer(
            input_norm=_numbers(layer.input_layernorm.weight),
            qkv=product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            head_norms=head_norms,
            out=product("self_attn.o_proj"),
            mlp_norm=_numbers(layer.post_attention_layernorm.weight),
            gate_up=product("mlp.gate_proj", "mlp.up_proj"),
            down=product("mlp.down_proj"),
            window=window,
        )
        layer.to_empty(device="meta")
        return packed

    def _product(self, parts: list[Part], bias: Tensor | None, *, is_head: bool = False) -> Product:
        if self._maker is not None:
            codes = [self._maker.weight(part, is_outer=is_head) for part in parts]
            if len({weight.form for weight in codes}) > 1:
                names = ", ".join(part.name for part in parts)
                raise UnsupportedModelError(
                    f"{names} are in codes of different forms, which the Triton kernels do not multiply as one. Unset "
                    f"{KERNELS_VARIABLE} to compute in PyTorch, or load a file that has them in one form."
                )
            return code_product(QuantisedWeight.cat(codes), bias, self.takes, self._row_codes)
        weights = [part.weight if part.rows is None else part.weight[part.rows] for part in parts]
        return FloatProduct(weights[0] if len(weights) == 1 else torch.cat(weights), bias)


def _numbers(weight: Tensor) -> Tensor:
    return weight.detach().float().clone()
