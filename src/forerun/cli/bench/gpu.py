"""`forerun bench gpu`: what the device can copy, steps, pairs and equality, with models made there and never saved."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.bench.shared import say
from forerun.cli.flags import Flags, with_flags
from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET, DEFAULT_DTYPE, QUANTISATIONS
from forerun.errors import ConfigError
from forerun.utils.fields import option

if TYPE_CHECKING:
    from forerun.lab.bench.tables import Table
    from forerun.models import Model

Section = tuple[str, "Callable[[], Table]"]
NUM_PROMPTS, PROMPT_TOKENS = 4, 200
"""Prompts of held-out code, and the last tokens of each that count."""
MAX_TOKENS = 64
CONTEXT = 512
"""Positions before the forwards that are timed."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What is measured, and on what."""

    device: str = option("cuda", "Where models compute.", metavar="DEVICE")
    parameters: str = option("8B", "Size of the target, which gives the bundled one's text.", metavar="SIZE")
    draft_parameters: str = option("800M", "Size of the draft model.", metavar="SIZE")
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
    for name, section in _chosen(chosen):
        say(name)
        start = time.perf_counter()
        try:
            table = section()
        except Exception as error:  # whatever it is: the sections after it are wanted all the same
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


def _chosen(chosen: GpuOptions) -> list[Section]:
    """The sections that are wanted. Raises ConfigError where there is none of a name."""
    sections = dict(_sections(chosen))
    wanted = list(sections) if chosen.sections is None else options.comma_list(chosen.sections, "--sections")
    for name in wanted:
        if name not in sections:
            raise ConfigError(f"sections holds {name!r}, but they are: {', '.join(sections)}. Give some of these.")
    return [(name, section) for name, section in sections.items() if name in wanted]


def _sections(chosen: GpuOptions) -> Iterator[Section]:
    """In order of what is wanted first, should time run out. Models are made by the first section that needs them."""
    made = _Made(chosen)

    def pair(temperature: float, batch: int) -> Callable[[], Table]:
        return lambda: made.pairs(temperature, batch)

    yield "copies", made.copies
    yield "the models", made.models
    yield "steps of the target", lambda: made.steps(made.target())
    yield "steps of the draft model", lambda: made.steps(made.draft())
    yield "greedy pairs", pair(0.0, 1)
    yield "drawn pairs", pair(1.0, 1)
    yield "greedy pairs in a batch", pair(0.0, NUM_PROMPTS)
    for name in QUANTISATIONS:
        yield f"steps of the target in {name}", lambda name=name: made.quantised_steps(name)  # type: ignore[misc]
    yield "Transformers", made.transformers


class _Made:
    """Models and numbers, made when they are first wanted."""

    def __init__(self, chosen: GpuOptions) -> None:
        self._chosen = chosen
        self._models: dict[str, Model] = {}

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second of a copy."""
        from forerun.lab.bench.gpu import copy_bandwidth
        from forerun.utils.device import resolve_device

        return copy_bandwidth(resolve_device(self._chosen.device))

    def target(self) -> Model:
        return self._model(BUNDLED_TARGET, self._chosen.parameters)

    def draft(self) -> Model:
        return self._model(BUNDLED_DRAFT, self._chosen.draft_parameters)

    def prompts(self) -> list[list[int]]:
        """Token ids of held-out code."""
        from forerun.models import load_tokenizer
        from forerun.utils.workloads import load

        tokenizer = load_tokenizer(BUNDLED_TARGET)
        texts = [case.prompt for case in load("code") if isinstance(case.prompt, str)][:NUM_PROMPTS]
        return [tokenizer(text)["input_ids"][-PROMPT_TOKENS:] for text in texts]

    def copies(self) -> Table:
        from forerun.kernels.environment import describe_machine, machine_facts
        from forerun.lab.bench.tables import Table

        facts = machine_facts()
        where = facts["accelerator"] if self._chosen.device != "cpu" else "the CPU"
        title = f"What {where} copies, bytes read and written together ({describe_machine(facts)})"
        return Table(title, ["", "rate"], [["copy", f"{self.bandwidth / 1e9:,.0f} GB/s"]])

    def models(self) -> Table:
        """How long it takes to make and to capture them, and whether they are exact."""
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

    def quantised_steps(self, quantize: str) -> Table:
        from forerun.models.loading.load import adopt

        self.free()
        wide = self._wide(BUNDLED_TARGET, self._chosen.parameters)
        return self.steps(adopt(wide, self._chosen.parameters, quantize))

    def transformers(self) -> Table:
        from forerun.lab.bench.gpu import transformers_table

        self.free()
        target = self._wide(BUNDLED_TARGET, self._chosen.parameters)
        draft = self._wide(BUNDLED_DRAFT, self._chosen.draft_parameters)
        return transformers_table(target, draft, self.prompts(), MAX_TOKENS)

    def free(self) -> None:
        """Forget the pair: what comes after it makes models of its own."""
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
        """Of Transformers, on the device."""
        from forerun.lab.bench.widened import make_wide

        return make_wide(source, parameters, DEFAULT_DTYPE, self._chosen.device)
