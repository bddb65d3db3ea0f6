"""From what the user asks for to the peers that are started: forerun first."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.bench.peers.peer import Start
from forerun.bench.peers.specs import LLAMA, PeerSpec
from forerun.config import BUNDLED_MODELS
from forerun.fetch.store import path_of

FORERUN = "forerun"


def module(name: str) -> list[str]:
    """What starts a worker in this interpreter."""
    return [sys.executable, "-m", f"forerun.bench.peers.{name}"]


def own_start(model: str, drafters: Mapping[str, str], dtype: str, threads: int, quantize: str | None = None) -> Start:
    """forerun. drafters: name -> the drafter's text."""
    options: dict[str, Any] = {"model": model, "drafters": dict(drafters), "dtype": dtype, "quantize": quantize}
    return Start(FORERUN, module("forerun_worker"), {"kind": FORERUN, "name": "", **options, "threads": threads})


def start_of(spec: PeerSpec, model: str, dtype: str, threads: int) -> Start:
    """A peer of the user's. model: forerun's target, for a peer that was given none."""
    is_llama = spec.kind == LLAMA
    command = module("llama_worker") if is_llama else [spec.program, str(Path(__file__).with_name("worker.py"))]
    options = {
        "kind": spec.kind,
        "name": spec.name,
        "program": spec.program,
        "model": spec.model or str(BUNDLED_MODELS.get(model) or path_of(model) or model),
        "draft": spec.draft,
        "dtype": dtype,
        "threads": threads,
        "lookup": spec.lookup if is_llama else int(spec.lookup),
    }
    return Start(spec.name or ", ".join(each for each in (spec.kind, spec.model) if each), command, options)


def available_cores() -> int:
    """The cores that this process may use: the threads of every peer unless the user gives their number."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
