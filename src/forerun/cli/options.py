"""Flags that several commands share, and the choice of a default model and of the drafters to compare."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import given
from forerun.config import (
    AUTO,
    BUNDLED_MODELS,
    BUNDLED_TARGET,
    DEFAULT_DRAFTER,
    DEFAULT_DTYPE,
    DTYPES,
    KV_CACHE_DTYPES,
    NO_DRAFTER,
    QUANTISATIONS,
    UNQUANTIZED,
    EngineConfig,
    MaxModelLen,
    NumDraftTokens,
    SamplingParams,
    check_one_process,
)
from forerun.drafters.parse_text import split_text
from forerun.drafters.registry import DRAFTERS, shipped_folder, with_draft_model
from forerun.errors import ConfigError
from forerun.utils import fetch as store
from forerun.utils.device import DEVICES
from forerun.utils.fields import Checked, option, option_like
from forerun.utils.json_file import read_template
from forerun.utils.machine import performance_cores
from forerun.utils.stores import stored_models

if TYPE_CHECKING:
    from forerun.models import LanguageModel

WORKLOAD_FILE = (
    'or a JSONL file: on each line an object with a "prompt" (raw text), "messages" (a chat) or "turns" (user '
    'messages, the model\'s answers between them), and if wanted its "category", its "id" or "file", the "reference" '
    'that follows it there, and the "temperature" to sample it at. The files of Spec-Bench, MT-bench, HumanEval and '
    "GSM8K are such files, packed by gzip too."
)


KEPT = ("dtype", "device", "quantize", "kv_cache_dtype", "adapter")
"""Settings of the target that go into a configuration or a command line, where they are not the default."""


@dataclass(frozen=True, slots=True)
class LLMOptions(Checked):
    """Options of `LLM` beside its target and its drafter."""

    num_draft_tokens: NumDraftTokens | None = option_like(
        EngineConfig, "num_draft_tokens", None, default_text=f"the drafter's own, or {AUTO}"
    )
    acceptance: str | None = option_like(EngineConfig, "acceptance", None, default_text="the exact rule that fits")
    cache_memory: float | None = option_like(
        EngineConfig, "cache_memory", None, default_text="what the batch needs, at most half of the machine's"
    )
    prefix_reuse: str = option_like(EngineConfig, "prefix_reuse", AUTO, default_text=AUTO)
    prompt_cache: str | None = option_like(EngineConfig, "prompt_cache", None, default_text="none")
    prompt_cache_size: float | None = option_like(EngineConfig, "prompt_cache_size", None, default_text="8")
    remember: str | None = option_like(EngineConfig, "remember", None, default_text="none")
    remember_size: float | None = option_like(EngineConfig, "remember_size", None, default_text="as it is, 16 at first")
    dtype: str = option(DEFAULT_DTYPE, f"Number format of weights and cache: {', '.join(DTYPES)}.")
    device: str = option("cpu", f"Where to compute: {DEVICES}.")
    quantize: str | None = option(
        None,
        f"What the target's weights are kept in: {', '.join(QUANTISATIONS)}, or {UNQUANTIZED}: numbers of --dtype.",
        metavar="FORMAT",
        default_text="as its files are",
    )
    kv_cache_dtype: str = option(
        AUTO,
        f"Number format of the target's keys and values: {', '.join(KV_CACHE_DTYPES)}. int8 takes half the memory of "
        "bfloat16; on the CPU only.",
        metavar="FORMAT",
        choices=KV_CACHE_DTYPES,
    )
    max_model_len: MaxModelLen = option(
        AUTO,
        "Tokens that a prompt and its answer may have together; the cache is planned for it. auto: the model's "
        "context, or what one request may have of it in the cache.",
        low=2,
        metavar="N|auto",
        flags=("--max-model-len", "-c"),
    )
    tensor_parallel_size: int = option(
        1,
        "1, as vLLM's commands say it: forerun computes a model in one process.",
        flags=("--tensor-parallel-size", "--tensor-parallel"),
        metavar="N",
    )
    adapter: str | None = option(
        None, "The folder of a PEFT LoRA adapter of the target, merged when it is loaded.", metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        check_one_process(self.tensor_parallel_size)


LLM_TYPED = (
    *("num_draft_tokens", "dtype", "device", "quantize", "kv_cache_dtype", "adapter", "max_model_len"),
    "remember",
)
"""Fields of LLMOptions with a flag in commands that generate; the others are keys of the configuration file."""
OF_SERVERS = ("prefix_reuse", "prompt_cache", "prompt_cache_size", "tensor_parallel_size")
"""Fields of LLMOptions that `serve` alone has."""
RAY_TYPED = ("ray", "replicas", "ray_address")
DRAFTERS_HELP = "Drafters, with commas between them; with semicolons where their options hold commas outside quotes."
DRAFTER_HELP = "A drafter (`forerun drafters` lists them), the folder or id of a draft model, 'auto' or 'none'."
DEFAULT_DRAFTER_TEXT = f"{AUTO}: {DEFAULT_DRAFTER}, with the draft model or head for the target that is found"


def complete_models(incomplete: str) -> list[str]:
    """Return the names of models on this machine that begin so, for the shell."""
    names = [*BUNDLED_MODELS, *store.fetchable_names(), *(each.name for each in stored_models())]
    return [name for name in names if name.startswith(incomplete)]


A_MODEL = (
    "'smollm2' once it is fetched, 'bundled', a folder, a GGUF file (model.gguf, owner/name:file.gguf, "
    "owner/name:Q4_K_M), a hub id, or a name of `forerun models`."
)
_CHOSEN = "smollm2 if it is fetched, else bundled"


def model_argument(about: str = f"The target model: {A_MODEL}", default: str | None = _CHOSEN) -> Any:
    """Return an argument MODEL, which -m and --model give too (`cli/main.py`). default: in words; None: it must be
    given."""
    shown: str | bool = default or False
    help_text = f"{about} Also -m, --model."
    return typer.Argument(metavar="MODEL", help=help_text, show_default=shown, autocompletion=complete_models)


def model_option(*names: str, about: str = f"The target model: {A_MODEL}", default: str = _CHOSEN) -> Any:
    """Return an option that takes a model. default: in words."""
    return typer.Option(*names, metavar="MODEL", help=about, show_default=default, autocompletion=complete_models)


ModelName = Annotated[str | None, model_option("--model", "-m")]
"""None stands for `chosen_model`."""
TargetArgument = Annotated[str | None, model_argument()]
TargetName = Annotated[str | None, model_option("--target", "--model", "-m")]
DrafterName = Annotated[
    str | None, typer.Option(help=DRAFTER_HELP, metavar="DRAFTER", show_default=DEFAULT_DRAFTER_TEXT)
]
DraftName = Annotated[
    str | None,
    model_option(
        *("--draft", "--draft-model"),
        about="Folder or id of the draft model.",
        default="the bundled draft for the bundled target",
    ),
]
DraftModelName = Annotated[
    str | None,
    model_option(
        "--draft-model",
        about="Folder, GGUF file, id or name of a draft model: beside suffix matches, --drafter "
        "hybrid:sources=suffix+MODEL; alone with --drafter draft-model; of several drafters, for the first that takes "
        "one.",
        default="what auto finds",
    ),
]
DraftVocab = Annotated[
    int | None,
    typer.Option(help="Tokens that the draft model can propose, 0 for all.", metavar="N", show_default="49152, or all"),
]
System = Annotated[
    str | None, typer.Option(help="The system message of the chat.", metavar="TEXT", show_default="none")
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        help="A file with the chat template, in Jinja, in place of the model's.",
        metavar="FILE",
        show_default="the model's, or chat_template.jinja beside it",
    ),
]
_THREADS_TEXT = "OMP_NUM_THREADS, else one for each performance core"
Threads = Annotated[
    int | None,
    typer.Option("--threads", "-t", help="Threads of torch.", min=1, metavar="INT", show_default=_THREADS_TEXT),
]
HiddenThreads = Annotated[
    int | None,
    typer.Option(help="Threads of torch.", min=1, metavar="INT", show_default=_THREADS_TEXT, hidden=True),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


TEMPERATURE = 0.7
"""Of `generate` and `chat`, where neither the user nor the model's files say."""


