"""The native decoder of the families that have a `DecoderSpec`: one kernel call for all layers, with weights of 32, 16,
8 or 4 bits.

States between layers are float32. `models/fused/decoder.py` computes the same in PyTorch. The structures of
csrc/forerun.h are made here of the spec, whose names they have but for _C_NAMES.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from forerun import __version__
from forerun.kernels.cpu.compiler import build_of
from forerun.kernels.cpu.library import (
    HEADER,
    ExpertsStruct,
    LatentStruct,
    LayerStruct,
    Library,
    LinearStruct,
    ModelStruct,
    RecurrenceStruct,
    StateStruct,
    plain_fields,
)
from forerun.kernels.cpu.linear import NativeLinear, expert_memory
from forerun.kernels.cpu.page_layout import CACHE_FORMATS, LANES, PAGE
from forerun.kernels.cpu.prefetching import choose_distances
from forerun.kernels.quantize import quantize_int8
from forerun.kv_cache.recurrent_state import RecordedState, StateMaker
from forerun.models.attention.base import Layout, PackedRows
from forerun.models.attention.native import PathPlanner, rows_struct
from forerun.models.base import HiddenStateOutputs, LayerRangeDecoder, output_order
from forerun.models.draft_session import DraftSession, NativeDraftSession, Pick
from forerun.models.families.table import frequencies, spec_in
from forerun.models.fused.experts import bias_of, router_norm_of, take_apart
from forerun.models.fused.parts import (
    PerLayerInputRows,
    attentions_of,
    numbers_of,
    parts_of,
    state_layout,
    table_and_product,
    weights_by_head,
    xielu_params,
)
from forerun.models.linear import FloatMaker, Linear, LinearPart, Maker, at_path, module_tensors, of_rows
from forerun.models.rope import CosSinTables
from forerun.models.spec.attention import Attention, LatentAttention
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import EXPERT, EXPERT_NORMS, SHARED, AnyFeedForward, Experts, FeedForward
from forerun.models.spec.layer import LayerSpec
from forerun.models.spec.recurrence import RECURRENT_ROLES, Recurrence
from forerun.models.weight_plan import roles_of_products
from forerun.types import Cache
from forerun.utils import machine
from forerun.utils.files import digest

_ENUMS = HEADER.enums
_C_NAMES = {"kv_a_proj": "key", "A_log": "A", **{role: role.removeprefix("shared_") for role in SHARED}}
"""Roles and parameters of a spec by other names in the structures. The layer's own feed-forward layer is the shared
expert."""
_NO_ATTENTION = Attention(num_heads=1, num_kv_heads=1, head_dim=2, rotated=2, scale=2**-0.5)
"""The sizes that a decoder without attention is given."""
_OF_EXPERTS = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group", "scores_of_group"),
    *("norm_topk_prob", "least_sum", "routed_scaling_factor", "distance"),
)
_OF_RECURRENCE = (
    *("conv_kernel", "channels", "heads", "key_heads", "key_width", "value_width", "normed_width", "gates_first"),
    *("heads_are_tiled", "norm_eps", "beta_scale"),
)
"""Fields that a spec has by the same name."""
_ROTATED = 2048
"""Positions whose rotations tell one rotation from another."""
_Norms = dict[str, tuple[int | None, int | None]]  # by role, the addresses of weight and bias


class NativeDecoder(LayerRangeDecoder):
    """The decoder of a Transformers model of one of the families, computed by the native library.

    Args:
        model: the loaded causal language model, on the CPU. Its layers are emptied one by one as their weights are
            packed; the model is of no use afterwards.
        maker: of linear layers that are `NativeLinear`.
        cache_dtype: of keys and values, one of `page_layout.CACHE_FORMATS`.
        output_tokens: int64, those whose logits are computed, in this order; None for all. `of_outputs` computes
            others too, in the order of `output_order`.
        spec: of the model; None: that of its modules or its configuration.

    Attributes:
        library: whose kernels compute it.
        struct: the model in the library's form. cos_sin: the tables of its rotations.
    """

    def __init__(
        self,
        model: Any,
        library: Library,
        maker: Maker,
        cache_dtype: torch.dtype = torch.bfloat16,
        output_tokens: Tensor | None = None,
        spec: DecoderSpec | None = None,
    ) -> None:
        self.spec = spec = spec or spec_in(model)
        base = model.get_submodule(spec.base)
        self.hidden = spec.hidden
        self.library = library
        self._session: NativeDecoderSession | None = None  # the last
        self._blocks: NDArray[np.int32] | None = None  # of outputs, if not of all: `struct` points to them
        self._kept: dict[str, Tensor | NativeLinear] = {}  # by parameter: the structs below point into their memory
        self.embedding_scale = spec.embeddings.scale_in(model.dtype)
        self._positions: Tensor | None = None
        if (positions := spec.embeddings.positions) is not None:
            table = base.get_submodule(positions).weight.detach().float()[spec.embeddings.first_position :]
            self._positions = self._kept[f"{spec.base}.{positions}.weight"] = table.clone()
        self._places: Tensor | None = None  # by token, its row of the output layer, if it is another
        self.lm_head, self.embedding = self._outer_layers(model, base, maker, output_tokens)
        self.per_layer_inputs = self._per_layer_input_rows(base, maker, model.dtype)
        self.cos_sin = CosSinTables(*frequencies(model.config, spec))
        self.num_layers = len(spec.layers)
        self._cache_dtype = cache_dtype
        self._layers = (LayerStruct * self.num_layers)()
        self._recurrences: list[RecurrenceStruct] = []
        self._experts: list[ExpertsStruct] = []
        self._latents: list[LatentStruct] = []
        self._arrays: list[ctypes.Array[LinearStruct]] = []
        self._experts_read = ctypes.c_int64()
        self._expert_bytes = 0.0
        self._given: list[NDArray[np.int64]] = []  # by layer, the rows that each expert was given
        self.planner = self._planner(self.num_layers)
        starts = self.planner.layout.layer_starts
        for index, (layer, own) in enumerate(zip(base.get_submodule(spec.layer_list), spec.layers, strict=True)):
            self._layers[index] = self._packed(layer, spec.layer_path(index), own, maker)
            if own.attention is not None:
                self._layers[index].kv_offset = starts[spec.cached(index)] * cache_dtype.itemsize
            layer.to_empty(device="meta")
        self.struct = self._model_struct(*self._norm(base, spec.base, spec.output.norm, spec.hidden))
        if output_tokens is not None:
            self.struct.head = self.lm_head.outputs(0, len(output_tokens))
        choose_distances(library, self.linear_layers())

    def first_part(self, num_outputs: int) -> NativeDecoder:
        """Return a decoder of the first layers, as many as hold every kind of layer that there is (by windows,
        rotations and formats) and two at least, and of about the last `num_outputs` outputs. It has the same weights,
        and pages of its own."""
        linear = [field[0] for field in LayerStruct._fields_ if field[1] is LinearStruct]
        kinds = []
        for layer in self._layers:
            each = (getattr(layer, name) for name in linear)
            forms = ((struct.kind, struct.activation_bits, struct.out_features > 0) for struct in each)
            kinds.append((layer.window, layer.rope, bool(layer.recurrence), bool(layer.experts), *forms))
        part = copy(self)
        part.num_layers = min(self.num_layers, max(2, 1 + max(map(kinds.index, kinds))))
        part.planner = part._planner(part.num_layers)
        part.struct = ModelStruct.from_buffer_copy(self.struct)
        part.struct.head = self.lm_head.last_outputs(num_outputs)
        return part

    def of_outputs(self, blocks: NDArray[np.int32]) -> NativeDecoder:
        """Return a decoder of the same layers and pages, and of these blocks of 16 outputs
        (`LanguageModel.of_outputs`)."""
        part = copy(self)
        part._blocks = blocks
        part._session = None
        part.struct = ModelStruct.from_buffer_copy(self.struct)
        part.struct.head = self.lm_head.of_blocks(blocks)
        return part

    def with_layers(self, modules: Mapping[int, Any], norm: Any) -> NativeDecoder:
        """Return a decoder with other weights in some layers and in the final norm, and for all else of the same
        weights and pages.

        Args:
            modules: Transformers' modules by the layer's index. They have attention with keys of their own, and no
                experts.
            norm: the module that holds the final norm, as the decoder's base does.
        """
        part = copy(self)
        part._session = None
        part._layers = (LayerStruct * len(self._layers)).from_buffer_copy(self._layers)
        paths = {index: self.spec.layer_path(index) for index in modules}
        replaced = (*(f"{path}." for path in paths.values()), f"{self.spec.base}.{self.spec.output.norm}.")
        part._kept = {name: kept for name, kept in self._kept.items() if not name.startswith(replaced)}
        for index, module in modules.items():
            former = [each for name, each in self._kept.items() if name.startswith(f"{paths[index]}.")]
            made = part._packed(module, paths[index], self.spec.layers[index], _Remaker(self.library, former))
            made.kv_offset = self._layers[index].kv_offset
            part._layers[index] = made
        part.struct = ModelStruct.from_buffer_copy(self.struct)
        part.struct.layers = ctypes.addressof(part._layers)
        if self.spec.output.norm:
            address = part._norm(norm, self.spec.base, self.spec.output.norm, self.spec.hidden)
            part.struct.norm, part.struct.norm_bias = address
        return part

    def _planner(self, num_layers: int) -> PathPlanner:
        """Return the planner of the first layers. States are those of all layers, of which the first are the first."""
        first = replace(self.spec, layers=self.spec.layers[:num_layers])
        planner = PathPlanner(attentions_of(first), self._cache_dtype)
        if (layout := state_layout(self.spec)) is not None:
            planner.new_state = StateMaker(layout, num_layers, is_native=True)
        return planner

    def linear_layers(self) -> list[NativeLinear]:
        """Return all layers of products that it has, experts' included; of an embedding the output layer alone."""
        found = [kept for kept in self._kept.values() if isinstance(kept, NativeLinear)]
        return [each for each in found if each is not self.embedding or each is self.lm_head]

    @property
    def num_outputs(self) -> int:
        """Return the number of logits of a row."""
        return int(self.struct.head.out_features)

    @property
    def shapes(self) -> tuple[object, ...]:
        """Return all that the kernels are given besides addresses: shapes, formats, windows and constants."""
        layers = self._layers[: self.num_layers]
        inner = (*self._recurrences, *self._experts, *self._latents, *(array[0] for array in self._arrays))
        return plain_fields(self.struct), *map(plain_fields, layers), *map(plain_fields, inner)

    def fingerprint(self) -> str:
        """Return a hash of all that decides the bits of keys, values and states (`LanguageModel.fingerprint`)."""
        kept = [table[:_ROTATED] for table in self.cos_sin.reaching(_ROTATED)]
        for each in self._kept.values():
            kept += [each] if isinstance(each, Tensor) else [tensor for _, tensor in module_tensors(each)]
        numbers = [each.view(torch.uint8).numpy() for each in kept]
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            weights = list(threads.map(digest, numbers))
        build = build_of(self.library.path)
        versions = (__version__, torch.__version__, build, self.library.instructions)
        facts = (
            *versions,
            machine.model(),
            *machine.features(),
            self.embedding_scale,
            self.spec.embeddings,
            self.shapes,
        )
        return digest("\n".join([*weights, *map(str, facts)]).encode())

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights that a forward of one row reads: all but the experts of other rows, an embedding
        that is not the output layer too, and outputs that are not computed."""
        unread = 0 if self.embedding is self.lm_head else self.embedding.nbytes
        unread += self.lm_head.nbytes * (self.lm_head.out_features - self.num_outputs) // self.lm_head.out_features
        unread += self._kept[self.spec.per_layer_table].nbytes if self.spec.per_layer_table else 0
        left = sum(experts.num_experts - experts.num_experts_per_tok for experts in self._experts)
        return sum(kept.nbytes for kept in self._kept.values()) - unread - int(left * self.expert_nbytes)

    @property
    def num_experts_read(self) -> int:
        """Return the experts of all layers that rows of a forward were given to, each once a forward, of all
        forwards."""
        return int(self._experts_read.value)

    def experts_given(self) -> NDArray[np.int64] | None:
        """Return the rows that each expert was given so far (`LanguageModel.experts_given`)."""
        return np.concatenate(self._given) if self._given else None

    @property
    def expert_nbytes(self) -> float:
        """Return the bytes of the weights of an expert, on average."""
        count: int = sum(experts.num_experts for experts in self._experts)
        return self._expert_bytes / max(1, count)

    def embed(self, layout: Layout) -> Tensor:
        """Return what enters the first layer, [T, hidden] (`LayerRangeDecoder.embed`)."""
        return self.placed(self.embedding.rows(self.places(layout.token_ids, self.embedding)), layout.positions)

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return rows of the embedding, [T, hidden], which may change, as they enter the first layer at positions
        [T]."""
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        if self.spec.embeddings.is_normed:
            self._normed(self.struct, x)
        return x if self._positions is None else x.add_(self._positions[positions])

    def forward_layers(
        self, x: Tensor, layout: Layout, first: int, last: int, hidden_outputs: HiddenStateOutputs
    ) -> Tensor:
        """Compute layers `first` to `last` - 1: [T, hidden] -> [T, hidden] (`LayerRangeDecoder.forward_layers`)."""
        x = x.to(torch.float32, copy=True).contiguous()
        cos_sin = self.cos_sin.reaching(layout.num_positions)  # held: `rows` has their addresses
        rows = rows_struct(layout.plan, *cos_sin)
        if self.per_layer_inputs is not None:
            given = self.per_layer_inputs.of(layout.token_ids, self.embed(layout) if first else x)
            rows.per_layer_inputs = given.data_ptr()
        if self.planner.new_state is not None:
            states = _states_array(layout.packed)
            rows.states = ctypes.addressof(states)
        output_layers = [
            layer for layer in hidden_outputs.layers if first <= layer and (layer < last or last == self.num_layers)
        ]
        hidden_states = torch.empty(len(x), len(output_layers), self.hidden)
        self.library.forward_layers(
            ctypes.byref(self.struct),
            ctypes.byref(rows),
            first,
            last,
            x.data_ptr(),
            (ctypes.c_int32 * len(output_layers))(*output_layers),
            len(output_layers),
            hidden_states.data_ptr(),
            torch.get_num_threads(),
        )
        hidden_outputs.add(hidden_states)
        return x

    def head(self, x: Tensor, layout: Layout, hidden_outputs: HiddenStateOutputs) -> Tensor:
        """Return the logits of the requested rows, [R, V], from the output of the last layer or, to exit early, any
        other (`LayerRangeDecoder.head`)."""
        x = layout.select_logit_rows(x).to(torch.float32, copy=True).contiguous()
        logits = torch.empty(len(x), self.struct.head.out_features)
        self.library.head(ctypes.byref(self.struct), len(x), x.data_ptr(), logits.data_ptr(), torch.get_num_threads())
        return logits

    def draft_session(self, caches: Sequence[Cache], pick: Pick) -> DraftSession | None:
        """Return a session that computes chains row by row, with less preparation for each row than `forward`
        (`LanguageModel.draft_session`)."""
        if self.planner.new_state is not None:
            return None
        if self._session is None or not self._session.resumes(caches, pick):
            self._session = NativeDecoderSession(self, caches, pick)
        return self._session

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, [n, hidden] float32 (`Decoder.embedding_rows`)."""
        return self.embedding.rows(self.places(token_ids, self.embedding))

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer's weight, [n, hidden] float32 (`Decoder.output_rows`)."""
        return self.lm_head.rows(self.places(token_ids, self.lm_head))

    def places(self, token_ids: Tensor, layer: NativeLinear) -> Tensor:
        """Return the rows of tokens, [n] int64, in the output layer or the embedding."""
        if self._places is None or layer is not self.lm_head:
            return token_ids
        return self._places.index_select(0, token_ids)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the packed float weights with the names of Transformers' parameters. Quantized values are finite and
        left out."""
        for name, kept in self._kept.items():
            numbers, bias = (kept, None) if isinstance(kept, Tensor) else (kept.float_numbers(), kept.bias)
            if numbers is not None:
                yield name, numbers
            if bias is not None:
                yield f"{name.removesuffix('weight')}bias", bias

    def _outer_layers(
        self, model: Any, base: Any, maker: Maker, output_tokens: Tensor | None
    ) -> tuple[NativeLinear, NativeLinear]:
        """Return output layer and embedding, which are the same object if they share their rows."""
        table = base.get_submodule(self.spec.embeddings.module)
        head_module = getattr(model, self.spec.output.module)
        embedding = LinearPart(self.spec.embedding_weight, table.weight)
        is_tied = head_module.weight is table.weight
        part = embedding if is_tied else LinearPart(self.spec.head_weight, head_module.weight)
        order = None
        if output_tokens is not None:  # so that blocks of outputs hold few others
            order = output_order(output_tokens, len(part.weight))
            self._places = order.argsort()
        bias = of_rows(head_module.bias, order)
        head = self._native(maker, [part._replace(rows=order)], bias, is_head=True)
        is_shared = is_tied and bias is None
        if is_tied and order is None and not is_shared:  # the embedding beside it has the same parameter
            self._kept[self.spec.head_weight] = head
        rows = head if is_shared else self._native(maker, [embedding], is_head=True)
        if not is_tied:
            head_module.to_empty(device="meta")
        table.to_empty(device="meta")
        return head, rows

    def _per_layer_input_rows(self, base: Any, maker: Maker, dtype: torch.dtype) -> PerLayerInputRows | None:
        """Return what makes the inputs that tokens give layers."""
        spec = self.spec
        shape = self.spec.embeddings.per_layer
        if shape is None:
            return None
        table, product = table_and_product(spec, shape, base)
        rows = self._native(maker, [table], is_head=True)
        linear = self._native(maker, [product])
        address, _ = self._norm(base, spec.base, shape.norm, shape.width)
        norm = ModelStruct(hidden=shape.width, eps=spec.norms.eps, norm=address)
        base.get_submodule(shape.table).to_empty(device="meta")
        return PerLayerInputRows(shape, rows.rows, linear, partial(self._normed, norm), dtype)

    def _normed(self, model: ModelStruct, x: Tensor) -> Tensor:
        """Return x, whose rows the final norm of a model has normed in place."""
        self.library.head(ctypes.byref(model), len(x), x.data_ptr(), None, torch.get_num_threads())
        return x

    def _model_struct(self, norm: int | None, norm_bias: int | None) -> ModelStruct:
        """Return the structure of the model. norm, norm_bias: addresses."""
        return ModelStruct(
            layers=ctypes.addressof(self._layers),
            norm=norm,
            norm_bias=norm_bias,
            head=self.lm_head.struct,
            num_layers=self.num_layers,
            page=PAGE,
            cache_format=CACHE_FORMATS[self._cache_dtype],
            **_model_fields(self.spec),
        )

    def _packed(self, layer: Any, path: str, own: LayerSpec, maker: Maker) -> LayerStruct:
        norms = _Norms()

        def linear(together: list[str]) -> LinearStruct:
            return self._native(maker, *parts_of(own, layer, path, together, in_pairs=False), role=together[0]).struct

        for role in own.all_norms:
            order = own.norm_order(role, in_pairs=False)
            norms[role] = self._norm(layer, path, own.module(role), own.norm_width(role), order)
        made = {each[0]: linear(each) for each in roles_of_products(own.roles, is_native=True)}
        recurrence = experts = latent = xielu = ones = sinks = None
        if own.recurrence is not None:
            recurrence = self._recurrence(layer, path, own.recurrence, made)
        if isinstance(own.attention, LatentAttention):
            latent = self._latent(layer, path, own.attention, made, norms)
        if own.experts is not None:
            experts = self._experts_struct(layer, path, own, own.experts, maker, norms)
        if isinstance(own.attention, Attention):
            sinks = self._at(layer, path, own.attention.sinks)
            ones = torch.ones(own.attention.head_dim) if own.attention.norms_values else None
        if isinstance(own.feed_forward, FeedForward) and (name := own.feed_forward.xielu) is not None:
            xielu = self._pointer(f"{path}.{name}", xielu_params(layer.get_submodule(name)))
        biases = {"input_norm": "input_bias", "mlp_norm": "mlp_bias"}
        return LayerStruct(
            experts=experts,
            latent=latent,
            value_norm=None if ones is None else self._pointer(f"{path}.ones", ones),
            layer_scalar=self._at(layer, path, own.scalar),
            **_layer_fields(own, self.spec),
            sinks=sinks,
            activation_params=xielu,
            recurrence=recurrence,
            **{_C_NAMES.get(role, role): address for role, (address, _) in norms.items()},
            **{biases[role]: bias for role, (_, bias) in norms.items() if role in biases},
            **{_C_NAMES.get(role, role): each for role, each in made.items() if role not in RECURRENT_ROLES},
        )

    def _experts_struct(
        self, layer: Any, path: str, own: LayerSpec, shape: Experts, maker: Maker, norms: _Norms
    ) -> int:
        """Keep the structure of a layer's experts, with what `norms` has for it, and return its address. The router's
        weights stay numbers."""
        take_apart(shape, layer, path)
        count = shape.num_experts
        bias = bias_of(shape, layer)
        shared_gate = shape.shared_expert_gate

        def numbers(name: str) -> LinearStruct:
            module = layer.get_submodule(name)
            weight = _served_numbers(module.weight.detach())
            self._kept[f"{path}.{name}.weight"] = made = NativeLinear(
                self.library, weight, getattr(module, "bias", None)
            )
            return made.struct

        def linears(role: str) -> ctypes.Array[LinearStruct]:
            each = (parts_of(own, layer, path, [role], in_pairs=False, expert=index) for index in range(count))
            made = [self._native(maker, *parts, role=role) for parts in each]
            found = (LinearStruct * count)(*(linear.struct for linear in made))
            self._expert_bytes += sum(linear.nbytes for linear in made)
            if len({(struct.kind, struct.activation_bits) for struct in found}) > 1:
                raise ValueError(f"the experts of {path} have weights of several forms")
            return found

        with expert_memory():
            arrays = [linears(role) for role in EXPERT]
        swiglu = None if shape.swiglu is None else torch.tensor(shape.swiglu)
        scored = router_norm_of(shape, own.hidden, layer)
        correction = f"{path}.{shape.e_score_correction_bias}"
        own_norms = {role: norms.pop(role)[0] for role in EXPERT_NORMS if role in norms}
        self._arrays += arrays
        self._given.append(np.zeros(count, np.int64))
        self._experts.append(
            ExpertsStruct(
                numbers(shape.router),
                LinearStruct() if shared_gate is None else numbers(shared_gate),
                *map(ctypes.addressof, arrays),
                e_score_correction_bias=None if bias is None else self._pointer(correction, bias),
                activation_params=None if swiglu is None else self._pointer(f"{path}.swiglu", swiglu),
                num_read=ctypes.addressof(self._experts_read),
                num_given=self._given[-1].ctypes.data,
                router_norm=None if scored is None else self._pointer(f"{path}.{shape.router_norm}", scored),
                per_expert_scale=self._at(layer, path, shape.per_expert_scale),
                **own_norms,
                **{name: getattr(shape, name) for name in _OF_EXPERTS},
                scoring=_ENUMS["ForerunScoring"][shape.scoring.upper()],
            )
        )
        return ctypes.addressof(self._experts[-1])

    def _latent(self, layer: Any, path: str, own: LatentAttention, made: dict[str, LinearStruct], norms: _Norms) -> int:
        """Keep the structure of a layer's latents, with what `made` and `norms` have for it, and return its address."""
        name = f"{path}.{own.kv_b_proj}.weight"
        arrays = []
        for what, weight in zip((f"{name} of keys", name), weights_by_head(own, layer), strict=True):
            width = -(-weight.shape[1] // LANES) * LANES  # all heads in one, each in whole blocks
            together = F.pad(weight, (0, 0, 0, width - weight.shape[1])).reshape(-1, weight.shape[2])
            self._kept[what] = linear = NativeLinear(self.library, _served_numbers(together))
            each = (linear.outputs(first, weight.shape[1]) for first in range(0, len(together), width))
            arrays.append((LinearStruct * len(weight))(*each))
        self._arrays += arrays
        self._latents.append(
            LatentStruct(
                q_a_proj=made.pop("q_a_proj", LinearStruct()),
                **{role: norms.pop(role)[0] for role in LatentAttention.NORMS if role in norms},
                k_b_proj=ctypes.addressof(arrays[0]),
                v_b_proj=ctypes.addressof(arrays[1]),
                eps=own.eps,
            )
        )
        return ctypes.addressof(self._latents[-1])

    def _recurrence(self, layer: Any, path: str, shape: Recurrence, linears: Mapping[str, LinearStruct]) -> int:
        """Keep the structure of a layer's recurrence, and return its address. linears: by role."""
        numbers = numbers_of(shape, layer)
        self._recurrences.append(
            RecurrenceStruct(
                **{role: linears[role] for role in RECURRENT_ROLES if role in linears},
                **{_C_NAMES.get(name, name): self._pointer(f"{path}.{name}", each) for name, each in numbers.items()},
                **_recurrence_fields(shape, len(self._recurrences)),
            )
        )
        return ctypes.addressof(self._recurrences[-1])

    def _norm(
        self, parent: Any, path: str, name: str, width: int, order: Tensor | None = None
    ) -> tuple[int | None, int | None]:
        """Keep the numbers of a norm, and return the addresses of weight and bias; of no norm, none."""
        if not name:
            return None, None
        if not self.spec.norms.has_weights:
            return self._pointer(f"{path}.{name}.ones", torch.ones(width)), None
        module = parent.get_submodule(name)
        name = f"{path}.{name}"
        weight = module.weight.detach().float() + self.spec.norms.offset
        bias = getattr(module, "bias", None)
        address = None if bias is None else self._pointer(f"{name}.bias", bias)
        return self._pointer(f"{name}.weight", weight if order is None else weight[order]), address

    def _native(
        self,
        maker: Maker,
        parts: Sequence[LinearPart],
        bias: Tensor | None = None,
        *,
        is_head: bool = False,
        role: str = "output tokens",
    ) -> NativeLinear:
        linear = maker.linear(parts, bias, is_head=is_head)
        assert isinstance(linear, NativeLinear)
        counts = [len(part.weight if part.rows is None else part.rows) for part in parts]
        shape = (linear.out_features, linear.in_features)
        expected = (sum(counts), parts[0].weight.shape[1])
        names = name = ", ".join(part.name for part in parts)
        if parts[0].rows is not None:  # of a module with several roles, or of an output layer that may be the embedding
            name = f"{names} of {role}"
        if shape != expected:  # the library writes as many outputs as a layer has
            raise ValueError(f"{names} has the quantized shape {shape}, but must have {expected}")
        self._kept[name] = linear
        return linear

    def _at(self, layer: Any, path: str, name: str | None) -> int | None:
        """Keep a parameter of a layer in float32, and return its address; None if there is none."""
        return None if name is None else self._pointer(f"{path}.{name}", at_path(layer, name))

    def _pointer(self, name: str, weight: Tensor) -> int:
        """Keep the numbers in float32, and return their address."""
        if name not in self._kept:  # two roles may share a norm
            self._kept[name] = weight.detach().float().contiguous().clone()
        numbers = self._kept[name]
        assert isinstance(numbers, Tensor)
        return numbers.data_ptr()


class _Remaker(FloatMaker):
    """Makes layers of numbers for a decoder that has others in their place: in 8 bits where these are quantized.

    former: what it keeps of the layer.
    """

    def __init__(self, library: Library, former: Sequence[Tensor | NativeLinear]) -> None:
        numbers = [each.float_numbers() for each in former if isinstance(each, NativeLinear)]
        dtype = next((each.dtype for each in numbers if each is not None), None)

        def make(weight: Tensor, bias: Tensor | None) -> Linear:
            made = quantize_int8(weight, "a draft model") if dtype is None else weight.to(dtype)
            return NativeLinear(library, made, bias)

        super().__init__(make)


class NativeDecoderSession(NativeDraftSession):
    """The draft session of a model that `NativeDecoder` computes.

    Args:
        caches, pick: as of `LanguageModel.draft_session`.
    """

    def __init__(self, decoder: NativeDecoder, caches: Sequence[Cache], pick: Pick) -> None:
        super().__init__(decoder.library, caches, decoder.cos_sin, decoder.num_outputs, pick)
        self._decoder = decoder
        self._x = torch.empty(len(caches), decoder.hidden)

    def _compute(self, num_rows: int, num_chains: int, last_rows: Tensor | None, states: Tensor | None) -> None:
        decoder = self._decoder
        library = self._decoder.library
        if num_rows > len(self._x):
            self._x = torch.empty(num_rows, decoder.hidden)
        token_ids = torch.from_numpy(self._token_ids[:num_rows])
        decoder.embedding.read_rows(decoder.places(token_ids, decoder.embedding).numpy(), self._x)
        decoder.placed(self._x[:num_rows], torch.from_numpy(self._position[:num_rows]))
        if decoder.per_layer_inputs is not None:
            given = decoder.per_layer_inputs.of(token_ids, self._x[:num_rows])
            self._rows.per_layer_inputs = given.data_ptr()
        model = ctypes.byref(decoder.struct)
        x = self._x
        library.forward_layers(
            model, ctypes.byref(self._rows), 0, decoder.num_layers, x.data_ptr(), None, 0, None, self._threads
        )
        if last_rows is not None:
            x = x[last_rows]
        library.head(model, num_chains, x.data_ptr(), self._logits.data_ptr(), self._threads)


def _model_fields(spec: DecoderSpec) -> dict[str, Any]:
    """Return fields of `ForerunModel`. What attention and feed-forward layers have in all layers is the model's."""
    states = state_layout(spec)
    attention = spec.attention or _NO_ATTENTION
    plain = attention if isinstance(attention, Attention) else _NO_ATTENTION
    feed = next((each.feed_forward for each in spec.layers if each.feed_forward is not None), AnyFeedForward())
    return {
        "hidden": spec.hidden,
        "num_heads": attention.num_heads,
        "scale": attention.scale,
        "softcap": plain.softcap or 0.0,
        "has_wide_norms": plain.has_wide_norms,
        "norms_rotated": plain.norms_rotated,
        "query_growth": plain.query_growth,
        "query_period": plain.query_period,
        "attention_scale": plain.out_scale,
        "activation": _ENUMS["ForerunActivation"][feed.activation.upper()],
        "activation_scale": feed.activation_scale,
        "is_parallel": any(layer.is_parallel for layer in spec.layers),
        "residual_scale": spec.residual_scale,
        "eps": spec.norms.eps,
        "has_layer_norms": spec.norms.kind == "layer",
        "logit_scale": 0.0 if spec.output.scale == 1.0 else spec.output.scale,
        "logit_softcap": spec.output.softcap or 0.0,
        "record_size": 0 if states is None else states.record_size,
    }


def _layer_fields(own: LayerSpec, spec: DecoderSpec) -> dict[str, Any]:
    """Return fields of `ForerunLayer`, of a layer without attention with the sizes of one that has it."""
    attention = own.attention or spec.attention or _NO_ATTENTION
    keys, values = attention.cached_widths
    return {
        "window": attention.window or 0 if own.attention is not None else 0,
        "rope": -1 if attention.rope is None else attention.rope,
        "feed_scale": 1.0 if own.feed_forward is None else own.feed_forward.out_scale,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rotated": attention.rotated,
        "key_width": keys,
        "value_width": values,
    }


def _recurrence_fields(shape: Recurrence, place: int) -> dict[str, Any]:
    """Return fields of `ForerunRecurrence`. place: of the layer among those that are recurrent."""
    return {name: getattr(shape, name) for name in _OF_RECURRENCE} | {
        "state_offset": place * shape.state_size,
        "record_offset": place * shape.record_size,
        "kind": _ENUMS["ForerunRecurrenceKind"][shape.kind.upper()],
        **{f"{name}_start": start for name, start in shape.starts.items()},
        **{f"{name}_scale": shape.scale(name) for name in ("gate", "step", "out")},
        "time_step_min": shape.time_step_limit[0],
        "time_step_max": shape.time_step_limit[1],
    }


def _served_numbers(numbers: Tensor) -> Tensor:
    """Return numbers in a type that the kernels multiply."""
    return numbers if numbers.dtype in (torch.float32, torch.bfloat16) else numbers.float()


def _states_array(packed: Sequence[PackedRows]) -> ctypes.Array[StateStruct]:
    """Return what the sequences of a forward have kept in recurrent layers."""
    found = (StateStruct * len(packed))()
    for place, rows in enumerate(packed):
        assert isinstance(rows.cache.state, RecordedState)
        found[place] = StateStruct(*rows.cache.state.fields(rows.first))
    return found
