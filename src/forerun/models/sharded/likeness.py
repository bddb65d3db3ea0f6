"""What the ranks of one model must have in common: options, versions, kernels, and the weights themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from forerun.files.write import digest
from forerun.kernels.native.compile import SOURCES
from forerun.models.sharded.building import Plan, weight_files

_SAMPLES, _SAMPLE_BYTES = 256, 4096


def facts(plan: Plan, count: int) -> dict[str, str]:
    """By name, in the order in which they are compared."""
    from forerun import __version__

    library = plan.library
    return {
        "the number of ranks": str(count),
        "forerun": __version__,
        "torch": torch.__version__,
        "the instruction set of torch": torch.backends.cpu.get_cpu_capability(),
        "the kernels": "reference" if library is None else f"native {library.instructions}, {_digest_of_sources()}",
        "the number format": f"{plan.quantisation or plan.dtype}, {plan.dtype}".replace("torch.", ""),
        "a configuration of checksum": digest(json.dumps(plan.config.to_dict(), sort_keys=True, default=str).encode()),
        "weights of checksum": weights_digest(weight_files(plan.source)),
    }


def weights_digest(files: Sequence[Path]) -> str:
    """Of the files' sizes and of 256 pieces of each, evenly over it: all of a small file, and enough of a large one to
    tell one training from another, without reading it whole."""
    state = hashlib.blake2b(digest_size=8)
    for path in files:
        size = path.stat().st_size
        state.update(size.to_bytes(8, "little"))
        step = max(_SAMPLE_BYTES, size // _SAMPLES)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()


def _digest_of_sources() -> str:
    return digest(*(path.read_bytes() for path in sorted(SOURCES.rglob("*")) if path.is_file()))
