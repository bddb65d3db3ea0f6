"""The PyTorch decoder of the families that `spec.py` describes, in few, large operations.

Query, key and value are one product, gate and up another; residuals are added inside the products that precede them;
the rotation of queries and keys is one complex multiplication. It defines what the native kernels compute. Everything
else is served by `models/general.py`; both are tested against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.kernels.partition import AttentionShape
from forerun.kernels.torch.elementwise import gelu, rms_norm, sigmoid, silu, softcap
from forerun.kv_cache.recurrent_state import StateMaker
from forerun.models.attention.base import Layout
from forerun.models.attention.reference import ReferenceAttention
from forerun.models.base import HiddenStateOutputs, LayerRangeDecoder
from forerun.models.families.table import frequencies, spec_in
from forerun.models.fused.experts import ExpertLayer, bias_of, router_norm_of, take_apart
from forerun.models.fused.latent import LatentLayer
from forerun.models.fused.parts import (
    PerLayerInputRows,
    attention_shape,
    attentions_of,
    numbers_of,
    parts_of,
    state_layout,
    table_and_product,
    xielu_params,
)
from forerun.models.fused.recurrence import RecurrentLayer
from forerun.models.linear import FloatMaker, Linear, LinearPart, Maker, at_path, make_linear, module_tensors, of_rows
from forerun.models.rope import RotaryEmbedding, apply_rotary
from forerun.models.spec.attention import AnyAttention, Attention, LatentAttention
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import EXPERT, AnyFeedForward, Experts, FeedForward
from forerun.models.spec.layer import LayerSpec, PerLayerInput
from forerun.models.spec.recurrence import IN_PROJ
from forerun.models.weight_plan import roles_of_products

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu2": lambda x: x.relu().square(),
    "relu": torch.relu,
}


def _xielu(x: Tensor, activation_params: Tensor) -> Tensor:
    """Return xIELU (2411.13010) of x. activation_params: [3], alpha of positive and of negative numbers, beta."""
    above, below, beta = activation_params
    wide = x.to(activation_params.dtype)
    bent = torch.where(wide > 0, above * wide * wide, below * (torch.expm1(wide.clamp(max=-1e-6)) - wide))
    found: Tensor = bent + beta * wide
    return found.to(x.dtype)


def _places(own: Attention, device: torch.device) -> Tensor:
    """Return where the numbers of a head as the files have it, in order, are in one whose rows are in pairs."""
    order = own.head_order(in_pairs=True)
    return torch.arange(own.head_dim, device=device) if order is None else order.argsort().to(device)


def activated(own: AnyFeedForward, gate: Tensor, up: Tensor) -> Tensor:
    """Return what a gate and its partner give, [T, width]."""
    if isinstance(own, Experts) and own.swiglu is not None:
        alpha, limit = own.swiglu
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
        return gate * sigmoid(gate * alpha) * (up + 1)
    return _ACTIVATIONS[own.activation](_scaled(own, gate)).mul_(up)


def _scaled(own: AnyFeedForward, gate: Tensor) -> Tensor:
    return gate if own.activation_scale == 1.0 else gate * own.activation_scale


@dataclass(slots=True)
class Norm:
    """The weight and bias of a norm, in the type they are multiplied in."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(slots=True)
class _Layer:
    spec: LayerSpec
    norms: dict[str, Norm]
    """By role."""
    linears: dict[str, Linear]
    """By the first of the roles whose products are one."""
    recurrence: RecurrentLayer | None
    experts: ExpertLayer | None
    cached: int
    """The place of its keys and values among those that are kept."""
    form: AttentionShape | None
    xielu: Tensor | None
    """[3], the parameters of that activation."""
    latent: LatentLayer | None
    scale: Tensor | None
    """[1], of what comes out of it."""


