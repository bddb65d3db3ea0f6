"""`forerun info`: versions, hardware, kernels, and the memory that a model needs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions
from forerun.cli.output import print_json, size_text
from forerun.config import (
    INSTRUCTIONS_VARIABLE,
    KERNELS,
    KERNELS_VARIABLE,
    NATIVE,
    REFERENCE,
    TRITON,
    EngineConfig,
    environment_choice,
)
from forerun.errors import ConfigError, NativeUnavailableError
from forerun.utils.home import HOME_VARIABLE, home
from forerun.utils.machine import features, performance_cores

_VARIABLES = (HOME_VARIABLE, KERNELS_VARIABLE, INSTRUCTIONS_VARIABLE, "CXX", "OMP_NUM_THREADS")
_PLANNED = ("weight_bytes", "loading_bytes", "page_bytes", "pages")
_SHOWN = ("avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")
"""Prefixes of the processor's features that are shown as text; JSON has them all."""


ModelOrHead = Annotated[
    str | None,
    typer.Argument(
        help="The model whose memory is planned, or the folder of a draft head, which alone is described.",
        metavar="MODEL",
        autocompletion=options.complete_models,
    ),
]


@with_flags
def info(
    *,
    named: ModelOrHead = None,
    model: Annotated[
        str | None,
        options.model_option("--model", "-m", about="The model, or beside a head its target.", default="none"),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="A drafter, whose models are planned for too.", metavar="DRAFTER", show_default="none"),
    ] = None,
    draft_model: options.DraftModelName = None,
    settings: Annotated[
        LLMOptions,
        Flags(
            *("cache_memory", "dtype", "device", "quantize", "kv_cache_dtype", "adapter"),
            "max_model_len",
            typed=("quantize", "kv_cache_dtype"),
        ),
    ],
    engine: Annotated[EngineConfig, Flags("max_batch", typed=())],
    json: options.Json = False,
) -> None:
    """Show versions, processor, threads, and which kernels run and why; they are compiled if they have not been yet.

    With MODEL, also the memory that it will take, by the headers of its files. With the folder of a draft head, what
    that is and which target it is for, and nothing else.
    """
    if named is not None and _is_head(Path(named)):
        _show_head(Path(named), model, json)
        return
    if named is not None and model is not None:
        raise ConfigError(f"The model is given twice: {named!r}, which is no head, and {model!r}. Give it once.")
    model = model or named
    drafter = options.named_drafter(drafter, draft_model)
    from forerun.kernels.provenance import machine_facts

    options.set_threads(None)
    base = home()
    facts = machine_facts() | {
        "processor_features": features(),
        "performance_cores": performance_cores(),
        "kernels": _kernels(),
        "home": None if base is None else str(base),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    if model is not None:
        facts["memory"] = _memory(model, drafter, settings, engine)
    if json:
        print_json(facts)
        return
    _show(_lines(facts))


def _is_head(folder: Path) -> bool:
    """Return whether a folder is a draft head's."""
    from forerun.drafters.models.head_files.folder import is_head

    return folder.is_dir() and is_head(folder)


def _show_head(folder: Path, target: str | None, json: bool) -> None:
    from forerun.drafters.models.head_files.folder import load_head
    from forerun.models.loading.source import find_source

    num_layers = None if target is None else find_source(target).config().num_hidden_layers
    summary = load_head(folder, num_layers).summary()
    if json:
        print_json(summary)
    else:
        _show(summary.items())


def _show(lines: Iterable[tuple[str, object]]) -> None:
    for name, text in lines:
        typer.echo(f"{name + ':':<13} {text}")


def _memory(model: str, drafter: str | None, settings: LLMOptions, engine: EngineConfig) -> dict[str, Any]:
    """Plan the memory of a model. Raises the error with which loading it would fail."""
    from forerun.engine.memory_division import MemoryPlan

    drafted = engine.num_draft_tokens if settings.num_draft_tokens is None else settings.num_draft_tokens
    plan = MemoryPlan.of(
        model,
        drafter,
        replace(engine, num_draft_tokens=drafted, cache_memory=settings.cache_memory),
        dtype=settings.dtype,
        device=settings.device,
        adapter=settings.adapter,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
    )
    return plan.as_object()


def _memory_lines(memory: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines about memory: (name, text)."""
    from forerun.models.base import context_reason

    lines = []
    for model in memory["models"]:
        weights, loading, page, pages = (model[key] for key in _PLANNED)
        lines += [
            ("model", f"{model['name']}, {model['number_format']}"),
            ("weights", f"{size_text(weights)}, at most {size_text(loading)} while they are loaded"),
            ("pages", f"up to {pages:,} of {size_text(page)}, together {size_text(page * pages)}"),
        ]
    held = memory["context_length"]
    full = memory["full_context_length"]
    reason = context_reason(held, full)
    lines.append(("context", f"up to {held:,} tokens" + (f": {reason}" if reason else "")))
    lines.append(("scratch", f"{size_text(memory['scratch_bytes'])} a step"))
    available = memory["available_bytes"]
    total = memory["total_bytes"]
    text = "unknown"
    if available is not None and total is not None:
        text = f"{size_text(available)} of {size_text(total)} available"
    return [*lines, ("memory", text)]


def _kernels() -> dict[str, Any]:
    """Describe which kernels run and why. Raises ConfigError as `native`."""
    from forerun.kernels.cpu import LOST, load_library, native
    from forerun.kernels.cpu.compiler import PREBUILT, kept_failure
    from forerun.kernels.cpu.prefetching import known_distances

    mode = environment_choice(KERNELS_VARIABLE, KERNELS)
    if mode == REFERENCE:
        return {"run": REFERENCE, "instructions": None, "library": None, "reason": f"{KERNELS_VARIABLE} says so."}
    if mode == TRITON:
        reason = f"{KERNELS_VARIABLE} says so; they are tried when a model is loaded."
        return {"run": TRITON, "instructions": None, "library": None, "reason": reason}
    if mode == NATIVE:
        native()  # raises if they are unavailable
    found = load_library()
    if isinstance(found, NativeUnavailableError):
        reason = f"{found.reason} {LOST} {found.remedy}"
        return {"run": REFERENCE, "instructions": None, "library": None, "reason": reason}
    used = found.instructions
    reason = f"{used} is the best instruction set that the library and this processor have."
    if used != (best := found.supported[0]):
        if os.environ.get(INSTRUCTIONS_VARIABLE):
            reason = f"{INSTRUCTIONS_VARIABLE} says {used}; this processor has {best}."
        elif (failure := kept_failure(found.path, best)) is not None:
            reason += f" This processor has {best}. {failure}"
    if never := _never_run():
        reason += f" {never}"
    facts = {"run": NATIVE, "instructions": used, "library": str(found.path), "reason": reason}
    return facts | {"prebuilt": found.path.parent == PREBUILT, "prefetch_distances": known_distances(found)}


def _never_run() -> str:
    """Return a sentence where forerun's makers have had no such machine to run the kernels on; empty elsewhere."""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return ""
    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    return (
        f"These kernels were never run on {system} with a processor of {platform.machine()} before they were released: "
        "`forerun audit bundled --quick` tells whether they compute there what they should."
    )


def _prefetching(distances: Mapping[str, Sequence[int]]) -> str:
    """Describe how far ahead weights are asked for, by their kind, for one row, two and more."""
    kinds = [f"{kind} {'/'.join(map(str, each))}" for kind, each in distances.items()]
    return f"{', '.join(kinds)} bytes ahead for 1/2/more rows" if kinds else "nothing tried with these threads"


def _cores(facts: Mapping[str, Any]) -> str:
    fast = facts["performance_cores"]
    kinds = "" if fast == facts["cores"] else f", of which {fast} performance cores"
    return f"{facts['cores']}{kinds}, {facts['threads']} threads of torch"


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return all lines: (name, text)."""
    kernels = facts["kernels"]
    shown = [name for name in facts["processor_features"] if name.startswith(_SHOWN)]
    versions = ("python", "torch", "transformers")
    return [
        ("forerun", facts["forerun"] + (f" ({facts['commit']})" if facts["commit"] else "")),
        ("versions", ", ".join(f"{name} {facts[name]}" for name in versions)),
        ("system", facts["system"]),
        ("processor", facts["cpu"]),
        ("features", " ".join(shown) or "unknown"),
        ("cores", _cores(facts)),
        ("accelerator", facts["accelerator"] or "none"),
        ("kernels", " ".join(each for each in (kernels["run"], kernels["instructions"]) if each)),
        ("reason", kernels["reason"]),
        ("library", (kernels["library"] or "none") + ", prebuilt" * kernels.get("prebuilt", False)),
        *((("prefetching", _prefetching(kernels["prefetch_distances"])),) if "prefetch_distances" in kernels else ()),
        (HOME_VARIABLE, facts["home"] or "none"),
        *((name, text) for name, text in facts["variables"].items() if name != HOME_VARIABLE),
        *(_memory_lines(facts["memory"]) if "memory" in facts else ()),
    ]
