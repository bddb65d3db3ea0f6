"""The layers of a head in the target's number format, and what models of heads have in common."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from forerun.config import REFERENCE
from forerun.drafters.models.heads.config import DecoderHead, HeadConfig, StoredHead
from forerun.errors import IncompatibleDrafterError
from forerun.kernels.cpu.library import Library, LinearStruct
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kernels.partition import PathPlan
from forerun.kernels.quantize import QuantizedFormat, QuantizedWeight, quantize_int4, quantize_int8
from forerun.kernels.torch.elementwise import rms_norm
from forerun.models.attention.base import PackedRows, Planner
from forerun.models.base import Exactness, LanguageModel, Rows
from forerun.models.fused.native import NativeDecoder
from forerun.models.linear import Linear, LinearPart, make_linear, make_quantized_linear, place
from forerun.models.model import packed_rows
from forerun.models.rope import pair_halves
from forerun.models.weight_plan import WeightPlan, library_for
from forerun.types import Cache, Pool


@dataclass(frozen=True, slots=True)
class HeadLayers:
    """Makes the layers of a head's tensors.

    Attributes:
        head, device, dtype: its tensors; the target's device and type of weights.
        compute: of everything between the products: float64 for a float64 target, else float32.
        takes: what the linear layers take.
        library: the native one, where the target is computed by it.
        plan: how its weights are kept.
    """

    head: StoredHead[HeadConfig]
    device: torch.device
    dtype: torch.dtype
    compute: torch.dtype
    takes: torch.dtype
    library: Library | None
    plan: WeightPlan

    @classmethod
    def of(cls, head: StoredHead[HeadConfig], target: LanguageModel) -> HeadLayers:
        device = target.device
        dtype = target.dtype
        library = None if target.kernels == REFERENCE else library_for(device, dtype)
        plan = WeightPlan.of_head(dtype, device, library, target.quantize, is_quantized=bool(head.quantized))
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        takes = dtype if library is None and plan.quantize is None else compute
        return cls(head, device, dtype, compute, takes, library, plan)

    def vector(self, name: str) -> Tensor:
        """Return a tensor that is added or multiplied elementwise, in `compute`."""
        return self.head.tensors[name].detach().to(self.device, self.compute)

    def norm(self, name: str) -> Tensor | None:
        """Return the weights of a norm, or None if the head does not have it."""
        name = f"{name}.weight"
        return self.vector(name) if name in self.head.tensors else None

    def linear(self, *names: str, rotated: int = 0, head_dim: int = 0) -> Linear:
        """Return one layer of these matrices and their biases, which all or none of them have; the first `rotated` of
        them have heads of this width to be rotated."""
        tensors = self.head.tensors
        parts = []
        biases = []
        for number, name in enumerate(names):
            order = torch.arange(len(tensors[f"{name}.weight"]))
            order = pair_halves(order, head_dim) if number < rotated else order
            parts.append(self.rows(f"{name}.weight", order))
            biases += [tensors[f"{name}.bias"][order]] if f"{name}.bias" in tensors else []
        return self.product(parts, torch.cat(biases) if biases else None)

    def rows(self, name: str, rows: Tensor | None) -> Tensor | QuantizedWeight:
        """Return these rows of a matrix, in this order; None: all rows."""
        quantized = self.head.quantized.get(name)
        numbers = self.head.tensors[name]
        if rows is None:
            return numbers if quantized is None else quantized
        return numbers[rows.cpu()] if quantized is None else quantized.rows(rows.cpu())

    def output(self, is_of_head: bool, target: LanguageModel, token_ids: Tensor) -> Linear:
        """Return the output layer: the head's, the target's own, or the target's rows of these tokens, quantized if the
        head is."""
        if is_of_head:
            return self.linear("lm_head")
        if self.head.d2t is None and (shared := target.output_layer) is not None:
            return shared
        rows = target.output_rows(token_ids)
        return self.product([rows if self.plan.target_rows is None else quantize_int8(rows, "a head")])

    def multiply(self, linear: Linear, x: Tensor) -> Tensor:
        """Multiply [n, in] -> [n, out] in `compute`, whatever type the layer reads."""
        return linear.forward(x.to(self.takes)).to(self.compute)

    def product(self, parts: Sequence[Tensor | QuantizedWeight], bias: Tensor | None = None) -> Linear:
        """Return one layer whose outputs are those of the parts, [out, in], one after another."""
        bias = None if bias is None else bias.to(self.device, self.takes)
        quantized = [part.to(self.device) for part in parts if isinstance(part, QuantizedWeight)]
        stored = [part.form if isinstance(part, QuantizedWeight) else None for part in parts]
        form, *others = self.plan.forms(stored)
        if [form, *others] == stored:
            return make_quantized_linear(quantized, bias)
        numbers = [part.dequantize(self.compute) if isinstance(part, QuantizedWeight) else part for part in parts]
        joined = torch.cat([part.to(self.device, self.compute) for part in numbers])
        if isinstance(form, QuantizedFormat):
            quantize = quantize_int4 if form.bits == 4 else quantize_int8
            return make_quantized_linear([quantize(joined, "a head")], bias)
        joined = joined.to(self.dtype)
        return make_linear(joined, bias) if self.library is None else NativeLinear(self.library, joined, bias)


@dataclass(frozen=True, slots=True)
class HeadMaker:
    """Makes a decoder's layers of a head's tensors (`Maker`).

    Attributes:
        output: the output layer.
        names: the head's tensors by the decoder's parameters.
    """

    made: HeadLayers
    output: Linear
    names: Mapping[str, str]

    def linear(self, parts: Sequence[LinearPart], bias: Tensor | None = None, *, is_head: bool = False) -> Linear:
        """Make one layer whose outputs are those of the parts, concatenated (`Maker.linear`)."""
        if is_head:
            return self.output
        return self.made.product([self.made.rows(self.names[part.name], part.rows) for part in parts], bias)

    def embedding(self, part: LinearPart) -> Tensor:
        """Return a table of no rows: a head reads those of its target."""
        return torch.empty(0, part.weight.shape[1], dtype=self.made.takes, device=self.made.device)


def head_modules(made: HeadLayers, config: DecoderHead, output: Linear) -> tuple[Any, HeadMaker]:
    """Return the layers of a head as the modules of a decoder (`FusedDecoder`, `NativeDecoder`), whose output layer is
    the given one, and what makes its layers."""
    root = nn.Module()
    names = dict[str, str]()
    spec = config.spec
    read_in = made.takes if made.library is None else made.dtype
    root.spec = spec  # type: ignore[assignment]
    root.config = config.rope_config  # type: ignore[assignment]
    root.dtype = made.takes  # type: ignore[assignment]
    table = torch.empty(config.draft_vocab_size, spec.hidden, device="meta")
    outer = _parameter(root, f"{spec.base}.{spec.embeddings.module}.weight", table)
    place(root, spec.output.module, outer)
    place(root, f"{spec.base}.{spec.layer_list}", nn.ModuleList(nn.Module() for _ in spec.layers))
    for name, tensor in made.head.tensors.items():
        if name.startswith(("layers.", "midlayer.")) or name == "norm.weight":
            ours = f"{spec.base}.{re.sub(r'^midlayer', 'layers.0', name)}"
            names[ours] = name
            kept = spec.dtype_in(ours, read_in) if tensor.dim() > 1 else tensor.dtype
            _parameter(root, ours, tensor.detach().to(made.device, kept))
    return root, HeadMaker(made, output, names)


def _parameter(root: nn.Module, name: str, numbers: Tensor) -> nn.Module:
    """Add a parameter, and the modules down to it where there are none. Return the last one."""
    path, _, leaf = name.rpartition(".")
    try:
        module = root.get_submodule(path)
    except AttributeError:
        place(root, path, module := nn.Module())
        module.register_parameter("bias", None)
    module.register_parameter(leaf, nn.Parameter(numbers, requires_grad=False))
    return module


def fused_states(made: HeadLayers, fuse: Linear, norms: Sequence[Tensor], states: Tensor) -> Tensor:
    """Fuse the target's states, [n, layers, H] in float32 or float64, in PyTorch.

    norms: those of `DecoderHead.state_norms`.
    """
    x = states.flatten(1)
    if norms:
        eps = torch.tensor(made.head.config.rms_norm_eps, dtype=made.compute, device=made.device)  # type: ignore[attr-defined]
        parts = zip(x.chunk(len(norms), 1), norms, strict=True)
        x = torch.cat([rms_norm(part, norm, eps) for part, norm in parts], 1)
    return made.multiply(fuse, x)


def check_sizes(config: HeadConfig, target: LanguageModel, name: str) -> int:
    """Check that a head has the target's sizes, and return the width of the target's states.

    Raises:
        IncompatibleDrafterError: vocabulary or width are not those that the head was made for.
    """
    if config.vocab_size != target.vocab_size:
        raise IncompatibleDrafterError(
            f"{name} is of a target of {config.vocab_size:,} tokens, but {target.name} has "
            f"{target.vocab_size:,}. Take a head that was trained for {target.name}."
        )
    width: int = target.embedding_rows(torch.zeros(1, dtype=torch.int64)).shape[1]
    if config.target_hidden_size != width:
        raise IncompatibleDrafterError(
            f"{name} is of a target whose states have {config.target_hidden_size} numbers, but those of "
            f"{target.name} have {width}. Take a head that was trained for {target.name}."
        )
    return width


class HeadModel(LanguageModel):
    """A head over its target, as a language model whose rows need a state beside the token (`Rows.states`), and what
    its columns are (`Columns`).

    `Forward.logits` are [R, draft_vocab_size], of the tokens that the head can propose: `widened` gives them the
    target's width.

    Attributes:
        target: whose embeddings, and perhaps output layer, it reads.
        token_ids: [draft_vocab_size] the target's tokens that it can propose.
        proposes_all: whether these are all tokens, in order.
        planner: of its layers' attention; makes its caches. None of a head that keeps no keys.

    Args:
        name: for messages and stored costs.

    Raises:
        IncompatibleDrafterError: the target is of another size.
    """

    planner: Planner | None = None

    def __init__(self, head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> None:
        check_sizes(head.config, target, name)
        super().__init__(
            name=name,
            vocab_size=target.vocab_size,
            context_length=target.full_context_length,
            eos_token_ids=target.eos_token_ids,
            dtype=target.dtype,
            device=target.device,
            num_parameters=sum(tensor.numel() for tensor in head.tensors.values()),
            exactness=Exactness(False, "the self-test does not try heads"),
            quantize=target.quantize,
            kernels=target.kernels,
        )
        self.target = target
        tokens = torch.arange(head.config.draft_vocab_size)
        self.token_ids = (tokens if head.d2t is None else tokens + head.d2t).to(target.device)
        self.proposes_all = head.d2t is None
        self._listed: list[int] = [] if self.proposes_all else self.token_ids.tolist()

    @property
    def num_columns(self) -> int:
        """Return how many columns the logits have."""
        return len(self.token_ids)

    def named(self, columns: Tensor) -> Tensor:
        """Return the target's tokens of columns of the logits."""
        return self.token_ids[columns]

    def readable(self, token_ids: list[int]) -> list[int]:
        """Return the tokens: a head reads its target's."""
        return token_ids

    def names(self, columns: list[int]) -> list[int]:
        """Return the target's tokens of columns of the logits, as a list."""
        return columns if self.proposes_all else [self._listed[column] for column in columns]

    @property
    def pool(self) -> Pool | None:
        """Return the pool of the pages of its caches, if it keeps keys."""
        return None if self.planner is None else self.planner.pool

    def new_cache(self) -> Cache:
        """Return an empty cache for one sequence."""
        assert self.planner is not None
        return self.planner.new_cache()

    def fuse(self, hidden_outputs: Tensor) -> Tensor:
        """Fuse the target's states to what the rows read; here the one state as it is.

        Args:
            hidden_outputs: [n, layers, target_hidden_size], of the layers of the configuration.

        Returns:
            [n, S].
        """
        return hidden_outputs[:, 0]

    def widened(self, logits: Tensor) -> Tensor:
        """Widen [R, draft_vocab_size] to [R, vocab_size]: -inf where the head has no row."""
        if self.proposes_all:
            return logits
        wide = torch.full((len(logits), self.vocab_size), -torch.inf, dtype=logits.dtype, device=logits.device)
        return wide.index_copy_(1, self.token_ids, logits)


