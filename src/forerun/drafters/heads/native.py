"""What the heads that the native kernels compute have in common: structures of their tensors, and the fused states."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from forerun.drafters.block.config import BlockConfig
from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.heads.layers import HeadLayers, state_norms
from forerun.kernels.cpu.library import LayerStruct, Library, LinearStruct, ModelStruct
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kernels.partition import PathPlan
from forerun.models.attention.base import PackedRows
from forerun.models.attention.path_planner import PathPlanner
from forerun.models.base import Rows
from forerun.models.linear import Linear
from forerun.models.rotation import HalfRotation, inverse_frequencies
from forerun.models.runner import packed_rows

_Config = TypeVar("_Config", EagleConfig, BlockConfig)


class NativeHead(Generic[_Config]):
    """The base of heads that are computed by the native library, which set the planner of their attention.

    Args:
        made: makes the layers of the head's tensors.
    """

    _path_planner: PathPlanner

    def __init__(self, made: HeadLayers, config: _Config, library: Library) -> None:
        self._config: _Config = config
        self._library, self._made = library, made
        self._kept: list[Tensor | NativeLinear] = []  # the structures point into their memory
        self._fuse = self._linear("fc")
        norms = [made.vector(f"{name}.weight") for name in state_norms(config)]
        self._state_norms = torch.cat(norms) if norms else None
        self._rotation = HalfRotation(inverse_frequencies(config.rope_theta, config.head_dim), 1.0)

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's states, [n, layers, H] in float32."""
        x = states.contiguous()
        out = torch.empty(len(x), self._config.hidden_size)
        self._library.fuse(
            ctypes.byref(self._fuse),
            None if self._state_norms is None else self._state_norms.data_ptr(),
            x.shape[1],
            self._config.rms_norm_eps,
            x.data_ptr(),
            len(x),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def _planned(self, batch: Sequence[Rows]) -> tuple[PathPlan, tuple[Tensor, Tensor]]:
        """Return what rows write and see, and cosines and sines for them."""
        packed: list[PackedRows] = []
        for rows in batch:
            packed.append(packed_rows(rows, packed[-1].end if packed else 0))
        end = max(rows.cache.length + rows.cache.num_scratch for rows in packed)
        return self._path_planner.plan(packed, 0), self._rotation.reaching(end)

    def _model_struct(self, layers: Any, num_layers: int, output: Linear, scale: float) -> ModelStruct:
        """Fill the model's structure. layers: a pointer to, or an array of, `num_layers` structures, which must be kept
        alive; scale: of the attention."""
        config = self._config
        return ModelStruct(
            layers=layers,
            norm=self._norm("norm"),
            head=self._struct(output),
            num_layers=num_layers,
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            page=PAGE,
            cache_float32=self._made.dtype == torch.float32,
            eps=config.rms_norm_eps,
            scale=scale,
        )

    def _layer_struct(self, place: str, **norms: int | None) -> LayerStruct:
        """Fill the structure of a decoder layer.

        Args:
            place: how the names of its tensors begin.
            norms: addresses of those that it has beside that of its feed-forward part.
        """
        return LayerStruct(
            mlp_norm=self._norm(f"{place}.post_attention_layernorm"),
            query=self._linear(f"{place}.self_attn.q_proj"),
            key=self._linear(f"{place}.self_attn.k_proj"),
            value=self._linear(f"{place}.self_attn.v_proj"),
            out=self._linear(f"{place}.self_attn.o_proj"),
            gate=self._linear(f"{place}.mlp.gate_proj"),
            up=self._linear(f"{place}.mlp.up_proj"),
            down=self._linear(f"{place}.mlp.down_proj"),
            window=self._config.sliding_window or 0,
            **norms,
        )

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
