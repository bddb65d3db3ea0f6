"""Flags that several commands share. Their defaults live in forerun.config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from forerun.config import (
    AUTO,
    BUNDLED_TARGET,
    DEFAULT_DRAFTER,
    DEFAULT_DTYPE,
    DTYPES,
    QUANTISATIONS,
    EngineConfig,
    NumDraftTokens,
    check_one_process,
)
from forerun.errors import ConfigError
from forerun.utils import fetch as store
from forerun.utils.device import DEVICES
from forerun.utils.fields import Checked, option, option_like

WORKLOAD_FILE = (
    'or a JSONL file: on each line an object with a "prompt" (raw text), "messages" (a chat) or "turns" (user '
    'messages, the model\'s answers between them), and if wanted its "category", its "id" or "file", the "reference" '
    'that follows it there, and the "temperature" to sample it at. The files of Spec-Bench, MT-bench, HumanEval and '
    "GSM8K are such files, packed by gzip too."
)


@dataclass(frozen=True, slots=True)
class LLMOptions(Checked):
    """What LLM is told beside its target and its drafter."""

    num_draft_tokens: NumDraftTokens | None = option_like(
        EngineConfig, "num_draft_tokens", None, default_text=f"the drafter's own, or {AUTO}"
    )
    acceptance: str | None = option_like(EngineConfig, "acceptance", None, default_text="the exact rule that fits")
    cache_memory: float | None = option_like(
        EngineConfig, "cache_memory", None, default_text="what the batch needs, at most half of the machine's"
    )
    prefix_reuse: str = option_like(EngineConfig, "prefix_reuse", AUTO, default_text=AUTO)
    dtype: str = option(DEFAULT_DTYPE, f"Number format of weights and cache: {', '.join(DTYPES)}.")
    device: str = option("cpu", f"Where to compute: {DEVICES}.")
    quantize: str | None = option(
        None,
        f"What the target's weights are kept in: {' or '.join(QUANTISATIONS)}.",
        metavar="FORMAT",
        default_text="as its files are",
    )
    tensor_parallel_size: int = option(
        1,
        "1, as vLLM's commands say it: forerun computes a model in one process.",
        flags=("--tensor-parallel-size", "--tensor-parallel"),
        metavar="N",
    )
    start: str | None = option(
        None,
        "A file of costs and acceptance with which a K chosen step by step begins; forerun tune writes it.",
        metavar="FILE",
        default_text="what was measured here before",
    )
    adapter: str | None = option(
        None, "The folder of a PEFT LoRA adapter of the target, merged when it is loaded.", metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        check_one_process(self.tensor_parallel_size)


LLM_TYPED = ("num_draft_tokens", "dtype", "device", "quantize", "tensor_parallel_size", "adapter")
"""Of LLMOptions, what commands that generate have flags for; the rest are keys of the configuration file."""
RAY_TYPED = ("ray", "replicas", "ray_address")
DRAFTERS_HELP = "Drafters, with commas between them; with semicolons where their options hold commas."
DRAFTER_HELP = "A drafter (`forerun drafters` lists them), the folder or id of a draft model, 'auto' or 'none'."
DEFAULT_DRAFTER_TEXT = f"{AUTO}: the bundled draft for the bundled target, else {DEFAULT_DRAFTER}"
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The target model: 'smollm2' once it is fetched, 'bundled', a folder, a GGUF file (model.gguf, "
        "owner/name:file.gguf), or a hub id.",
        metavar="MODEL",
        show_default="smollm2 if it is fetched, else bundled",
    ),
]
"""None: to be replaced by `chosen_model` of cli/default_model.py."""
_TARGET = "The target model: 'smollm2' once it is fetched, 'bundled', a folder, a GGUF file, or a hub id."
_CHOSEN = "smollm2 if it is fetched, else bundled"
TargetArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_TARGET, show_default=_CHOSEN)]
TargetName = Annotated[str | None, typer.Option(metavar="MODEL", help=_TARGET, show_default=_CHOSEN)]
DrafterName = Annotated[
    str | None, typer.Option(help=DRAFTER_HELP, metavar="DRAFTER", show_default=DEFAULT_DRAFTER_TEXT)
]
DraftName = Annotated[
    str | None,
    typer.Option(
        help="Folder or id of the draft model.",
        metavar="MODEL",
        show_default="the bundled draft for the bundled target",
    ),
]
System = Annotated[
    str | None, typer.Option(help="The system message of the chat.", metavar="TEXT", show_default="none")
]
Threads = Annotated[
    int | None, typer.Option(help="Threads of torch.", min=1, metavar="INT", show_default="chosen by torch")
]
HiddenThreads = Annotated[
    int | None,
    typer.Option(help="Threads of torch.", min=1, metavar="INT", show_default="chosen by torch", hidden=True),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def comma_list(text: str, what: str) -> list[str]:
    """The entries of a flag, between commas; or between semicolons where there is one, so that they may hold commas.

    Raises:
        ConfigError: it holds no entry, or one twice.
    """
    entries = [entry.strip() for entry in text.split(";" if ";" in text else ",") if entry.strip()]
    if not entries or len(set(entries)) < len(entries):
        raise ConfigError(f"{what} is {text!r}, but must be different names with commas between them.")
    return entries


# Which model a command takes without --model: one rule for all of them.


def chosen_model(model: str | None, flag: str = "--model") -> str:
    """The flag's value; without one a fetched model, else the bundled one, which is said on standard error."""
    if model is not None:
        return model
    chosen = store.default_model()
    why = "it is fetched"
    if chosen == BUNDLED_TARGET:
        why = f"no other is fetched; `forerun fetch {store.names()[0]}` brings a chat model"
    typer.echo(f"forerun: no {flag} given, so it is {chosen} ({why})", err=True)
    return chosen
