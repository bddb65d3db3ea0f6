"""Selection of the Triton kernels by FORERUN_KERNELS, and the checks of device, dtype and heads.

The Triton kernels are used only if FORERUN_KERNELS selects them, and then no other kernels are.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from forerun.config import KERNELS, KERNELS_VARIABLE, TRITON, environment_choice
from forerun.errors import ConfigError, UnsupportedModelError
from forerun.kernels.cpu import only_references
from forerun.kernels.triton.step_arrays import TILE

MAX_WIDTH = 256
"""Of a head: with more, a tile of keys and values does not fit into registers."""
_LEAST_CAPABILITY = (8, 0)
_ASKED = f"{KERNELS_VARIABLE} is {TRITON}"
_REMEDY = f"or unset {KERNELS_VARIABLE} to compute in PyTorch."


def is_triton_selected() -> bool:
    """Return whether models are to be computed by the Triton kernels.

    Raises:
        ConfigError: FORERUN_KERNELS has a value that it cannot have.
    """
    return environment_choice(KERNELS_VARIABLE, KERNELS) == TRITON and not only_references()


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
