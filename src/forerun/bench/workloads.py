"""Prompts to measure on. The bundled ones are held-out files, in the order of a hash of their names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.config import ASSETS, SamplingParams
from forerun.errors import ConfigError

WORKLOADS = ASSETS / "workloads"


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt.

    Attributes:
        name: where it comes from.
        prompt: what the model is given.
        reference: what stood there; empty when unknown.
        temperature: at which it is to be sampled, whatever else is measured; None leaves that open.
    """

    name: str
    prompt: str
    reference: str = ""
    temperature: float | None = None


def names() -> list[str]:
    """The bundled workloads."""
    return sorted(path.stem for path in WORKLOADS.glob("*.jsonl"))


def load(workload: str, limit: int | None = None) -> list[Case]:
    """The first `limit` cases of a bundled workload, or of a JSONL file with a "prompt" on every line.

    Raises:
        ConfigError: there is no such workload, or a line of it cannot be read.
    """
    bundled = WORKLOADS / f"{workload}.jsonl"
    path = bundled if bundled.is_file() else Path(workload)
    if not path.is_file():
        raise ConfigError(
            f"There is no workload {workload!r}. Give one of {', '.join(names()) or 'none bundled'}, "
            "or the path of a JSONL file with a prompt on every line."
        )
    cases: list[Case] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(cases) >= limit:
                break
            if line.strip():
                cases.append(_case(line, f"{path.name}:{number}"))
    if not cases:
        raise ConfigError(f"{path} holds no prompts. Put one JSON object with a prompt on each line.")
    return cases


def with_prediction(params: SamplingParams, drafter: Any, case: Case) -> SamplingParams:
    """For a drafter that reads predictions, what really stood after the prompt is the client's guess."""
    if case.reference and getattr(drafter, "reads_prediction", False):
        return replace(params, prediction=case.reference)
    return params


def own_temperatures(cases: Sequence[Case]) -> list[float]:
    """The temperatures that a workload asks for; empty if it leaves that open."""
    return sorted({case.temperature for case in cases if case.temperature is not None})


def _case(line: str, where: str) -> Case:
    try:
        record = json.loads(line)
        prompt = record["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ConfigError(f'{where} is not a JSON object with a string "prompt": {line.strip()[:80]!r}.')
    temperature = record.get("temperature")
    if temperature is not None and not (isinstance(temperature, (int, float)) and temperature >= 0):
        raise ConfigError(f"{where} has the temperature {temperature!r}, but it must be a number of 0 or more.")
    return Case(str(record.get("file", where)), prompt, str(record.get("reference", "")), temperature)