def own_sampling(
    ctx: typer.Context, params: SamplingParams, target: LanguageModel
) -> tuple[SamplingParams, str | None]:
    """Return the parameters with what the model's files recommend in place of defaults, and a line that says so, or
    None.

    Args:
        params: with TEMPERATURE as default.
    """
    own = {name: value for name, value in target.recommended_sampling.items() if not given(ctx, name)}
    if not own:
        return params, None
    values = ", ".join(f"{name} {value:g}" for name, value in own.items())
    return replace(params, **own), f"sampling as the model's files recommend: {values}"  # type: ignore[arg-type]


def template_text(file: Path | None) -> str | None:
    """Return the text of --chat-template, before a model is loaded. Raises ConfigError if it cannot be read."""
    return None if file is None else read_template(file, ConfigError)


def set_threads(threads: int | None) -> None:
    """Set torch's number of threads; None leaves what an environment variable says, else takes one for each performance
    core."""
    import torch

    if threads is None and not any(map(os.environ.get, ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))):
        threads = performance_cores()
    if threads is not None:
        torch.set_num_threads(threads)


def comma_list(text: str, what: str) -> list[str]:
    """Split the value of a flag at commas; or at semicolons if there is one, so that entries may contain commas. None
    inside double quotes counts.

    Raises:
        ConfigError: it has no entry, or one twice. DrafterError: a quote is not closed.
    """
    parts = split_text(text, ";")
    if len(parts) == 1:
        parts = split_text(text, ",")
    entries = [entry.strip() for entry in parts if entry.strip()]
    if not entries or len(set(entries)) < len(entries):
        raise ConfigError(f"{what} is {text!r}, but must be different names with commas between them.")
    return entries


