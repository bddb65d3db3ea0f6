"""Configurations of trained heads, heads as they are stored, and the checks that all kinds share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.kernels.quantize import QuantizedWeight
from forerun.models.loading.configuration import PlainConfig
from forerun.models.spec.attention import HEAD_NORMS, LLAMA_ATTENTION, QKV, Attention, Rope
from forerun.models.spec.decoder import DecoderSpec, Norms, Output
from forerun.models.spec.feed_forward import LLAMA_FEED, FeedForward
from forerun.models.spec.layer import LayerSpec
from forerun.utils.foreign_errors import REMEDY
from forerun.utils.json_file import ErrorType, Fields


class KeyShape(NamedTuple):
    """Keys and values that a head keeps of a row; 0 layers of a head that keeps none."""

    num_layers: int
    num_heads: int
    key_width: int
    value_width: int


class HeadConfig(Protocol):
    """The shape of a head, as a frozen data class.

    Attributes:
        vocab_size: of the target.
        draft_vocab_size: tokens that the head can propose; vocab_size for all of them.
        target_hidden_size: of the target's states and embeddings.
        layers: of the target, whose entering states are read, rising; the number of its layers stands for the state
            after its final norm.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def kind(self) -> str:
        """Return the kind of head, such as "EAGLE-3"."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def draft_vocab_size(self) -> int: ...

    @property
    def target_hidden_size(self) -> int: ...

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def keys(self) -> KeyShape:
        """Return the shape of the keys in its cache."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every trained tensor by name with its shape. `d2t`, which is not trained, is stored beside them where
        the draft vocabulary is smaller than the target's."""

    def extras(self) -> list[str]:
        """Return the features that not every head of its kind has, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderHead:
    """What all heads share that consist of decoder layers.

    Attributes:
        vocab_size: of the target.
        draft_vocab_size: tokens that the head can propose; vocab_size for all of them.
        hidden_size: of the head's layers.
        num_layers: of the head.
        num_heads, num_kv_heads, head_dim: of the attention.
        intermediate_size: of the feed-forward part.
        layers: of the target, whose entering states are fused, rising; the number of the target's layers stands for
            the state after its final norm.
        norm_before_fc: each of the states is RMS-normalised by itself, with weights, before they are fused.
        own_output_rows: lm_head is the head's own; otherwise the target's rows of the draft vocabulary are used.
        sliding_window: positions that a row attends to; None for all.
        rope_theta: base of the rotation of queries and keys.
        rope_scaling: parameters of a rotation that is not plain, as Transformers' `rope_parameters`.
        rms_norm_eps: of all norms.
        max_positions: rows that it was made for.
        biases: matrices, without ".weight", that have a bias.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[int, ...]
    norm_before_fc: bool = False
    own_output_rows: bool = False
    sliding_window: int | None = None
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()

    def check_common(self, **more: int) -> None:
        """Raise ConfigError for a size below 1, or sizes that do not fit each other. more: sizes of its kind alone."""
        check_positive(
            "the head",
            vocab_size=self.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            max_positions=self.max_positions,
            **more,
        )
        check_vocabulary(self.draft_vocab_size, self.vocab_size)
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"the head has {self.num_heads} query heads, {self.num_kv_heads} key heads and a head_dim of "
                f"{self.head_dim}: the first must be a multiple of the second, and head_dim even."
            )
        if not self.layers or any(a >= b for a, b in pairwise(self.layers)):
            raise ConfigError(f"layers of the head are {list(self.layers)}, but must rise, and there must be one.")

    @property
    def spec(self) -> DecoderSpec:
        """Return its layers as those of a decoder."""
        raise NotImplementedError

    @property
    def state_norms(self) -> list[str]:
        """Return the names of the norms of the target's states, without ".weight"; empty if they are read as they
        are."""
        return norms_of_each(self)

    @property
    def rope_config(self) -> PlainConfig:
        """Return the configuration that Transformers computes its rotation of."""
        return PlainConfig(
            rope_parameters=head_rope_parameters(self),
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            max_position_embeddings=self.max_positions,
        )


def norms_of_each(config: DecoderHead) -> list[str]:
    """Return the names of the norms of each of the target's states."""
    return [f"fc_norm.{i}" for i in range(len(config.layers))] if config.norm_before_fc else []


