"""From what the user asks for to the peers that are started: forerun first."""

from __future__ import annotations

import os
from collections.abc import Mapping

from forerun.bench.peers.peer import command_of, options_of, own_command
from forerun.bench.peers.run import Start
from forerun.bench.peers.specs import PeerSpec, missing
from forerun.config import BUNDLED_MODELS
from forerun.fetch.store import path_of

FORERUN = "forerun"


def own_start(model: str, drafters: Mapping[str, str], dtype: str, threads: int, quantize: str | None = None) -> Start:
    """forerun. drafters: name -> the drafter's text."""
    options = {
        "kind": FORERUN,
        "name": "",
        "model": model,
        "drafters": dict(drafters),
        "dtype": dtype,
        "quantize": quantize,
    }
    return Start(FORERUN, own_command(), {**options, "threads": threads})


def start_of(spec: PeerSpec, model: str, dtype: str, threads: int) -> Start:
    """A peer of the user's. model: forerun's target, for a peer that was given none."""
    target = str(BUNDLED_MODELS.get(model) or path_of(model) or model)
    about = f", {spec.model}" if spec.model else ""
    return Start(
        spec.name or f"{spec.kind}{about}", command_of(spec), options_of(spec, target, dtype, threads), missing(spec)
    )


def available_cores() -> int:
    """The cores that this process may use: the threads of every peer unless the user gives their number."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
