"""What of a draft model can go on learning while it drafts: its last layers and the final norm."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.models.base import BoundModel
from forerun.models import Model, load_transformers_model
from forerun.models.fused.native import NativeDecoder
from forerun.models.spec.attention import Attention
from forerun.models.spec.layer import LayerSpec

LEARNT_LAYERS = 2
"""Layers that can go on learning, the last ones: what all texts have in common is in the first."""


def _is_plain(layer: LayerSpec) -> bool:
    """Return whether a layer is one that can go on learning: attention with keys of its own, and no experts."""
    own = layer.attention
    is_alone = isinstance(own, Attention) and own.keys_of is None
    return is_alone and layer.recurrence is None and layer.experts is None and layer.feed_forward is not None


class LearnableDraft:
    """A draft model, whose last layers and final norm can go on learning (`Learnable`).

    Args:
        bound: as it was given to its `DraftingModel`, computed by the native kernels.
        file: the name that it is read by.
    """

    def __init__(self, bound: BoundModel, file: str | Path) -> None:
        self.file = file
        self._bound = bound

    @classmethod
    def of(cls, bound: BoundModel, file: str | Path) -> LearnableDraft | None:
        """Return what of a draft model can go on learning; None if the native kernels do not compute it, it has an
        adapter, or its last layers are no plain ones."""
        model = bound.model
        decoder = model.decoder if isinstance(model, Model) and model.adapter is None else None
        if not isinstance(decoder, NativeDecoder):
            return None
        return cls(bound, file) if all(map(_is_plain, decoder.spec.layers[-LEARNT_LAYERS:])) else None

    @property
    def name(self) -> str:
        return self._bound.model.name

    @property
    def output_tokens(self) -> Tensor | None:
        """Return the tokens that it proposes, int64; None: all."""
        model = self._bound.model
        return model.output_tokens if isinstance(model, Model) else None

    @cached_property
    def modules(self) -> Any:
        """Return the model as Transformers computes it, all of its weights in float32."""
        return load_transformers_model(self.file, "float32").requires_grad_(False)

    def tensors(self) -> dict[str, Tensor]:
        spec = self._decoder.spec
        first = len(spec.layers) - LEARNT_LAYERS
        paths = [spec.layer_path(index) for index in range(first, len(spec.layers))]
        paths += [f"{spec.base}.{spec.output.norm}"] if spec.output.norm else []
        names = tuple(f"{path}." for path in paths)
        return {name: each.detach().clone() for name, each in self.modules.named_parameters() if name.startswith(names)}

    def changed(self, tensors: Mapping[str, Tensor]) -> BoundModel:
        served = self._bound.model
        assert isinstance(served, Model)
        spec = self._decoder.spec
        made = {}
        with torch.no_grad():
            for index in range(len(spec.layers) - LEARNT_LAYERS, len(spec.layers)):
                path = spec.layer_path(index)
                made[index] = _with_tensors(self.modules.get_submodule(path), path, tensors)
            base = torch.nn.Module()
            if spec.output.norm:
                norm = _with_tensors(
                    self.modules.get_submodule(f"{spec.base}.{spec.output.norm}"),
                    f"{spec.base}.{spec.output.norm}",
                    tensors,
                )
                base.add_module(spec.output.norm, norm)
        model = copy(served)
        model.decoder = self._decoder.with_layers(made, base)
        return replace(self._bound, model=model)

    @property
    def _decoder(self) -> NativeDecoder:
        decoder = getattr(self._bound.model, "decoder", None)
        assert isinstance(decoder, NativeDecoder)
        return decoder


def _with_tensors(module: torch.nn.Module, path: str, tensors: Mapping[str, Tensor]) -> torch.nn.Module:
    """Return a copy of a module at a path, with those of these tensors that are its own."""
    made = deepcopy(module)
    own = {name.removeprefix(f"{path}."): each for name, each in tensors.items() if name.startswith(f"{path}.")}
    made.load_state_dict(own, strict=False)
    return made
