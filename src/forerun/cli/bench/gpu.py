"""`forerun bench gpu`: measure a device's bandwidth, and steps and speedups of models made in its memory."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.bench.shared import say
from forerun.cli.flags import Flags, with_flags
from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET, DEFAULT_DTYPE
from forerun.errors import ConfigError
from forerun.utils.fields import option

if TYPE_CHECKING:
    from forerun.lab.bench.tables import Table
    from forerun.models import Model

Section = tuple[str, "Callable[[], Table]"]
NUM_PROMPTS, PROMPT_TOKENS = 4, 200
"""Number of prompts of held-out code, and the last tokens of each that are used."""
MAX_TOKENS = 64
DRAFT_PARAMETERS = "800M"
"""Size of the draft model."""
CONTEXT = 512
"""Positions before the forwards that are timed."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What is measured, and on what."""

    device: str = option("cuda", "Where models compute.", metavar="DEVICE")
    parameters: str = option("8B", "Size of the target, which gives the bundled one's text.", metavar="SIZE")
    sections: str | None = option(None, "Those to measure, by their names, with commas.", metavar="NAMES")


@with_flags
def gpu(
    *,
    chosen: Annotated[GpuOptions, Flags()],
) -> None:
    """Measure a GPU, or the CPU, with a target and a draft model made in its memory; prints Markdown.

    A section that fails says why, and the others go on; the exit code is then 1. FORERUN_KERNELS=triton takes the
    Triton kernels.
    """
    failed = []
    sections = dict(_sections(_DeviceModels(chosen)))
    names = list(sections) if chosen.sections is None else options.comma_list(chosen.sections, "--sections")
    if unknown := [name for name in names if name not in sections]:
        raise ConfigError(f"sections holds {unknown[0]!r}, but they are: {', '.join(sections)}. Give some of these.")
    for name in (each for each in sections if each in names):
        say(name)
        start = time.perf_counter()
        try:
            table = sections[name]()
        except Exception as error:  # the sections after it are measured all the same
            failed.append(name)
            typer.echo(f"\n### {name}\n\nfailed: {type(error).__name__}: {error}")
            traceback.print_exc()
            continue
        from forerun.lab.bench.tables import markdown_table

        elapsed = time.perf_counter() - start
        typer.echo(f"\n### {table.title}\n\n{markdown_table(table.header, table.rows)}\n\n({elapsed:.0f} s)")
    if failed:
        say(f"failed: {', '.join(failed)}")
        raise typer.Exit(1)


def _sections(models: _DeviceModels) -> Iterator[Section]:
    """Yield all sections, the most important first. Models are made by the first section that needs them."""
    yield "copies", models.copies
    yield "the models", models.models
    yield "steps of the target", lambda: models.steps(models.target())
    yield "steps of the draft model", lambda: models.steps(models.draft())
    yield "greedy pairs", lambda: models.pairs(0.0, 1)
    yield "drawn pairs", lambda: models.pairs(1.0, 1)
    yield "greedy pairs in a batch", lambda: models.pairs(0.0, NUM_PROMPTS)
    for name in ("int8", "int4"):
        yield f"steps of the target in {name}", partial(models.quantized_steps, name)
    yield "Transformers", models.transformers


class _DeviceModels:
    """Target and draft model, made on the device when they are first used, and their measurements."""

    def __init__(self, chosen: GpuOptions) -> None:
        self._chosen = chosen
        self._models: dict[str, Model] = {}

    @cached_property
    def bandwidth(self) -> float:
        """Return the bytes per second of a copy."""
        from forerun.lab.bench.gpu import copy_bandwidth
        from forerun.utils.device import resolve_device

        return copy_bandwidth(resolve_device(self._chosen.device))

    def target(self) -> Model:
        """Return the target."""
        return self._model(BUNDLED_TARGET, self._chosen.parameters)

    def draft(self) -> Model:
        """Return the draft model."""
        return self._model(BUNDLED_DRAFT, DRAFT_PARAMETERS)

    def prompts(self) -> list[list[int]]:
        """Return the token ids of held-out code."""
        from forerun.models import load_tokenizer
        from forerun.utils.workloads import load_workload

        tokenizer = load_tokenizer(BUNDLED_TARGET)
        texts = [case.prompt for case in load_workload("code") if isinstance(case.prompt, str)][:NUM_PROMPTS]
        return [tokenizer(text)["input_ids"][-PROMPT_TOKENS:] for text in texts]

    def copies(self) -> Table:
        from forerun.kernels.provenance import describe_machine, machine_facts
        from forerun.lab.bench.tables import Table

        facts = machine_facts()
        device = facts["accelerator"] if self._chosen.device != "cpu" else "the CPU"
        title = f"Copies on {device}, bytes read and written together ({describe_machine(facts)})"
        return Table(title, ["", "rate"], [["copy", f"{self.bandwidth / 1e9:,.0f} GB/s"]])

    def models(self) -> Table:
        """Measure the time to make and to capture the models, and whether they are exact."""
        from forerun.lab.bench.tables import Table

        rows = []
        for make in (self.target, self.draft):
            start = time.perf_counter()
            model = make()
            elapsed = f"{time.perf_counter() - start:.1f}"
            verdict = "yes" if model.exactness.exact else f"no: {model.exactness.reason}"
            rows.append([model.name, f"{model.num_parameters:,}", elapsed, model.kernels, verdict])
        return Table("Models", ["model", "parameters", "s to make, capture and try", "kernels", "exact"], rows)

    def steps(self, model: Model) -> Table:
        from forerun.lab.bench.gpu import step_times

        return step_times(model, self.bandwidth, CONTEXT)

    def pairs(self, temperature: float, batch: int) -> Table:
        from forerun.lab.bench.gpu import speed_table

        return speed_table(self.target(), self.draft(), self.prompts(), MAX_TOKENS, temperature, batch)

    def quantized_steps(self, quantize: str) -> Table:
        from forerun.models.loading.load import adopt

        self.free()
        wide = self._wide(BUNDLED_TARGET, self._chosen.parameters)
        return self.steps(adopt(wide, self._chosen.parameters, quantize))

    def transformers(self) -> Table:
        from forerun.lab.bench.gpu import transformers_table

        self.free()
        target = self._wide(BUNDLED_TARGET, self._chosen.parameters)
        draft = self._wide(BUNDLED_DRAFT, DRAFT_PARAMETERS)
        return transformers_table(target, draft, self.prompts(), MAX_TOKENS)

    def free(self) -> None:
        """Free the pair: later sections make models of their own."""
        import torch

        self._models.clear()
        gc.collect()  # engines and drafters hold each other
        torch.cuda.empty_cache()  # the next model looks at what the device has left

    def _model(self, source: str, parameters: str) -> Model:
        from forerun.models.loading.load import adopt

        if source not in self._models:
            self._models[source] = adopt(self._wide(source, parameters), f"{source} at {parameters}")
        return self._models[source]

    def _wide(self, source: str, parameters: str) -> Any:
        """Make a model of Transformers on the device."""
        from forerun.lab.bench.padded_model import make_wide

        return make_wide(source, parameters, DEFAULT_DTYPE, self._chosen.device)
