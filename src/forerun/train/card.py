"""Folders of trained models: weights, tokenizer, and the card with data, training and measurements."""

from __future__ import annotations

import copy
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.drafters.base import TRAINING_RECORD
from forerun.errors import ConfigError, ModelLoadError
from forerun.models import load_tokenizer as read_tokenizer, load_transformers_model
from forerun.models.loading.transformers_modules import quietly
from forerun.train.checkpoint import LoopState
from forerun.train.evaluate import HeldOutAcceptance, TextScore, is_chance
from forerun.utils.files import REMEDY, new_files, write_bytes, write_json
from forerun.utils.json_file import Fields

CARD = "README.md"
NOT_JUDGED = "no answers were held out that are long enough, so there was nothing to judge by. Give more data."


def chance_line(what: str, rate: float, constant: float) -> str:
    """Return what is said of a drafter whose first tokens are accepted no more often than one token would be."""
    return (
        f"This is no {what} yet: the first token of its drafts is accepted in {rate:.1%}, the most frequent token in "
        f"{constant:.1%}. Train it longer, on more data, or with another learning rate."
    )


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights (bfloat16 safetensors), configuration and tokenizer; `model` itself is left as it is.

    Raises:
        ConfigError: they cannot be written; what was in the folder is still there.
    """
    stored = copy.deepcopy(model).to(device="cpu", dtype=torch.bfloat16)
    with new_files(folder, ConfigError) as fresh, quietly():
        try:
            stored.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
        except SafetensorError as error:
            raise ConfigError(f"{folder} cannot be written: {error}. {REMEDY}") from error


def load_model_and_tokenizer(
    name: Path, dtype: torch.dtype = torch.bfloat16
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in evaluation mode.

    name: a local folder, a GGUF file, or what `forerun fetch` brings. Quantized weights are dequantized.

    Raises:
        ModelLoadError: it is missing, or Transformers cannot read a model from it.
    """
    return load_transformers_model(name, str(dtype).removeprefix("torch.")), read_tokenizer(name)


