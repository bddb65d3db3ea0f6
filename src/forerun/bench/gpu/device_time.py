"""How long work takes on a device, and what the device can copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

_COPIED = 1 << 31
"""Bytes of a copy on a GPU: many times what its caches hold."""
_COPIED_HERE = 1 << 26


def seconds(run: Callable[[], object], device: torch.device, rounds: int = 20, warmup: int = 3) -> float:
    """The median wall-clock time of `run` until all of its work on the device is done."""
    times = []
    for number in range(warmup + rounds):
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        if number >= warmup:
            times.append(time.perf_counter() - start)
    return median(times)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written together, of a copy from the device's memory to itself."""
    size = _COPIED if device.type == "cuda" else _COPIED_HERE
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)  # zeros may be faster than data
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)
