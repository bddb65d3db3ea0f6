"""A model's parameters in modules with Transformers' names, made and read without its modelling code, whose
import takes seconds. Nothing computes with these modules: the decoders of `models/fused/` take them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import nn

from forerun.models.fused.experts import apart, part_of
from forerun.models.linear import place
from forerun.models.loading.weights import FLOATS, Checkpoint, TensorSlice
from forerun.models.spec.attention import Attention, LatentAttention
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import Experts, FeedForward
from forerun.models.spec.layer import LayerSpec
from forerun.models.spec.recurrence import Recurrence
from forerun.utils.foreign_errors import REMEDY, as_load_errors


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing: drawing numbers on the device "meta" imports a compiler, which takes a second."""


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing, as `_Linear`."""


class _Norm(nn.Module):
    def __init__(self, width: int, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if has_bias else None


class Numbers(nn.Module):
    """A linear layer that is never quantized."""

    def __init__(self, out_features: int, in_features: int, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if has_bias else None


class Conv1D(nn.Module):
    """A linear layer as GPT-2 has it, of this name in Transformers: weight [in, out]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None


class _Xielu(nn.Module):
    """The numbers of Transformers' xIELU."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))
        self.beta = nn.Parameter(torch.empty(()))
        self.eps = nn.Parameter(torch.empty(()))


class FusedModules(nn.Module):
    """The modules of a model of one of the families, on the device "meta".

    Args:
        config: of Transformers, or `PlainConfig`. spec: of it.
    """

    def __init__(self, config: Any, spec: DecoderSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.spec = spec
        with torch.device("meta"):
            base: Any = nn.Module()
            embeddings = spec.embeddings
            output = spec.output
            base.add_module(embeddings.module, _Embedding(config.vocab_size, spec.hidden))
            if embeddings.positions is not None:
                positions = embeddings.first_position + config.max_position_embeddings
                base.add_module(embeddings.positions, _Embedding(positions, spec.hidden))
            if (inputs := embeddings.per_layer) is not None:
                all_layers = len(spec.layers) * inputs.width
                base.add_module(inputs.table, _Embedding(inputs.vocab_size, all_layers))
                base.add_module(inputs.product, _Linear(spec.hidden, all_layers, bias=False))
                base.add_module(inputs.norm, _Norm(inputs.width, has_bias=False))
            base.add_module(spec.layer_list, nn.ModuleList(layer_modules(spec, own) for own in spec.layers))
            if spec.norms.has_weights:
                base.add_module(output.norm, _Norm(spec.hidden, has_bias=spec.norms.has_biases))
            place(self, spec.base, base)  # first: a tied weight has its name from the embedding
            self.add_module(output.module, _Linear(spec.hidden, config.vocab_size, bias=output.has_bias))
            for name, each in self.named_parameters():
                each.data = each.data.to(spec.dtype_in(name, dtype))
        if config.tie_word_embeddings:
            self.tie()

    def tie(self) -> None:
        """Make the embedding the weight of the output layer."""
        self.get_output_embeddings().weight = self.get_input_embeddings().weight

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(self.parameters()).device

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, as Transformers' method does."""
        return self.get_submodule(f"{self.spec.base}.{self.spec.embeddings.module}")

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer, as Transformers' method does."""
        return self.get_submodule(self.spec.output.module)


class _Convolution(nn.Module):
    """The weights of a convolution of each channel."""

    def __init__(self, shape: Recurrence) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.channels, 1, shape.conv_kernel))
        self.bias = nn.Parameter(torch.empty(shape.channels)) if shape.has_conv_bias else None


def layer_modules(spec: DecoderSpec, own: LayerSpec) -> nn.Module:
    """Return the modules of one layer, whose numbers are not set."""
    layer = nn.Module()
    made = set[str]()
    biases = own.biases
    for role in own.roles:
        path = own.module(role)
        if path not in made:
            outputs = sum(map(own.out_features, own.part_of(role).sharing(role)))
            kind = Conv1D if own.is_transposed else _Linear
            place(layer, path, kind(own.in_features(role), outputs, bias=role in biases))
            made.add(path)
    for role in own.all_norms if spec.norms.has_weights else ():
        path = own.module(role)
        if path not in made:
            has_bias = spec.norms.has_biases and role in ("input_norm", "mlp_norm")
            place(layer, path, _Norm(own.norm_width(role), has_bias=has_bias))
            made.add(path)
    if isinstance(own.feed_forward, FeedForward) and own.feed_forward.xielu is not None:
        place(layer, own.feed_forward.xielu, _Xielu())
    if own.recurrence is not None:
        _recurrent_numbers(layer, own.recurrence)
    if isinstance(own.attention, LatentAttention):
        place(layer, own.attention.kv_b_proj, Numbers(*own.attention.kv_b_shape, has_bias=False))
    if own.experts is not None:
        _experts(layer, own, own.experts)
    if isinstance(own.attention, Attention) and own.attention.sinks is not None:
        _register(layer, own.attention.sinks, own.attention.num_heads)
    if own.scalar is not None:
        _register(layer, own.scalar, 1)
    return layer


