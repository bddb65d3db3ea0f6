"""What the decoders in PyTorch and by native kernels share: products from their parts, attentions, recurrences,
and the inputs that tokens give layers beside their embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.partition import AttentionShape
from forerun.kv_cache.recurrent_state import StateLayout
from forerun.models.attention.base import LayerAttention
from forerun.models.linear import Linear, LinearPart, at_path, of_rows
from forerun.models.spec.attention import AnyAttention, Attention, LatentAttention
from forerun.models.spec.decoder import DecoderSpec, PerLayerInputs, keeps_keys
from forerun.models.spec.layer import LayerSpec
from forerun.models.spec.recurrence import Recurrence


def attention_shape(own: AnyAttention, layer: Any = None) -> AttentionShape:
    """Return the form of a layer's attention. layer: its modules, for `Attention.sinks`."""
    if not isinstance(own, Attention):
        return AttentionShape(own.scale, own.window)
    sinks = None if own.sinks is None or layer is None else at_path(layer, own.sinks).detach()
    return AttentionShape(own.scale, own.window, own.softcap, sinks)


def attentions_of(spec: DecoderSpec) -> list[LayerAttention]:
    """Return the attention of each layer with keys and values of its own."""
    found = []
    for own in (layer.attention for layer in spec.layers if keeps_keys(layer)):
        assert own is not None
        group = own.num_heads // max(1, own.num_kv_heads)
        found.append(LayerAttention(own.num_kv_heads, group, *own.cached_widths, attention_shape(own)))
    return found


def weights_by_head(own: LatentAttention, layer: Any) -> tuple[Tensor, Tensor]:
    """Return what brings queries to the latent, [heads, kv_lora_rank, plain], but for what is rotated of them; and what
    brings sums of latents to values, [heads, v_head_dim, kv_lora_rank]."""
    plain = own.head_dim - own.rotated
    weight: Tensor = layer.get_submodule(own.kv_b_proj).weight.detach()
    both = weight.view(own.num_heads, plain + own.v_head_dim, own.kv_lora_rank)
    return both[:, :plain].transpose(1, 2), both[:, plain:]


def parts_of(
    own: LayerSpec, layer: Any, path: str, roles: Iterable[str], *, in_pairs: bool, expert: int = 0
) -> tuple[list[LinearPart], Tensor | None]:
    """Return the parts of a product that has the outputs of these roles, one after another, and its bias.

    Args:
        layer: the modules of a layer. path: of it.
        in_pairs: as of `Part.rows` in models/spec/part.py. expert: whose they are, of the roles of experts.
    """
    parts = []
    biases = []
    for role in roles:
        of = own.part_of(role)
        name = of.module(role, expert)
        rows = of.rows(role, in_pairs=in_pairs)
        module = layer.get_submodule(name)
        rows = None if rows is None else rows.to(module.weight.device)
        parts.append(LinearPart(f"{path}.{name}.weight", own.weight(module), rows, own.is_transposed))
        biases.append(of_rows(module.bias, rows))
    found = [each for each in biases if each is not None]
    return parts, torch.cat(found) if found else None


def xielu_params(module: Any) -> Tensor:
    """Return the numbers of one of Transformers' modules for xIELU (2411.13010), [3] float64: alpha of positive
    and of negative numbers, beta."""
    above, below, beta = (each.detach().double().reshape(()) for each in (module.alpha_p, module.alpha_n, module.beta))
    return torch.stack([F.softplus(above), beta + F.softplus(below), beta])


def state_layout(spec: DecoderSpec) -> StateLayout | None:
    """Return the sizes of a decoder's states; None if no layer is recurrent."""
    count = sum(layer.recurrence is not None for layer in spec.layers)
    shape = spec.recurrence
    return StateLayout(count * shape.state_size, count * shape.record_size) if shape is not None else None


def numbers_of(shape: Recurrence, layer: Any) -> dict[str, Tensor]:
    """Return the parameters of a layer's recurrence, float64 or float32: "conv1d" [conv_kernel, channels], and where
    there are any "conv1d_bias" [channels], "A_log" (as -exp of it), "dt_bias", "D" [heads] and "norm" [heads *
    value_width]."""
    found: dict[str, Tensor] = {}
    for name, path in shape.parameters.items():
        part = at_path(layer, path)
        if name == "conv1d":
            found[name] = part.weight.detach().reshape(shape.channels, shape.conv_kernel).T
            if shape.scales:  # the convolution is linear
                found[name] = found[name].double() * shape.channel_scales.to(found[name].device)
            if part.bias is not None:
                found["conv1d_bias"] = part.bias.detach()
        elif name == "norm":
            found[name] = part.weight.detach().repeat(shape.heads if shape.norms_each else 1)
        else:
            found[name] = -part.detach().double().exp() if name == "A_log" else part.detach()
    return found


def table_and_product(spec: DecoderSpec, shape: PerLayerInputs, base: Any) -> list[LinearPart]:
    """Return the weights of the table and of the product."""
    names = shape.table, shape.product
    return [LinearPart(f"{spec.base}.{name}.weight", base.get_submodule(name).weight) for name in names]


class PerLayerInputRows:
    """The inputs of all layers.

    Args:
        rows: returns those of tokens in the table, [n, layers * width].
        product: of embeddings.
        normed: norms rows, [n, width].
        dtype: of the model.
    """

    def __init__(
        self,
        shape: PerLayerInputs,
        rows: Callable[[Tensor], Tensor],
        product: Linear,
        normed: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        self._shape = shape
        self._rows = rows
        self._product = product
        self._normed = normed
        self._table_scale = float(torch.tensor(shape.width**0.5, dtype=torch.float64).to(dtype))

    def of(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """Return what tokens [T] with these embeddings, [T, hidden], give each layer, [T, layers, width]."""
        given = self._product.forward(x) * self._product.in_features**-0.5
        given = self._normed(given.view(-1, self._shape.width)).view(given.shape)
        both = (given + self._rows(token_ids) * self._table_scale) * 2**-0.5
        return both.view(len(x), -1, self._shape.width)
