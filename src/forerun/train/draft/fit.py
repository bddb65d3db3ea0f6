"""The first fit of a cut draft: the last matrices of its feed-forward parts, solved for instead of learnt.

After each layer that a draft keeps, its state should be the one that enters the next of these in the model that it was
cut from. A layer's state is linear in the last matrix of its feed-forward part, so the best one for some text is a
ridge regression, whose normal equations a pass over the text sums up. Layers are solved one after another, each on the
states that those before it give, errors included, so that it makes up for them, too. ReplaceMe (2505.02819) puts a
linear map of states there; this has all inputs of the matrix to fit with, at no cost when the draft runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.models.decoders import llama_refusal
from forerun.train.accelerator import device_of, micro_tokens
from forerun.train.evaluate import behind_first, packed_inputs

RIDGE = 0.01
"""Penalty of a change of the matrix, over the mean square of its inputs, half in common and half by each."""
_LEAST_ERROR = 1e-2
"""Squared error of states, over their square, up to which a layer does what it should already: the kernels that compute
the wanted states quantize their inputs."""


def can_fit(draft: PreTrainedModel) -> bool:
    """Return whether a draft is of the Llama family: elsewhere a norm or a factor may stand behind the matrix."""
    return llama_refusal(draft.config) is None


@torch.no_grad()
def fit(draft: PreTrainedModel, tokens: Tensor, documents: Tensor, states: Tensor) -> int:
    """Solve for the last feed-forward matrices of a draft (`can_fit`).

    Args:
        tokens, documents: [rows, T] packed rows.
        states: [rows, T, layers, H] wanted after each of the last layers, the last one after the final norm.

    Returns:
        The number of matrices that were solved for.
    """
    size = max(1, micro_tokens(draft) // tokens.shape[1])
    split = [torch.split(each.to(device_of(draft)), size) for each in (tokens.long(), documents)]
    inputs = [packed_inputs(draft, *each) for each in zip(*split, strict=True)]
    hidden, arguments = map(list, zip(*(_arguments(draft, each) for each in inputs), strict=True))
    used = [behind_first(each) for each in split[1]]
    layers = draft.base_model.layers
    first = len(layers) - states.shape[2]
    solved = 0
    for index, layer in enumerate(layers):
        own_arguments = [more[index] for more in arguments]
        last = index == len(layers) - 1
        if index >= first:
            wanted = torch.split(states[:, :, index - first], size)
            scale = draft.base_model.norm.weight if last else None
            equations = _equations(layer, hidden, own_arguments, used, wanted, scale)
            if equations.matter:
                layer.mlp.down_proj.weight += equations.solution().T
                solved += 1
        if not last:
            for part, more in enumerate(own_arguments):
                hidden[part] = layer(hidden[part], **more)
    return solved


def _equations(
    layer: Any,
    hidden: Sequence[Tensor],
    arguments: Sequence[dict[str, Any]],
    used: Sequence[Tensor],
    wanted: Sequence[Tensor],
    scale: Tensor | None,
) -> _NormalEquations:
    """Sum up, part by part, what a layer's states lack.

    Args:
        hidden, arguments: the state that enters it, [rows, T, H], and what else it is called with.
        used: bool [rows, T], the positions that count.
        wanted: [rows, T, H].
        scale: of the final norm, [H], which wanted states have behind them; None for those of other layers.
    """
    equations = _NormalEquations()
    with _InputOf(layer.mlp.down_proj) as into:
        for state, more, rows, each in zip(hidden, arguments, used, wanted, strict=True):
            own = layer(state, **more)[rows]
            goal = each.to(state.device)[rows].float()
            if scale is not None:  # what the norm takes away, the length and numbers that it makes 0, stays as it is
                length = own.square().mean(1, keepdim=True).sqrt()
                goal = torch.where(scale == 0, own, goal / scale * length)
            if not equations.add(into.value[rows], own, goal):
                break
    return equations


class _NormalEquations:
    """The sums of a regression of what states lack on the inputs of a matrix, each row over its wanted state's length,
    as the next norm sees it.

    Attributes:
        matter: whether the first rows lack more than `_LEAST_ERROR`.
    """

    def __init__(self) -> None:
        self.matter = False
        self._squares: Tensor | None = None
        self._products: Tensor | None = None

    def add(self, inputs: Tensor, own: Tensor, wanted: Tensor) -> bool:
        """Add rows; return whether more are worth while. inputs: [N, I]. own, wanted: [N, H]."""
        factor = wanted.square().mean(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny).rsqrt()
        inputs, missing = inputs * factor, (wanted - own) * factor
        if self._squares is None or self._products is None:
            self.matter = bool(missing.square().mean() > _LEAST_ERROR)
            self._squares = inputs.new_zeros(inputs.shape[1], inputs.shape[1])
            self._products = inputs.new_zeros(inputs.shape[1], missing.shape[1])
        if self.matter:
            self._squares.addmm_(inputs.T, inputs)
            self._products.addmm_(inputs.T, missing)
        return self.matter

    def solution(self) -> Tensor:
        """Solve for the change [I, H] of the matrix."""
        assert self._squares is not None
        assert self._products is not None
        diagonal = self._squares.diagonal()
        diagonal += RIDGE / 2 * (diagonal + diagonal.mean())
        return torch.cholesky_solve(self._products, torch.linalg.cholesky(self._squares))


class _InputOf:
    """Sees what enters a module while the block lasts.

    Attributes:
        value: the last one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.value = torch.empty(0)
        self._handle = module.register_forward_pre_hook(self._see)

    def __enter__(self) -> _InputOf:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _see(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.value = inputs[0]


def _arguments(draft: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return the state that enters the first layer, and the other arguments of each, by layers that compute nothing."""
    states: list[Tensor] = []
    arguments: list[dict[str, Any]] = []

    def see(hidden_states: Tensor, **others: Any) -> Tensor:
        states.append(hidden_states)
        arguments.append(others)
        return hidden_states

    layers = draft.base_model.layers
    try:
        for layer in layers:
            layer.forward = see
        draft.base_model(**inputs, use_cache=False)
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
    return states[0], arguments