def layers_spec(config: DecoderHead, *, head_norms: bool, norms_first: bool = True, norm: str = "norm") -> DecoderSpec:
    """Return layers like those of Llama, or with `head_norms` of Qwen3.

    Args:
        norms_first: the attention of the first layer reads what "input_layernorm" gives.
        norm: the final one; empty: there is none.
    """
    layer = LayerSpec(
        hidden=config.hidden_size,
        attention=Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            rotated=config.head_dim,
            window=config.sliding_window,
            modules=LLAMA_ATTENTION | (HEAD_NORMS if head_norms else {}),
        ),
        feed_forward=FeedForward(intermediate_size=config.intermediate_size, modules=LLAMA_FEED),
    )
    first = layer if norms_first else without_input_norm(layer)
    return DecoderSpec(
        hidden=config.hidden_size,
        layers=(first, *[layer] * (config.num_layers - 1)),
        ropes=(Rope(head_rope_parameters(config), config.head_dim),),
        norms=Norms(config.rms_norm_eps),
        output=Output(norm),
    )


def without_input_norm(layer: LayerSpec) -> LayerSpec:
    """Return a layer whose attention reads rows as they are."""
    return replace(layer, norms={role: module for role, module in layer.norms.items() if role != "input_norm"})


def head_rope_parameters(config: DecoderHead) -> dict[str, Any]:
    """Return the rotation of queries and keys, as Transformers' configurations have it."""
    return {"rope_type": "default", "rope_theta": config.rope_theta, **config.rope_scaling}


def bias_shapes(config: DecoderHead, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the biases of matrices of these shapes, by name. Raises ConfigError: there is no such matrix."""
    if odd := [name for name in config.biases if len(tensors.get(f"{name}.weight", ())) != 2]:
        raise ConfigError(f"biases of the head has {odd[0][:100]!r}, which is no matrix of such a head.")
    return {f"{name}.bias": tensors[f"{name}.weight"][:1] for name in config.biases}


def layer_shapes(spec: DecoderSpec, prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer by name with their shapes, but for the norm of what its attention reads.

    width: of that. prefix: how the names begin.
    """
    own = without_input_norm(spec.layers[0])
    shapes: dict[str, tuple[int, ...]] = {
        own.module(role): (own.out_features(role), width if role in QKV else own.in_features(role))
        for role in own.roles
    }
    shapes |= {own.module(role): (own.norm_width(role),) for role in own.all_norms}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def check_positive(of: str, **sizes: int) -> None:
    """Raise ConfigError if a size is below 1. of: what has these sizes."""
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} of {of} is {value}, but must be 1 or more.")


def check_vocabulary(draft_vocab_size: int, vocab_size: int, has: str = "the head has", its: str = "its") -> None:
    """Raise ConfigError if there are more output tokens than the target has. has, its: the message's words."""
    if draft_vocab_size > vocab_size:
        raise ConfigError(f"{has} {draft_vocab_size:,} output tokens, but {its} target only {vocab_size:,}.")


Kind = TypeVar("Kind", bound=HeadConfig, covariant=True)
Other = TypeVar("Other", bound=HeadConfig)