_Config = TypeVar("_Config", bound=DecoderHead)


class NativeHead(Generic[_Config]):
    """The base of heads that are computed by the native library.

    Attributes:
        planner: of the attention of its layers.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: _Config, output: Linear, library: Library) -> None:
        self._config: _Config = config
        self._library = library
        self._made = made
        modules, maker = head_modules(made, config, output)
        self._decoder = NativeDecoder(modules, library, maker, made.dtype)
        self.planner: Planner = self._decoder.planner
        self._kept: list[Tensor | NativeLinear] = []  # the structures point into their memory
        self._fuse = self._linear("fc")
        norms = [made.vector(f"{name}.weight") for name in config.state_norms]
        self._num_norms = len(norms)
        self._state_norms = torch.cat(norms) if norms else None

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's states, [n, layers, H] in float32."""
        x = states.contiguous()
        out = torch.empty(len(x), self._config.hidden_size)
        self._library.fuse(
            ctypes.byref(self._fuse),
            None if self._state_norms is None else self._state_norms.data_ptr(),
            self._num_norms or 1,
            self._config.rms_norm_eps,
            x.data_ptr(),
            len(x),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def _planned(self, batch: Sequence[Rows]) -> tuple[PathPlan, tuple[Tensor, ...]]:
        """Return what rows write and see, and cosines and sines for them."""
        packed: list[PackedRows] = []
        for rows in batch:
            packed.append(packed_rows(rows, packed[-1].end if packed else 0))
        end = max(rows.cache.length + rows.cache.num_scratch for rows in packed)
        plan = self.planner.plan(packed, 0)
        assert isinstance(plan, PathPlan)
        return plan, self._decoder.cos_sin.reaching(end)

    def _linear(self, name: str) -> LinearStruct:
        return self._struct(self._made.linear(name))

    def _struct(self, linear: Linear) -> LinearStruct:
        assert isinstance(linear, NativeLinear)
        self._kept.append(linear)
        return linear.struct

    def _norm(self, name: str | None) -> int | None:
        """Return the address of a norm's weights; None if the head does not have it."""
        weights = None if name is None else self._made.norm(name)
        if weights is None:
            return None
        self._kept.append(weights := weights.contiguous().clone())
        return weights.data_ptr()
