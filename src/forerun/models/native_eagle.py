"""The layer of an EAGLE head and what surrounds it, in one call of the native kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from forerun.heads.eagle_config import EagleConfig
from forerun.kernels.native.library import Library
from forerun.kernels.native.structs import EagleStruct, LayerStruct, LinearStruct, ModelStruct
from forerun.kernels.native_linear import NativeLinear
from forerun.kernels.page_layout import PAGE
from forerun.models.attention.base import Layout, Planner
from forerun.models.attention.native import rows_struct
from forerun.models.attention.path_planner import PathPlanner
from forerun.models.eagle_layer import EagleNames, eagle_attention
from forerun.models.head_layers import HeadLayers
from forerun.models.linear import Linear
from forerun.models.rotation import HalfRotation, inverse_frequencies


class NativeEagleLayer:
    """`EagleLayer` by the native library. Whatever a call computes, it reads the head's weights once.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: EagleConfig, output: Linear, library: Library) -> None:
        self._library, self._config, self._made = library, config, made
        self._kept: list[Tensor | NativeLinear] = []  # the structures below point into their memory
        names = EagleNames(config)
        self._fuse = made.linear("fc")
        self._state_norms = [made.vector(f"{name}.weight") for name in names.state_norms]
        self._norms = torch.cat(self._state_norms) if self._state_norms else None
        self._layer = self._packed_layer(names)
        form, attention = eagle_attention(config)
        self.planner: Planner = PathPlanner([attention], made.dtype)
        self._rotation = HalfRotation(inverse_frequencies(config.rope_theta, config.head_dim), 1.0)
        self._struct = self._packed(names, output, form.scale)

    def fuse(self, states: Tensor) -> Tensor:
        """As `EagleLayer.fuse`."""
        x = states.contiguous()
        out = torch.empty(len(x), self._config.hidden_size)
        assert isinstance(self._fuse, NativeLinear)
        self._library.fuse(
            ctypes.byref(self._fuse.struct),
            None if self._norms is None else self._norms.data_ptr(),
            x.shape[1],
            self._config.rms_norm_eps,
            x.data_ptr(),
            len(x),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def forward(self, layout: Layout, embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """As `EagleLayer.forward`."""
        embedding, states = embedding.contiguous(), states.contiguous()
        wanted = torch.arange(layout.num_rows) if layout.logit_rows is None else layout.logit_rows
        x = torch.empty(layout.num_rows, self._config.hidden_size)
        logits = torch.empty(layout.num_logits, self._config.draft_vocab_size)
        tables = self._rotation.reaching(layout.num_positions)
        rows = rows_struct(layout, *tables)
        self._library.eagle(
            ctypes.byref(self._struct),
            ctypes.byref(rows),
            embedding.data_ptr(),
            states.data_ptr(),
            wanted.data_ptr(),
            layout.num_logits,
            x.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        return logits, x

    def _packed(self, names: EagleNames, output: Linear, scale: float) -> EagleStruct:
        config = self._config
        reads_pair = config.version == 3
        norms = (names.input_norm, names.hidden_norm) if reads_pair else names.entry_norms or (None, None)
        residual = self._linear(self._made.linear("embedding_residual")) if config.embedding_residual else None
        return EagleStruct(
            model=ModelStruct(
                layers=ctypes.pointer(self._layer),
                norm=self._norm("norm"),
                head=self._linear(output),
                num_layers=1,
                hidden=config.hidden_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                intermediate=config.intermediate_size,
                page=PAGE,
                cache_float32=self._made.dtype == torch.float32,
                eps=config.rms_norm_eps,
                scale=scale,
            ),
            embedding_norm=self._norm(norms[0]),
            state_norm=self._norm(norms[1]),
            entry=LinearStruct() if reads_pair else self._linear(self._fuse),
            residual=residual or LinearStruct(),
            embedding_width=config.target_hidden_size,
            state_width=config.hidden_size,
            keeps_norm=config.norm_before_residual,
            gives_norm=config.norm_output,
        )

    def _packed_layer(self, names: EagleNames) -> LayerStruct:
        parts = {name: self._linear(self._made.linear(names.attention(name))) for name in "qkvo"}
        parts |= {name: self._linear(self._made.linear(names.mlp(name))) for name in ("gate", "up", "down")}
        return LayerStruct(
            input_norm=None if self._config.version == 3 else self._norm(names.input_norm),
            mlp_norm=self._norm(names.mlp_norm),
            query=parts["q"],
            key=parts["k"],
            value=parts["v"],
            out=parts["o"],
            gate=parts["gate"],
            up=parts["up"],
            down=parts["down"],
            window=self._config.sliding_window or 0,
        )

    def _linear(self, linear: Linear) -> LinearStruct:
        assert isinstance(linear, NativeLinear)
        self._kept.append(linear)
        return linear.struct

    def _norm(self, name: str | None) -> int | None:
        """Address of a norm's weights, if the head has it."""
        weights = None if name is None else self._made.norm(name)
        if weights is None:
            return None
        self._kept.append(weights := weights.contiguous().clone())
        return weights.data_ptr()
