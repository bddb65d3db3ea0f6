"""What the core asks of the Triton kernels: whether they compute here, their memory, their pages and their decoder.

They are used only if FORERUN_KERNELS selects them, and then no other kernels are. `decoders.triton_backend` finds this
module; nothing else of the core imports it, `kernels/triton/`, or the modules beside this one that compute with them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.config import KERNELS_VARIABLE, TRITON
from forerun.errors import ConfigError, UnsupportedModelError
from forerun.kernels.triton.page_layout import DevicePageLayout
from forerun.kernels.triton.product_cut import Cut
from forerun.kernels.triton.step_arrays import HEAD_ROWS, MAX_ROWS, TILE, Capacity
from forerun.models.attention.base import LayerAttention
from forerun.models.families.build import head_shape
from forerun.models.loading.configuration import context_length
from forerun.models.loading.weight_maker import WeightMaker
from forerun.models.spec.decoder import DecoderSpec

if TYPE_CHECKING:
    from forerun.models.fused.triton import TritonDecoder

MAX_WIDTH = 256
"""Of a head: with more, a tile of keys and values does not fit into registers."""
_LEAST_CAPABILITY = (8, 0)
_FLOAT32 = 4
_ASKED = f"{KERNELS_VARIABLE} is {TRITON}"
_REMEDY = f"or unset {KERNELS_VARIABLE} to compute in PyTorch."


def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise an error if the kernels cannot compute with this dtype on this device.

    Raises:
        ConfigError: with the reason and the remedy.
    """
    if find_spec("triton") is None:
        raise ConfigError(f"{_ASKED}, but Python finds no package triton. Install it (pip install triton), {_REMEDY}")
    served = (torch.float32,) if is_interpreted() else (torch.float32, torch.bfloat16)
    if dtype not in served:
        names = " and ".join(str(each).removeprefix("torch.") for each in served)
        where = "Triton's interpreter multiplies" if is_interpreted() else "these kernels multiply"
        raise ConfigError(f"{_ASKED} and the model {dtype}, but {where} {names} rightly. Give another dtype, {_REMEDY}")
    if is_interpreted():
        if device.type != "cpu":
            raise ConfigError(
                f"{_ASKED} and TRITON_INTERPRET 1, but Triton's interpreter computes on the CPU, and the model "
                f"is to be computed on {device}. Unset TRITON_INTERPRET, or give device='cpu' (--device cpu)."
            )
        return
    if device.type != "cuda":
        raise ConfigError(
            f"{_ASKED}, but the model is to be computed on {device}. Give device='cuda' (--device cuda), {_REMEDY}"
        )
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"{_ASKED}, but {name} multiplies no bfloat16 by tensor cores. Take a newer device, {_REMEDY}"
        )
    _try_one(device)


def check_heads(name: str, num_heads: int, num_kv_heads: int, width: int) -> None:
    """Raise an error if the attention kernels cannot compute such heads.

    Raises:
        UnsupportedModelError: with their shape.
    """
    group = num_heads // max(1, num_kv_heads)
    if width > MAX_WIDTH or width % 2:
        raise UnsupportedModelError(
            f"{name} has heads of width {width}, and the Triton kernels take even widths up to {MAX_WIDTH}. Unset "
            f"{KERNELS_VARIABLE} to compute in PyTorch."
        )
    if group > TILE:
        raise UnsupportedModelError(
            f"{name} has {group} query heads for each key head, and the Triton kernels take at most {TILE}. Unset "
            f"{KERNELS_VARIABLE} to compute in PyTorch."
        )


def step_nbytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the memory that a Triton step computes in (`triton_layers.TritonStep`), and of the rotations.

    Args:
        config: of Transformers, of the Llama family. dtype: of everything that is not quantized.
    """
    heads, kv_heads, width = head_shape(config)
    hidden: int = config.hidden_size
    intermediate: int = config.intermediate_size
    vocab: int = config.vocab_size
    reach = context_length(config) + MAX_ROWS
    capacity = Capacity.of(reach, max(1, TILE // (heads // kv_heads)))
    shapes = [((heads + 2 * kv_heads) * width, hidden), (hidden, heads * width), (2 * intermediate, hidden)]
    shapes.append((hidden, intermediate))
    sums: int = max(MAX_ROWS * out * Cut.of(out, size, dtype.itemsize).splits for out, size in shapes)
    sums = max(sums, HEAD_ROWS * vocab * Cut.of(vocab, hidden, dtype.itemsize).splits)
    floats = sums + MAX_ROWS * hidden + HEAD_ROWS * (hidden + vocab)
    floats += capacity.items * kv_heads * TILE * (width + 2)
    narrow = MAX_ROWS * (hidden + 2 * heads * width + intermediate)
    return _FLOAT32 * (floats + reach * width) + dtype.itemsize * narrow + 8 * capacity.words


def page_layout(layers: Sequence[LayerAttention], dtype: torch.dtype, device: torch.device) -> DevicePageLayout:
    """Return the layout of the pages of such layers on a device."""
    return DevicePageLayout([layer.shape for layer in layers], dtype, device)


def make_decoder(
    hf: Any,
    dtype: torch.dtype,
    maker: WeightMaker | None,
    output_tokens: Tensor | None,
    spec: DecoderSpec | None,
) -> TritonDecoder:
    """Return the decoder of a model of the Llama family. Arguments: those of `decoders.make_decoder`."""
    from forerun.models.fused.triton import TritonDecoder  # it imports triton

    return TritonDecoder(hf, dtype, maker, output_tokens, spec)


def _try_one(device: torch.device) -> None:
    """Compile and launch the smallest kernel, so that an outdated driver raises a clear error here."""
    from forerun.kernels.triton.elementwise import add_and_norm

    x = torch.ones(1, 16, device=device)
    out = torch.empty_like(x)
    try:
        with torch.cuda.device(device):  # Triton launches on the current one
            add_and_norm(x, weight=x[0], out=out)
        torch.cuda.synchronize(device)
    except Exception as error:  # Triton raises what its parts raise: of the compiler, of ctypes, of the driver
        raise ConfigError(
            f"{_ASKED}, but Triton cannot compile or run a kernel on {torch.cuda.get_device_name(device)}: "
            f"{type(error).__name__}: {error}. Update the driver, {_REMEDY}"
        ) from error