@dataclass(frozen=True, slots=True, eq=False)
class StoredHead(Generic[Kind]):
    """A head that was read, every name, shape and number checked.

    Attributes:
        config: its shape.
        tensors: all of `config.tensors()`; quantized ones are dequantized to float32.
        d2t: [draft_vocab_size] int64: the target's id of draft token i is i + d2t[i]. None where they are the same.
        fingerprint: of the target that it was trained for (`target_fingerprint`); empty if unknown.
        record: what was written beside it: how it was trained, as JSON.
        number_format: of the target's weights when it was trained, such as "bfloat16"; empty if unknown.
        quantized: the matrices that are stored at 8 bits, by name.
        form: "forerun", or that of a public head: "EAGLE-1", "EAGLE-3", "speculators" or "Medusa".
    """

    config: Kind
    tensors: Mapping[str, Tensor]
    d2t: Tensor | None = None
    fingerprint: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    number_format: str = ""
    quantized: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    form: str = "forerun"

    @property
    def token_ids(self) -> Tensor:
        """Return [draft_vocab_size] int64, the target's tokens that it can propose."""
        tokens = torch.arange(self.config.draft_vocab_size)
        return tokens if self.d2t is None else tokens + self.d2t

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors as they are stored."""
        kept = [tensor for name, tensor in self.tensors.items() if name not in self.quantized]
        quantized = sum(weight.quantized.nbytes + weight.scale.nbytes for weight in self.quantized.values())
        return quantized + sum(tensor.nbytes for tensor in kept) + (0 if self.d2t is None else self.d2t.nbytes)

    def of(self, kind: type[Other], source: str, drafters: str) -> StoredHead[Other]:
        """Return this head as one of that kind.

        Args:
            source: its folder, for messages.
            drafters: that draft with heads of that kind.

        Raises:
            UnsupportedModelError: it is of another.
        """
        if not isinstance(self.config, kind):
            raise UnsupportedModelError(
                f"{source} holds a head of the kind {self.config.kind}, which is not what {drafters} is for. Give a "
                "head of another kind, or the drafter that this one is for (forerun drafters)."
            )
        return cast("StoredHead[Other]", self)

    def summary(self) -> dict[str, str]:
        """Return a description in a few words per field, for people."""
        config = self.config
        formats = {str(tensor.dtype).removeprefix("torch.") for name, tensor in self.tensors.items()}
        kept = "int8" if self.quantized else "/".join(sorted(formats))
        has = ", ".join(config.extras())
        return {
            "head": f"{config.kind}, form {self.form}, {kept}, {self.nbytes:,} bytes" + (f"; {has}" * bool(has)),
            "reads": f"states of layers {', '.join(map(str, config.layers))}, {config.target_hidden_size:,} wide",
            "proposes": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
            "target": " ".join(each for each in (self.number_format, self.fingerprint) if each) or "not told",
        }


FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Number formats of a head's tensors, and how safetensors files write them."""


class TensorSpec(Protocol):
    """The header of a tensor that is not read yet, as in safetensors."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _LoadedTensor:
    """A tensor in memory in the form of safetensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return FLOATS.get(self._tensor.dtype, str(self._tensor.dtype).removeprefix("torch."))


def check_forms(
    config: HeadConfig, found: Mapping[str, TensorSpec], source: str, error: ErrorType, remedy: str
) -> None:
    """Compare names, shapes and number formats with those of the configuration.

    Raises:
        error: names the first tensor that is missing, too many, or of another shape or number format.
    """
    wanted = config.tensors()
    refuse_others(found, wanted, source, error, remedy)
    for name, shape in wanted.items():
        if name not in found:
            raise error(f"{source}: the tensor {name} {list(shape)} is missing. {remedy}")
        check_shape(name, found[name], shape, source, error, remedy)


def refuse_others(found: Collection[str], wanted: Collection[str], source: str, error: ErrorType, remedy: str) -> None:
    """Refuse tensors that a head has no use for: to leave one out would change what it computes."""
    for name in sorted(set(found) - set(wanted)):
        raise error(f"{source}: the tensor {name[:100]} is none of such a head's. {remedy}")


def check_shape(name: str, found: TensorSpec, shape: Sequence[int], source: str, error: ErrorType, remedy: str) -> None:
    """Compare one tensor's shape, and whether it is of floating point numbers."""
    if list(found.get_shape()) != list(shape):
        raise error(
            f"{source}: the tensor {name} has shape {list(found.get_shape())}, and must have {list(shape)}. {remedy}"
        )
    if found.get_dtype() not in FLOATS.values():
        raise error(
            f"{source}: the tensor {name} is stored as {found.get_dtype()}, but must be one of "
            f"{', '.join(FLOATS.values())}. {remedy}"
        )


def check_loaded(config: HeadConfig, tensors: Mapping[str, Tensor], source: str, error: ErrorType, remedy: str) -> None:
    """Check tensors in memory as `check_forms` and `check_finite` do."""
    check_forms(config, {name: _LoadedTensor(tensor) for name, tensor in tensors.items()}, source, error, remedy)
    check_finite(tensors, source, error, remedy)


def check_finite(tensors: Mapping[str, Tensor], source: str, error: ErrorType, remedy: str) -> None:
    """Refuse NaN, which new weights begin as, and infinity.

    Raises:
        error: names the first tensor that holds any.
    """
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            raise error(
                f"{source}: the tensor {name} holds {count:,} numbers that are NaN or infinite, as weights that were "
                f"never set are. {remedy}"
            )