class FusedDecoder(LayerRangeDecoder):
    """The decoder of a Transformers model of one of the families, with its weights rearranged.

    Args:
        model: the loaded causal language model, on its device. Its layers are emptied one by one as their weights are
            copied, so that memory does not hold all of them twice; the model is of no use afterwards.
        maker: of embedding and linear layers; None: of the numbers as they are.
        output_tokens: int64, those whose logits are computed, in this order; None for all.
        spec: of the model; None: that of its modules or its configuration.
    """

    def __init__(
        self,
        model: Any,
        maker: Maker | None = None,
        output_tokens: Tensor | None = None,
        spec: DecoderSpec | None = None,
    ) -> None:
        maker = maker or FloatMaker()
        self.spec = spec = spec or spec_in(model)
        base = model.get_submodule(spec.base)
        table = base.get_submodule(spec.embeddings.module)
        head_module = getattr(model, spec.output.module)
        embedding = LinearPart(spec.embedding_weight, table.weight)
        self.embedding = maker.embedding(embedding)
        self.dtype = self.embedding.dtype
        self.device = self.embedding.device
        self.compute_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.eps = torch.tensor(spec.norms.eps, dtype=self.compute_dtype, device=self.device)
        self.embedding_scale = spec.embeddings.scale_in(self.dtype)
        self.positions: Tensor | None = None
        if spec.embeddings.positions is not None:
            positions = base.get_submodule(spec.embeddings.positions).weight.detach()
            self.positions = positions[spec.embeddings.first_position :].to(self.compute_dtype)
        self.norm = self._numbers(base, spec.output.norm, spec.hidden) if spec.output.norm else None
        is_tied = head_module.weight is table.weight
        head = embedding if is_tied else LinearPart(spec.head_weight, head_module.weight)
        self.lm_head = maker.linear(
            [head._replace(rows=output_tokens)], of_rows(head_module.bias, output_tokens), is_head=True
        )
        if not is_tied:
            head_module.to_empty(device="meta")
        self.per_layer_parts: dict[str, object] = {}
        self.per_layer_inputs = self._per_layer_input_rows(base, maker)
        self.ropes = [
            RotaryEmbedding(*each, self.compute_dtype, self.device) for each in frequencies(model.config, spec)
        ]
        self.attention = ReferenceAttention(self.dtype)
        self.layers: list[_Layer] = []
        for index, (layer, own) in enumerate(zip(base.get_submodule(spec.layer_list), spec.layers, strict=True)):
            self.layers.append(self._rearranged(layer, spec.layer_path(index), own, maker))
            layer.to_empty(device="meta")
        self.num_layers = len(self.layers)
        self.planner = self.attention.planner(attentions_of(spec), self.device)
        if (states := state_layout(spec)) is not None:
            self.planner.new_state = StateMaker(states, self.num_layers, is_native=False)

    def embed(self, layout: Layout) -> Tensor:
        """Return what enters the first layer, [T, hidden] (`LayerRangeDecoder.embed`)."""
        x: Tensor = self.embedding[layout.token_ids]
        x = x if self.embedding_scale == 1.0 else x * self.embedding_scale
        x = self._normed(x, self.norm) if self.spec.embeddings.is_normed else x
        return x if self.positions is None else (x + self.positions[layout.positions]).to(x.dtype)

    def forward_layers(
        self, x: Tensor, layout: Layout, first: int, last: int, hidden_outputs: HiddenStateOutputs
    ) -> Tensor:
        """Compute layers `first` to `last` - 1: [T, hidden] -> [T, hidden] (`LayerRangeDecoder.forward_layers`)."""
        cos_sin = self.cos_sin(layout)
        given = None
        if self.per_layer_inputs is not None:
            given = self.per_layer_inputs.of(layout.token_ids, self.embed(layout) if first else x)
        for index in range(first, last):
            hidden_outputs.take(index, x)
            x = self.behind_norm(index, x, self._normed(x, self.layers[index].norms.get("input_norm")), layout, cos_sin)
            per_layer = self.layers[index].spec.per_layer_input
            if given is not None and per_layer is not None:
                x = self._with_token(self.layers[index], per_layer, x, given[:, index])
            x = x if (scale := self.layers[index].scale) is None else (x * scale).to(x.dtype)
        return x

    def cos_sin(self, layout: Layout) -> list[Tensor]:
        """Return the complex factors of the rows, of each rotation."""
        return [rope.cos_sin(layout) for rope in self.ropes]

    def behind_norm(self, index: int, x: Tensor, h: Tensor, layout: Layout, cos_sin: list[Tensor]) -> Tensor:
        """Compute a layer behind its first norm, [T, hidden]. x: what is added to. h: what its attention reads."""
        layer = self.layers[index]
        own = layer.spec.attention
        feed_forward = layer.spec.feed_forward
        behind = layer.norms.get("attention_norm")
        attended = None if own is None else self._attended(layer, own, h, layout, cos_sin)
        fed = None
        if layer.spec.is_parallel and feed_forward is not None:
            fed = self._fed(layer, feed_forward, x)
        if layer.recurrence is not None:
            recalled = layer.recurrence.forward(h, layout.packed).to(x.dtype)
            x = self._added(x, layer.linears["out_proj"], recalled, behind, layer.recurrence.out_scale)
        if attended is not None:
            out_scale = own.out_scale if isinstance(own, Attention) else 1.0
            x = self._added(x, layer.linears["out"], attended, behind, out_scale)
        if feed_forward is not None:
            fed = self._fed(layer, feed_forward, x) if fed is None else fed
            down = None if layer.experts is not None else layer.linears["down"]
            x = self._added(x, down, fed, layer.norms.get("feed_norm"), feed_forward.out_scale)
        return x

    def head(self, x: Tensor, layout: Layout, hidden_outputs: HiddenStateOutputs) -> Tensor:
        """Return the logits of the requested rows, [R, V], from the output of the last layer or, to exit early, any
        other (`LayerRangeDecoder.head`)."""
        hidden_outputs.take(self.num_layers, x, partial(self._normed, norm=self.norm))
        x = self._normed(layout.select_logit_rows(x), self.norm)
        if not layout.num_logits:
            return x.new_empty(0, self.lm_head.out_features)
        logits = self.lm_head.forward(x)
        output = self.spec.output
        logits = logits if output.scale == 1.0 else logits * output.scale
        return logits if output.softcap is None else softcap(logits, output.softcap)

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, [n, hidden] float32 (`Decoder.embedding_rows`)."""
        return self.embedding[token_ids].float()

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer's weight, [n, hidden] float32 (`Decoder.output_rows`)."""
        return self.lm_head.rows(token_ids)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the numbers by the names of the checkpoint; some tensors lie side by side, and are named together
        (`NamedTensors`)."""
        spec = self.spec
        # if quantized, it is finite
        parts: list[tuple[str, object]] = [(spec.embedding_weight, self.embedding)]
        parts.append((f"{spec.base}.{spec.embeddings.positions}.weight", self.positions))
        parts += self.per_layer_parts.items()
        for index, layer in enumerate(self.layers):
            own = layer.spec
            path = spec.layer_path(index)
            parts.append((f"{path}.{own.scalar}", layer.scale))
            parts.append((f"{path}.{getattr(own.feed_forward, 'xielu', None)}", layer.xielu))
            if layer.recurrence is not None:
                numbers = layer.recurrence.numbers
                parts += [(f"{path}.{name}", each) for name, each in numbers.items()]
            if layer.latent is not None:
                heads = nn.ModuleList(
                    each for both in layer.latent.heads for each in both if isinstance(each, nn.Module)
                )
                parts.append((f"{path}.{layer.latent.kv_b_proj}", heads))
            shared = {"gate": "gate and up"} | ({"query": "query, key and value"} if layer.latent is None else {})
            shared |= {IN_PROJ[0]: "query, key and value"} if IN_PROJ[1] in own.roles else {}
            for role, each in (layer.norms | layer.linears).items():
                module = own.module(role)
                name = f"{module} ({shared[role]})" if role in shared else module
                parts.append((f"{path}.{name}", each))
        for name, part in [
            *parts,
            (f"{spec.base}.{spec.output.norm}", self.norm),
            (spec.output.module, self.lm_head),
        ]:
            if isinstance(part, Norm):
                yield f"{name}.weight", part.weight
                if part.bias is not None:
                    yield f"{name}.bias", part.bias
            elif isinstance(part, Tensor):
                yield name, part
            elif isinstance(part, nn.Module):
                yield from module_tensors(part, name + ".")

    def _attended(self, layer: _Layer, own: AnyAttention, h: Tensor, layout: Layout, cos_sin: list[Tensor]) -> Tensor:
        """Return what a layer's attention gives, [T, heads * D]. h: what it reads."""
        own_cos_sin = None if own.rope is None else cos_sin[own.rope]
        assert layer.form is not None
        if layer.latent is not None:
            heads_of = layer.latent.enter(h, own_cos_sin)
            return layer.latent.leave(self.attention.forward(layer.cached, *heads_of, layout, layer.form))
        assert isinstance(own, Attention)
        heads = own.num_heads
        rotated = own.num_heads + own.num_kv_heads
        gate = layer.linears.get("attention_gate")
        gates = None if gate is None else gate.forward(h)
        gates = gates.repeat_interleave(own.head_dim, 1) if gates is not None and own.gates_heads else gates
        h = layer.linears["query"].forward(h).to(self.compute_dtype).view(len(h), -1, own.head_dim)
        if "value" not in own.modules and "key" in own.modules:
            h = torch.cat([h, h[:, heads:, _places(own, h.device)]], 1)
        if not own.norms_rotated:
            h = self._normed_heads(own, h, layer.norms)
        if own_cos_sin is not None:
            apply_rotary(h[:, :rotated, : own.rotated], own_cos_sin)
        if own.norms_rotated:
            h = self._normed_heads(own, h, layer.norms)
        query = h[:, :heads]
        key = h[:, heads:rotated]
        value = h[:, rotated:]
        if own.query_growth:
            periods = (layout.positions // own.query_period).to(self.compute_dtype)
            query = query * (1 + own.query_growth * torch.log1p(periods))[:, None, None]
        if "key" in own.modules:
            attended = self.attention.forward(layer.cached, query, key, value, layout, layer.form)
        else:
            attended = self.attention.attend(layer.cached, query, layout, layer.form)
        return attended if gates is None else attended * sigmoid(gates)

    def _fed(self, layer: _Layer, own: AnyFeedForward, x: Tensor) -> Tensor:
        """Return what the last product of the feed-forward layer reads, [T, intermediate]; of a mixture of experts,
        what that gives, [T, hidden]."""
        h = self._normed(x, layer.norms.get("mlp_norm"))
        if layer.experts is not None:
            routed = self._routed(layer, layer.experts, x, h)
            shared = layer.linears.get("shared_gate")
            if shared is None:
                return routed
            gate, up = shared.forward(h).chunk(2, 1)
            always = layer.linears["shared_down"].forward(activated(own, gate, up))
            always = self._normed(always, layer.norms.get("shared_norm"))
            shared_gate = layer.experts.shared_expert_gate
            return routed + (always if shared_gate is None else always * sigmoid(shared_gate.forward(h)))
        if "gate" in layer.linears:
            return activated(own, *layer.linears["gate"].forward(h).chunk(2, 1))
        up = _scaled(own, layer.linears["up"].forward(h))
        return _ACTIVATIONS[own.activation](up) if layer.xielu is None else _xielu(up, layer.xielu)

    def _with_token(self, layer: _Layer, own: PerLayerInput, x: Tensor, given: Tensor) -> Tensor:
        """Return x, [T, hidden], with what its tokens give the layer. given: [T, width]."""
        gate, projection = own.ROLES
        h = _ACTIVATIONS[own.activation](layer.linears[gate].forward(x)) * given
        return self._added(x, layer.linears[projection], h, layer.norms.get(own.NORMS[0]), 1.0)

    def _routed(self, layer: _Layer, experts: ExpertLayer, x: Tensor, h: Tensor) -> Tensor:
        """Return what the selected experts give, [T, hidden]. x: the residual. h: the same behind "mlp_norm"."""
        if experts.router_norm is None:
            return experts.forward(h, h)
        scored = rms_norm(x, experts.router_norm, self.eps)
        routed = experts.forward(self._normed(x, layer.norms["expert_norm"]), scored)
        return self._normed(routed, layer.norms.get("routed_norm"))

    def _added(self, x: Tensor, linear: Linear | None, h: Tensor, norm: Norm | None, factor: float) -> Tensor:
        """Return x + the product of h, normed and scaled, by the decoder's factor and this one. linear: None where h is
        added itself."""
        scale = self.spec.residual_scale * factor
        if linear is None:
            return x + self._normed(h, norm) * scale
        if norm is None and scale == 1.0:
            return linear.add_to(x, h)
        return x + self._normed(linear.forward(h), norm) * scale

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        if self.spec.norms.kind == "rms":
            return rms_norm(x, norm.weight, self.eps)
        wide = x.to(self.compute_dtype)
        return F.layer_norm(wide, wide.shape[-1:], norm.weight, norm.bias, self.spec.norms.eps).to(x.dtype)

    def _normed_heads(self, own: Attention, h: Tensor, norms: Mapping[str, Norm]) -> Tensor:
        """Return queries, keys and values, [T, heads, D], behind their norms."""
        if "query_norm" not in norms:
            return h
        kept = [own.num_kv_heads] * 2 if "key" in own.modules else []
        parts = list(torch.split(h, [own.num_heads, *kept], 1))
        eps = self.spec.norms.eps
        for place, role in enumerate(role for role in ("query_norm", "key_norm") if role in norms):
            part = parts[place].flatten(1) if own.has_wide_norms else parts[place]
            normed = F.rms_norm(part, part.shape[-1:], None, eps).mul_(norms[role].weight)
            parts[place] = normed.view(parts[place].shape)
        if own.norms_values and parts[2:]:
            parts[2] = F.rms_norm(parts[2], parts[2].shape[-1:], None, eps)
        return torch.cat(parts, 1)

    def _numbers(self, parent: Any, name: str, width: int, order: Tensor | None = None) -> Norm:
        """Return the numbers of a norm."""
        if not self.spec.norms.has_weights:
            return Norm(torch.ones(width, dtype=self.compute_dtype, device=self.device))
        module = parent.get_submodule(name)
        weight = module.weight.detach().to(self.compute_dtype, copy=True) + self.spec.norms.offset
        bias = getattr(module, "bias", None)
        return Norm(
            weight if order is None else weight[order],
            None if bias is None else bias.detach().to(self.compute_dtype, copy=True),
        )

    def _per_layer_input_rows(self, base: Any, maker: Maker) -> PerLayerInputRows | None:
        """Return what makes the inputs that tokens give layers."""
        spec = self.spec
        shape = self.spec.embeddings.per_layer
        if shape is None:
            return None
        table, product = table_and_product(spec, shape, base)
        rows = maker.embedding(table)
        linear = maker.linear([product])
        norm = self._numbers(base, shape.norm, shape.width)
        names = (f"{spec.base}.{name}" for name in (shape.table, shape.product, shape.norm))
        self.per_layer_parts = dict(zip(names, (rows, linear, norm), strict=True))
        normed = partial(self._normed, norm=norm)
        return PerLayerInputRows(shape, rows.__getitem__, linear, normed, self.dtype)

    def _rearranged(self, layer: Any, path: str, own: LayerSpec, maker: Maker) -> _Layer:
        roles = own.roles

        def linear(*wanted: str) -> Linear:
            """Make the layer of these roles; the rows of queries and keys are paired."""
            return maker.linear(*parts_of(own, layer, path, wanted, in_pairs=True))

        def norm(role: str) -> Norm:
            return self._numbers(layer, own.module(role), own.norm_width(role), own.norm_order(role, in_pairs=True))

        linears = {each[0]: linear(*each) for each in roles_of_products(roles, is_native=False)}
        norms = {role: norm(role) for role in own.all_norms}
        recurrence = latent = xielu = None
        if own.recurrence is not None:
            numbers = numbers_of(own.recurrence, layer)
            recurrence = RecurrentLayer(own.recurrence, len(self.layers), numbers, linears, self.compute_dtype)
        if isinstance(own.attention, LatentAttention):
            weights = {role: each.weight for role, each in norms.items()}
            latent = LatentLayer(own.attention, layer, linears, weights, self.dtype)
        if isinstance(own.feed_forward, FeedForward) and own.feed_forward.xielu is not None:
            xielu = xielu_params(layer.get_submodule(own.feed_forward.xielu)).to(self.eps)
        return _Layer(
            spec=own,
            norms=norms,
            linears=linears,
            recurrence=recurrence,
            experts=None if own.experts is None else self._experts(layer, path, own, own.experts, maker),
            cached=self.spec.cached(len(self.layers)),
            form=None if own.attention is None else attention_shape(own.attention, layer),
            xielu=xielu,
            latent=latent,
            scale=None if own.scalar is None else at_path(layer, own.scalar).to(self.eps),
        )

    def _experts(self, layer: Any, path: str, own: LayerSpec, shape: Experts, maker: Maker) -> ExpertLayer:
        """Return the experts of a layer. The router's weights stay numbers."""
        take_apart(shape, layer, path)

        def linears(*roles: str) -> list[Linear]:
            indices = range(shape.num_experts)
            each = (parts_of(own, layer, path, roles, in_pairs=True, expert=index) for index in indices)
            return [maker.linear(*parts) for parts in each]

        gate_up, down = (linears(*roles) for roles in roles_of_products(EXPERT, is_native=False))
        router = layer.get_submodule(shape.router)
        reads = torch.promote_types(router.weight.dtype, self.dtype)
        bias = getattr(router, "bias", None)
        shared_gate = None if shape.shared_expert_gate is None else layer.get_submodule(shape.shared_expert_gate)
        return ExpertLayer(
            shape,
            make_linear(router.weight.detach().to(reads), None if bias is None else bias.detach().to(reads)),
            bias_of(shape, layer),
            None if shared_gate is None else make_linear(shared_gate.weight.detach()),
            gate_up,
            down,
            partial(activated, shape),
            reads,
            self.compute_dtype,
            router_norm_of(shape, self.spec.hidden, layer),
            None if shape.per_expert_scale is None else at_path(layer, shape.per_expert_scale).detach(),
        )