def chosen_model(model: str | None, flag: str = "--model") -> str:
    """Return the flag's value; without one a fetched model, else the bundled one, with a line on standard error."""
    if model is not None:
        return model
    chosen = store.default_model()
    why = "it is fetched"
    if chosen == BUNDLED_TARGET:
        why = f"no other is fetched; `forerun fetch {store.fetchable_names()[0]}` brings a chat model"
    typer.echo(f"forerun: no {flag} given, so it is {chosen} ({why})", err=True)
    return chosen


def named_drafter(drafter: str | None, draft_model: str | None, draft_vocab: int | None = None) -> str | None:
    """Return the drafter of --drafter, --draft-model and --draft-vocab; None without any. Raises ConfigError if they
    contradict each other, or --draft-model is no model."""
    if draft_model is not None:
        if draft_model.strip() in ("", NO_DRAFTER):
            raise ConfigError(
                f"--draft-model is {draft_model!r}, which is no model. Give the folder, .gguf file or id of one, or "
                f"leave it out: --drafter {DEFAULT_DRAFTER} drafts without one, --drafter {NO_DRAFTER} decodes plainly."
            )
        return with_draft_model(drafter or AUTO, draft_model, draft_vocab)
    if draft_vocab is not None:
        raise ConfigError(
            f"--draft-vocab is {draft_vocab}, but there is no --draft-model. Give both, or --drafter "
            f"NAME:draft_vocab={draft_vocab}."
        )
    return drafter


def program() -> str:
    """Return what to type for forerun: its name, or its place below this folder where the shell does not find it."""
    beside = os.path.relpath(Path(sys.executable).with_name("forerun"))
    return "forerun" if shutil.which("forerun") or beside.startswith("..") else beside


def start_command(command: str, model: str, settings: LLMOptions, drafter: str | None = None, *before: str) -> str:
    """Return the command line that runs a command with a model, its settings and a drafter; None: the default one.

    before: arguments that stand before the model.
    """
    own = LLMOptions()
    changed = [name for name in KEPT if getattr(settings, name) != getattr(own, name)]
    flags = [part for name in changed for part in (f"--{name.replace('_', '-')}", str(getattr(settings, name)))]
    named = ["--drafter", drafter] if drafter else []
    return shlex.join([program(), command, *before, "--model", model, *named, *flags])


def choose_drafters(model: str, draft: str | None, names: str | None) -> dict[str, str]:
    """Return the drafters to compare on a target: method name -> `drafter` of `LLM`.

    Args:
        draft: the draft model for drafters that need one.
        names: drafters with commas between them, each with at most one option (NAME:key=value); with semicolons
            between them, with any number of options; AUTO is one of them. None takes all that can serve this target.

    Raises:
        ConfigError: an unknown name, or one that lacks an option it needs.
    """
    from forerun.drafters.build import automatic_drafter

    specs = comma_list(names, "--drafters") if names else list(DRAFTERS)
    chosen: dict[str, str] = {}
    for each in specs:
        spec = each
        if each == AUTO:
            spec = automatic_drafter(model) if draft is None else with_draft_model(AUTO, draft)
        name, colon, _ = spec.partition(":")
        if name not in DRAFTERS:
            raise ConfigError(f"There is no drafter {name!r}. Known: {', '.join(DRAFTERS)}.")
        row = DRAFTERS[name]
        if not colon and draft is not None and (text := row.drafting_with(draft)) is not None:
            chosen[name] = text
        elif colon or row.serves(model) or (names and row.shipped):  # a head is found by the weights
            chosen[spec] = spec
        elif row.with_head is not None and shipped_folder(model, "eagle") is not None:
            chosen[name] = row.with_head
        elif names:
            raise ConfigError(
                f"{name} needs its option {row.needed_option!r} for {model!r}: {name}:{row.needed_option}=..."
                + (", or a draft model for all with --draft." if row.with_draft_model is not None else ".")
            )
    return chosen


def describe_left_out(chosen: Mapping[str, str], draft: str | None) -> str:
    """Return the drafters that need another option for this target, with that option; empty if there are none."""
    with_model = []
    parts = []
    for name, row in DRAFTERS.items():
        if name not in chosen and draft is None and row.with_draft_model is not None:
            with_model.append(name)
        elif name not in chosen and row.needed_option:
            parts.append(f"{name} (give --drafters {name}:{row.needed_option}=...)")
        elif name not in chosen:
            parts.append(f"{name} (no prompt has a reference for it)")
    parts[:0] = [f"{', '.join(with_model)} (give a draft model with --draft)"] if with_model else []
    return "; ".join(parts) + "." if parts else ""