def _experts(layer: nn.Module, own: LayerSpec, experts: Experts) -> None:
    """Add the modules of a mixture of experts."""
    hidden = own.hidden
    count = experts.num_experts
    place(layer, experts.router, Numbers(count, hidden, has_bias="router" in experts.biases))
    if experts.shared_expert_gate is not None:
        place(layer, experts.shared_expert_gate, Numbers(1, hidden, has_bias=False))
    for role in experts.experts:
        for index in range(count):
            module = _Linear(own.in_features(role), own.out_features(role), bias=role in experts.biases)
            place(layer, experts.module(role, index), module)
    if experts.e_score_correction_bias is not None:
        _register(layer, experts.e_score_correction_bias, *(experts.bias_shape or (count,)))
    if experts.router_norm is not None:
        _register(layer, experts.router_norm, hidden)
    if experts.per_expert_scale is not None:
        _register(layer, experts.per_expert_scale, count)


def _register(layer: nn.Module, path: str, *shape: int) -> None:
    """Add a parameter at a path below a module, whose modules are made where there are none."""
    parent, _, leaf = path.rpartition(".")
    if parent not in dict(layer.named_modules()):
        place(layer, parent, nn.Module())
    layer.get_submodule(parent).register_parameter(leaf, nn.Parameter(torch.empty(shape)))


def _recurrent_numbers(layer: nn.Module, shape: Recurrence) -> None:
    """Add the parameters of a recurrence."""
    for name, path in shape.parameters.items():
        parent, _, leaf = path.rpartition(".")
        if name == "conv1d":
            place(layer, path, _Convolution(shape))
        elif name == "norm":
            width = shape.value_width if shape.norms_each else shape.wide
            place(layer, path, _Norm(width, has_bias=False))
        else:
            layer.get_submodule(parent).register_parameter(leaf, nn.Parameter(torch.empty(shape.heads)))


@dataclass(frozen=True, slots=True)
class _Part:
    """What one expert has of a tensor that holds all of them."""

    stack: TensorSlice
    index: int
    role: str
    experts: Experts

    def get_shape(self) -> list[int]:
        whole = torch.empty(self.stack.get_shape()[1:], device="meta")
        return list(part_of(self.experts, whole, self.role).shape)

    def get_dtype(self) -> str:
        return self.stack.get_dtype()

    def __getitem__(self, index: EllipsisType | int) -> torch.Tensor:
        alone = getattr(self.stack, "part", None)
        if alone is not None:  # of a GGUF file, whose tensors of gate and up are dequantized apart
            found: torch.Tensor = alone(self.index, self.role)
            return found
        return part_of(self.experts, self.stack[self.index], self.role)


def by_parameter(spec: DecoderSpec, slices: Mapping[str, TensorSlice]) -> dict[str, TensorSlice]:
    """Return a checkpoint's tensors by the names of a decoder's parameters, those of experts apart."""
    unread = spec.unread
    named = {name: each for stored, each in slices.items() if (name := spec.parameter(stored)) not in unread}
    experts = spec.experts
    if experts is None:
        return named
    return apart(spec, named, lambda stack, index, role: _Part(stack, index, role, experts))


def empty_fused(name: str, config: Any, spec: DecoderSpec, dtype: torch.dtype) -> FusedModules:
    """Return the modules of a model of one of the families on the device "meta".

    Raises:
        ModelLoadError: the configuration describes no model.
    """
    with as_load_errors(f"{name} ({config.model_type}): its configuration describes no model", REMEDY):
        return FusedModules(config, spec, dtype)


def read_fused(
    name: str, config: Any, spec: DecoderSpec, checkpoint: Checkpoint, dtype: torch.dtype
) -> FusedModules | None:
    """Return the modules of a model of one of the families with a checkpoint's weights, on the CPU; None if these are
    not exactly the model's: Transformers then decides what is missing, left over or to be converted.

    dtype: that the weights are brought to.

    Raises:
        ModelLoadError: the weights are damaged.
    """
    if len(checkpoint.slices) < config.num_hidden_layers:  # a wrong number may be any
        return None
    model = empty_fused(name, config, spec, dtype)
    expected = dict(model.named_parameters())
    slices = by_parameter(spec, checkpoint.slices)
    if slices.keys() != expected.keys() or not all(
        each.get_shape() == list(expected[key].shape) and each.get_dtype() in FLOATS for key, each in slices.items()
    ):
        return None
    with as_load_errors(f"the weights of {name} cannot be read", REMEDY):
        for key, tensor in by_parameter(spec, checkpoint.state_dict(dtype)).items():
            path, _, leaf = key.rpartition(".")
            numbers = tensor[...].to(expected[key].dtype)
            setattr(model.get_submodule(path), leaf, nn.Parameter(numbers, requires_grad=False))
    if config.tie_word_embeddings:
        model.tie()
    return model
