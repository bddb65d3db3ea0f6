"""Mixtures of experts: those of Transformers taken apart, and in PyTorch what the native kernels compute
(csrc/kernels/experts.h)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from forerun.errors import ModelLoadError
from forerun.kernels.partition import MIN_ROWS
from forerun.kernels.torch.elementwise import sigmoid
from forerun.models.linear import Linear, at_path, place
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import Experts

_STACKED = {"gate_up_proj": ("expert_gate", "expert_up"), "down_proj": ("expert_down",)}
"""Transformers' parameters of all experts, [count, out, in], and the roles that each has."""
_Stack = TypeVar("_Stack")


def apart(
    spec: DecoderSpec, stacks: Mapping[str, _Stack], take: Callable[[_Stack, int, str], _Stack]
) -> dict[str, _Stack]:
    """Return parameters by name, with one of each expert in place of those of all experts.

    Args:
        take: returns that of an expert and a role.
    """
    return dict(stacks) if spec.experts is None else _apart(spec.experts, stacks, take)


def _apart(
    experts: Experts, stacks: Mapping[str, _Stack], take: Callable[[_Stack, int, str], _Stack]
) -> dict[str, _Stack]:
    found = dict[str, _Stack]()
    for name, stack in stacks.items():
        path, _, leaf = name.rpartition(".")
        roles = _STACKED.get(leaf.removesuffix("_bias"), ())
        if not roles or not path.endswith(experts.stacked):
            found[name] = stack
            continue
        layer = path.removesuffix(experts.stacked)
        kind = "bias" if leaf.endswith("_bias") else "weight"
        for role in roles:
            for index in range(experts.num_experts):
                found[f"{layer}{experts.module(role, index)}.{kind}"] = take(stack, index, role)
    return found


def stacked(spec: DecoderSpec) -> dict[str, list[list[str]]]:
    """Return the names of Transformers' parameters of all experts, and the names of the parts of each expert."""
    found = dict[str, list[list[str]]]()
    for index, layer in enumerate(spec.layers):
        if (experts := layer.experts) is None:
            continue
        path = f"{spec.layer_path(index)}."
        for leaf, roles in _STACKED.items():
            for kind in ("weight", "bias") if roles[0] in experts.biases else ("weight",):
                name = f"{path}{experts.stacked}.{leaf}{'_bias' if kind == 'bias' else ''}"
                found[name] = [
                    [f"{path}{experts.module(role, expert)}.{kind}" for role in roles]
                    for expert in range(experts.num_experts)
                ]
    return found


def joined(experts: Experts, parts: Sequence[Tensor]) -> Tensor:
    """Return an expert's part of a parameter of all experts, the inverse of `part_of`. parts: of each role."""
    if not experts.is_transposed:
        return torch.cat([*parts])
    rows = torch.stack([*parts], 1).flatten(0, 1)
    return rows.T if rows.dim() == 2 else rows


def part_of(experts: Experts, stack: Tensor, role: str) -> Tensor:
    """Return what a role has of an expert's part of a parameter of all experts: [out, in], or a bias [out]."""
    stack = stack.T if experts.is_transposed and stack.dim() == 2 else stack
    if role == "expert_down":
        return stack
    place = int(role == "expert_up")
    width = experts.moe_intermediate_size
    return stack[place::2] if experts.is_transposed else stack[place * width :][:width]


def take_apart(experts: Experts, layer: nn.Module, path: str = "") -> None:
    """Put linear layers of each expert in place of a module of Transformers that has the parameters of all.

    path: of the layer, for messages.

    Raises:
        ModelLoadError: the router's weights are not finite: it would choose the first experts, always.
    """
    router = layer.get_submodule(experts.router)
    numbers = [(f"{experts.router}.{name}", each) for name, each in router.named_parameters(recurse=False)]
    numbers += [(name, at_path(layer, name)) for name in (experts.router_norm, experts.per_expert_scale) if name]
    for name, each in numbers:
        if each.device.type != "meta" and not each.isfinite().all():
            raise ModelLoadError(f"{path}.{name} holds NaN or infinity. Save the model anew.")
    module = layer.get_submodule(experts.stacked)
    stacks = {f"{experts.stacked}.{name}": each.detach() for name, each in module.named_parameters(recurse=False)}
    if not stacks:  # they are apart
        return
    parts = _apart(experts, stacks, lambda each, index, role: part_of(experts, each[index], role))
    own, _, leaf = experts.stacked.rpartition(".")
    layer.get_submodule(own).add_module(leaf, nn.Module())
    for name in dict.fromkeys(each.rpartition(".")[0] for each in parts):
        place(layer, name, _linear(parts[f"{name}.weight"], parts.get(f"{name}.bias")))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer of a weight [out, in] and a bias."""
    with torch.device("meta"):
        linear = nn.Linear(1, 1, bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def take_experts_apart(spec: DecoderSpec, model: nn.Module) -> None:
    """Do `take_apart` in all layers of a model."""
    for layer, own in zip(model.get_submodule(f"{spec.base}.{spec.layer_list}").children(), spec.layers, strict=True):
        if own.experts is not None:
            take_apart(own.experts, layer)


def route(experts: Experts, scores: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the selected experts of each row, [T, top] int64, and their routing weights, [T, top].

    scores: [T, count], of the router. bias: [count], or None.
    """
    is_near = experts.scoring == "sparsemixer"
    if not is_near:
        scores = sigmoid(scores) if experts.scoring == "sigmoid" else scores.softmax(-1)
    scores_for_choice = scores if bias is None else scores + bias
    if experts.n_group:
        groups = scores_for_choice.view(len(scores), experts.n_group, -1)
        sums = groups.topk(min(experts.scores_of_group, groups.shape[-1]), -1).values.sum(-1)
        left = sums.sort(dim=-1, descending=True, stable=True).indices[:, experts.topk_group :]
        groups = groups.scatter(1, left[:, :, None].expand(-1, -1, groups.shape[-1]), -torch.inf)
        scores_for_choice = groups.view(scores.shape)
    order = scores_for_choice.sort(dim=-1, descending=True, stable=True).indices
    selected_experts = order[:, : experts.num_experts_per_tok]
    if is_near:
        routing_weights = _near_weights(scores, selected_experts, experts.distance)
    else:
        routing_weights = scores.gather(1, selected_experts)
    if experts.norm_topk_prob:
        routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True).clamp(min=experts.least_sum)
    return selected_experts, routing_weights * experts.routed_scaling_factor