def checked_d2t(d2t: Tensor | None, config: HeadConfig, source: str, error: ErrorType, remedy: str) -> Tensor | None:
    """Return the offsets as int64; None if the head proposes every token in order.

    Args:
        d2t: [draft_vocab_size] of a whole-number type: the target's id of draft token i is i + d2t[i].

    Raises:
        error: they are missing, of another shape or type, out of the target's vocabulary, or two are of one token.
    """
    size = config.draft_vocab_size
    vocab_size = config.vocab_size
    if d2t is None:
        if size < vocab_size:
            raise error(
                f"{source}: d2t is missing, which says what the {size:,} output tokens of the head are among the "
                f"target's {vocab_size:,}. {remedy}"
            )
        return None
    if list(d2t.shape) != [size] or d2t.dtype not in (torch.int16, torch.int32, torch.int64):
        raise error(
            f"{source}: d2t is {list(d2t.shape)} of {str(d2t.dtype).removeprefix('torch.')}, but must be [{size}] of "
            f"int32 or int64. {remedy}"
        )
    offsets = d2t.to("cpu", torch.int64)
    # compared before they are added: an offset near the end of int64 would wrap
    low = -torch.arange(size)
    if bool(((offsets < low) | (offsets >= low + vocab_size)).any()):
        raise error(f"{source}: d2t leads to tokens outside of the target's {vocab_size:,}. {remedy}")
    if len(set((torch.arange(size) + offsets).tolist())) < size:
        raise error(f"{source}: d2t gives two output tokens of the head the same token of the target. {remedy}")
    return None if size == vocab_size and not bool(offsets.any()) else offsets


# Public formats.
D2T = "d2t"
T2D = "t2d"
OUTPUT = "lm_head.weight"


def proposed_tokens(d2t: Tensor) -> Tensor:
    """Return [draft_vocab_size] int64, the target's tokens that a head with these offsets proposes."""
    return torch.arange(len(d2t)) + d2t.to(torch.int64)


def token_tables(d2t: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """Return the offsets, and [vocab_size] bool of the tokens that they lead to; nothing for heads that propose every
    token."""
    if d2t is None:
        return {}
    mask = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, proposed_tokens(d2t), True)
    return {D2T: d2t.to(torch.int64), T2D: mask}


def as_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as a file can hold them, each in memory of its own."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def speculators_entry(kind: str, *, target: str, architectures: list[str], num_draft_tokens: int) -> dict[str, Any]:
    """Return `speculators_config`, by which programs choose how to draft.

    Args:
        kind: of head, as the form calls it.
        target: name or folder of the target. architectures: of the target, as its config.json says.
        num_draft_tokens: that the form recommends.
    """
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
        "verifier": {"name_or_path": target, "architectures": architectures},
    }


def refuse_unserved(fields: Fields, served: Sequence[tuple[str, Any]], remedy: str) -> None:
    """Raise UnsupportedModelError for a key with another value than the supported one. served: keys and values."""
    for key, value in served:
        if fields.values.get(key) not in (None, value):
            raise UnsupportedModelError(
                f"{fields.place}: {key} is {str(fields.values[key])[:40]}, and only {value} is served. {remedy}"
            )


def fused_layers(settings: Fields, found: list[int], num_layers: int | None, remedy: str) -> tuple[int, ...]:
    """Return the target's layers whose inputs a public head reads, rising.

    Args:
        num_layers: of the target; None if that is not known.

    Raises:
        ModelLoadError: a layer is negative.
        UnsupportedModelError: a layer lies behind the target's last one.
    """
    layers = tuple(sorted(found))
    if layers and layers[0] < 0:
        raise ModelLoadError(f"{settings.place}: the head reads the state of layer {layers[0]}. {REMEDY}")
    if num_layers is not None and layers and layers[-1] >= num_layers:
        raise UnsupportedModelError(
            f"{settings.place}: the head reads the state of layer {layers[-1]}, and the target has {num_layers}. What "
            f"leaves its last layer is available after the final norm only. {remedy}"
        )
    return layers


def refuse_features(features: Mapping[str, bool], problem: str, remedy: str = "") -> None:
    """Raise UnsupportedModelError that names all features that a head has and a public format cannot represent."""
    if found := [name for name, is_there in features.items() if is_there]:
        raise UnsupportedModelError(f"{problem}, which cannot say: {'; '.join(found)}. {remedy}".rstrip())