def load_saved_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local folder.

    Raises:
        ModelLoadError: there is none, or it is damaged.
    """
    if not (folder / "tokenizer.json").exists():
        raise ModelLoadError(f"{folder} holds no tokenizer.json. Give the folder of a saved tokenizer or model.")
    return read_tokenizer(folder)


def read_record(folder: Path) -> dict[str, Any]:
    """Read `training.json`; an empty dictionary without one. Raises ModelLoadError where it is damaged."""
    path = folder / TRAINING_RECORD
    return dict(Fields.read(path, ModelLoadError, remedy="Remove it or put it right.").values) if path.exists() else {}


def versions() -> dict[str, str]:
    """Return the versions of Python and the libraries that a run depends on."""
    found = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"python": platform.python_version(), **found}


def stage_record(state: LoopState) -> dict[str, Any]:
    """Return steps, tokens, speed, loss, and minutes with scores of the evaluations of a stage."""
    minutes = state.seconds / 60 / max(1, state.step)
    return {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds),
        "tokens_per_second": round(state.tokens / max(state.seconds, 1e-9)),
        "final_loss": round(sum(state.losses[-32:]) / max(1, len(state.losses[-32:])), 4),
        "curve": [[round(step * minutes, 1), round(score, 3)] for step, score in state.scores],
    }


def model_record(
    *,
    kind: str,
    command: str,
    seed: int,
    model: PreTrainedModel,
    data: dict[str, Any],
    options: dict[str, Any],
    stages: dict[str, LoopState],
    held_out: TextScore,
    acceptance: list[HeldOutAcceptance],
    started_from: dict[str, Any] | None = None,
    device: str = "cpu",
    constant: float = 0.0,
) -> dict[str, Any]:
    """Collect the content of the card, as JSON values.

    constant: the acceptance of always proposing the most frequent token (`most_frequent_share`).
    """
    return {
        "kind": kind,
        "command": command,
        "seed": seed,
        "parameters": model.num_parameters(),
        "data": data,
        "stages": {name: stage_record(state) for name, state in stages.items()},
        "held_out": asdict(held_out),
        "acceptance": [asdict(row) for row in acceptance],
        "most_frequent_token": round(constant, 4),
        "is_chance": is_chance(acceptance, constant),
        "device": device,
        "versions": versions(),
        "options": options,
        "started_from": started_from,
    }


def write_model_card(folder: Path, record: dict[str, Any]) -> None:
    """Write `README.md` and `training.json` into a model folder."""
    write_json(folder / TRAINING_RECORD, record, error=ConfigError)
    write_bytes(folder / CARD, _render(record).encode(), error=ConfigError)


def _render(record: dict[str, Any]) -> str:
    """Render the card as Markdown."""
    data = record["data"]
    held_out = record["held_out"]
    unit = data.get("unit", "files")
    lines = [
        "---",
        "library_name: transformers",
        "---",
        "",
        f"# {record['kind'].capitalize()}: {record['parameters'] / 1e6:.2f} M parameters",
        "",
        "A small causal language model for speculative decoding; it is no assistant by itself.",
        "",
        f"- Data: {data['description']}; {data['training_files']} {unit}; licence: {data['licence']}.",
        f"- Held out: {data['held_out_files']} {unit}, {data['split']}. Not used for the tokenizer either.",
        f"- Command: `{record['command']}`",
        *([_start_line(record["started_from"])] if record["started_from"] else []),
        f"- Seed: {record['seed']}",
        *_score_lines(held_out),
        f"- Device: {record.get('device', 'cpu')}",
        "- Versions: " + ", ".join(f"{name} {number}" for name, number in record["versions"].items()),
        "",
        "| stage | steps | tokens | seconds | tokens/s | final loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, stage in record["stages"].items():
        loss = stage["final_loss"] or "–"
        lines.append(
            f"| {name} | {stage['steps']:,} | {stage['tokens']:,} | {stage['seconds']:,} | "
            f"{stage['tokens_per_second']:,} | {loss} |"
        )
    lines += _curve_lines(record["stages"])
    if record["acceptance"]:
        text = "the target's continuations of held-out prompts" if unit == "files" else "held-out rows of the data"
        lines += ["", *_acceptance_table(record["acceptance"], text)]
    if record.get("is_chance"):
        first = record["acceptance"][0]["per_position"][0]
        lines += ["", chance_line(record["kind"], first, record["most_frequent_token"])]
    lines += ["", "`training.json` says the same for programs, with every option.", ""]
    return "\n".join(lines)


def _curve_lines(stages: dict[str, Any]) -> list[str]:
    """Return the lines on how the mean acceptance length of held-out chains rose with the minutes of all stages."""
    lines = [""]
    before = 0.0
    for name, stage in stages.items():
        points = [f"{score:.2f} after {before + minutes:.1f} min" for minutes, score in stage.get("curve", [])]
        if points:
            lines.append(f"Mean acceptance length by minutes of all stages, {name}: {', '.join(points)}.")
        before += stage["seconds"] / 60
    return lines if len(lines) > 1 else []


def _score_lines(held_out: dict[str, Any]) -> list[str]:
    if not held_out["tokens"]:
        return [f"- Evaluation: {NOT_JUDGED}"]
    return [
        f"- Held-out bits per byte: {held_out['bits_per_byte']:.4f}",
        f"- Held-out perplexity per token: {held_out['perplexity']:.3f} ({held_out['tokens']:,} tokens)",
    ]


def _start_line(record: dict[str, Any]) -> str:
    """Return the card's line on the draft that the run started from."""
    stages = ", ".join(f"{name} {stage['tokens']:,} tokens" for name, stage in record["stages"].items())
    return f"- Started from a draft made by `{record['command']}` ({stages})."


def _acceptance_table(rows: list[dict[str, Any]], text: str) -> list[str]:
    table = [
        f"Acceptance with the target, on {text} (teacher-forced):",
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
