"""The card beside a trained model: its training data, its training, and its measurements."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from forerun.errors import ConfigError
from forerun.files.write import write_bytes
from forerun.train.checkpoint import LoopState
from forerun.train.evaluate import Acceptance, TextScore
from forerun.train.folder import CARD, write_record


def versions() -> dict[str, str]:
    """The versions that a run depends on."""
    found = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"python": platform.python_version(), **found}


def stage_record(state: LoopState) -> dict[str, Any]:
    """How far a stage went and how fast."""
    return {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds),
        "tokens_per_second": round(state.tokens / max(state.seconds, 1e-9)),
        "final_loss": round(sum(state.losses[-32:]) / max(1, len(state.losses[-32:])), 4),
    }


def build_record(
    *,
    kind: str,
    command: str,
    seed: int,
    model: PreTrainedModel,
    data: dict[str, Any],
    options: dict[str, Any],
    stages: dict[str, LoopState],
    held_out: TextScore,
    acceptance: list[Acceptance],
    started_from: dict[str, Any] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Everything the card says, as plain values."""
    return {
        "kind": kind,
        "command": command,
        "seed": seed,
        "parameters": model.num_parameters(),
        "data": data,
        "stages": {name: stage_record(state) for name, state in stages.items()},
        "held_out": asdict(held_out),
        "acceptance": [asdict(row) for row in acceptance],
        "device": device,
        "versions": versions(),
        "options": options,
        "started_from": started_from,
    }


def write_card(folder: Path, record: dict[str, Any]) -> None:
    """Write `README.md` and `training.json` into a model folder."""
    write_record(folder, record)
    write_bytes(folder / CARD, render(record).encode(), error=ConfigError)


def render(record: dict[str, Any]) -> str:
    """The card as Markdown."""
    data, held_out = record["data"], record["held_out"]
    unit = data.get("unit", "files")
    lines = [
        "---",
        "license: apache-2.0",
        "library_name: transformers",
        "---",
        "",
        f"# {record['kind'].capitalize()}: {record['parameters'] / 1e6:.2f} M parameters",
        "",
        "A small causal language model of Python source in the Llama architecture. It exists to show and to test",
        "speculative decoding; it is no programming assistant.",
        "",
        f"- Data: {data['description']}; {data['training_files']} {unit}; licence: {data['licence']}.",
        f"- Held out: {data['held_out_files']} {unit}, {data['split']}. Not used for the tokenizer either.",
        f"- Command: `{record['command']}`",
        *_former(record["started_from"]),
        f"- Seed: {record['seed']}",
        f"- Held-out bits per byte: {held_out['bits_per_byte']:.4f}",
        f"- Held-out perplexity per token: {held_out['perplexity']:.3f} ({held_out['tokens']:,} tokens)",
        f"- Device: {record.get('device', 'cpu')}",
        "- Versions: " + ", ".join(f"{name} {number}" for name, number in record["versions"].items()),
        "",
        "| stage | steps | tokens | seconds | tokens/s | final loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, stage in record["stages"].items():
        lines.append(
            f"| {name} | {stage['steps']:,} | {stage['tokens']:,} | {stage['seconds']:,} | "
            f"{stage['tokens_per_second']:,} | {stage['final_loss']} |"
        )
    if record["acceptance"]:
        lines += ["", *_acceptance_table(record["acceptance"])]
    lines += ["", "`training.json` says the same for programs, with every option.", ""]
    return "\n".join(lines)


def _former(record: dict[str, Any] | None) -> list[str]:
    """Where the run started, if not from random weights."""
    if not record:
        return []
    stages = ", ".join(f"{name} {stage['tokens']:,} tokens" for name, stage in record["stages"].items())
    return [f"- Started from a draft made by `{record['command']}` ({stages})."]


def _acceptance_table(rows: list[dict[str, Any]]) -> list[str]:
    table = [
        "Acceptance with the target, on the target's continuations of held-out prompts (teacher-forced):",
        "",
        "| temperature | K | acceptance rate | per token | per position, if reached | mean acceptance length |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        positions = ", ".join(f"{value:.3f}" for value in row["per_position"])
        table.append(
            f"| {row['temperature']:g} | {row['num_draft_tokens']} | {row['rate']:.3f} | {row['per_token']:.3f} | "
            f"{positions} | {row['mean_acceptance_length']:.2f} |"
        )
    return table