def _near_weights(scores: Tensor, selected_experts: Tensor, distance: float) -> Tensor:
    """Return the routing weights of the selected experts by "sparsemixer" (`Experts.scoring`), [T, top]."""
    own = scores.gather(1, selected_experts)[:, :, None]
    each = scores[:, None]
    is_far = (own - each) / each.abs().maximum(own) > distance
    taken = nn.functional.one_hot(selected_experts, scores.shape[1])
    was_before = taken.cumsum(1) > taken
    return 1 / (each - own).exp().masked_fill(is_far | was_before, 0.0).sum(-1)


class ExpertLayer:
    """The experts of one layer.

    Args:
        router: of rows in the type `reads`. bias: of `route`.
        shared_expert_gate: of the expert of all rows, whose sigmoid multiplies what that gives.
        gate_up: of each expert, the outputs of both side by side. down: of each.
        activation: of gate and up, [n, width] each.
        dtype: to choose in.
        router_norm: of `router_norm_of`. scales: [count], factors of the routing weights; None: none.
    """

    def __init__(
        self,
        shape: Experts,
        router: Linear,
        bias: Tensor | None,
        shared_expert_gate: Linear | None,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        activation: Callable[[Tensor, Tensor], Tensor],
        reads: torch.dtype,
        dtype: torch.dtype,
        router_norm: Tensor | None,
        scales: Tensor | None,
    ) -> None:
        self._shape = shape
        self._router = router
        self._reads = reads
        self._dtype = dtype
        self.shared_expert_gate = shared_expert_gate
        self._bias = None if bias is None else bias.to(dtype)
        self.router_norm = None if router_norm is None else router_norm.to(dtype)
        self._scales = None if scales is None else scales.to(dtype)
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def forward(self, h: Tensor, scored: Tensor) -> Tensor:
        """Return what the experts of each row give, [T, hidden]. h: [T, hidden], normed rows; scored: as the router
        reads them.

        An expert sees as many rows as were given to it; its products are padded to MIN_ROWS as all others are.
        """
        scores = self._router.forward(scored.to(self._reads)).to(self._dtype)
        selected_experts, routing_weights = route(self._shape, scores, self._bias)
        if self._scales is not None:
            routing_weights = routing_weights * self._scales[selected_experts]
        parts = h.new_zeros(*selected_experts.shape, h.shape[-1], dtype=self._dtype)
        for expert in sorted(set(selected_experts.flatten().tolist())):
            rows, choice = torch.where(selected_experts == expert)
            padded = torch.cat([rows, rows[-1:].expand(max(0, MIN_ROWS - len(rows)))])
            gate, up = self._gate_up[expert].forward(h[padded]).chunk(2, -1)
            given = self._down[expert].forward(self._activation(gate, up))
            parts[rows, choice] = given[: len(rows)].to(self._dtype)
        return (parts * routing_weights[:, :, None]).sum(1).to(h.dtype)


def router_norm_of(experts: Experts, hidden: int, layer: Any) -> Tensor | None:
    """Return the weight of the norm of what a router reads, [hidden]; None: it reads what experts do."""
    if experts.router_norm is None:
        return None
    found: Tensor = at_path(layer, experts.router_norm).detach()
    return found.to(torch.promote_types(found.dtype, torch.float32)) * float(hidden**-0.5)


def bias_of(experts: Experts, layer: Any) -> Tensor | None:
    """Return what is added to scores for the choice alone, [count]."""
    if experts.e_score_correction_bias is None:
        return None
    found: Tensor = at_path(layer, experts.e_score_correction_bias)
    return found.detach().reshape(-1)
