"""`forerun bench gpu`: what the device can copy, steps, pairs and equality, with models made there and never saved."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.bench.shared import say
from forerun.cli.flags import Flags, with_flags
from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET, QUANTISATIONS
from forerun.fields import option

if TYPE_CHECKING:
    from forerun.bench.report import Table
    from forerun.models import Model

Section = tuple[str, "Callable[[], Table]"]


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What is measured, and on what."""

    device: str = option("cuda", "Where models compute.", metavar="DEVICE")
    dtype: str = option("bfloat16", "Number format of the weights.", metavar="DTYPE")
    parameters: str = option("8B", "Size of the target, which gives the bundled one's text.", metavar="SIZE")
    draft_parameters: str = option("800M", "Size of the draft model.", metavar="SIZE")
    num_prompts: int = option(4, "Prompts of held-out code.", low=1)
    prompt_tokens: int = option(200, "Tokens of each, its last ones.", low=2)
    max_tokens: int = option(64, "Tokens generated per prompt.", low=2)
    context: int = option(512, "Positions before the forwards that are timed.", low=1)


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
    for name, section in _sections(chosen):
        say(name)
        start = time.perf_counter()
        try:
            table = section()
        except Exception as error:  # whatever it is: the sections after it are wanted all the same
            failed.append(name)
            typer.echo(f"\n### {name}\n\nfailed: {type(error).__name__}: {error}")
            continue
        from forerun.bench.report import markdown_table

        elapsed = time.perf_counter() - start
        typer.echo(f"\n### {table.title}\n\n{markdown_table(table.header, table.rows)}\n\n({elapsed:.0f} s)")
    if failed:
        say(f"failed: {', '.join(failed)}")
        raise typer.Exit(1)


def _sections(chosen: GpuOptions) -> Iterator[Section]:
    """In order of what is wanted first, should time run out. Models are made by the first section that needs them."""
    from forerun.bench.gpu import pairs, steps

    made = _Made(chosen)
    context, tokens = chosen.context, chosen.max_tokens

    def pair(temperature: float, batch: int) -> Callable[[], Table]:
        return lambda: pairs.speed_table(made.target(), made.draft(), made.prompts(), tokens, temperature, batch)

    yield "copies", made.copies
    yield "the models", made.models
    yield "steps of the target", lambda: steps.step_times(made.target(), made.bandwidth(), context)
    yield "one row", lambda: steps.one_row_table(made.target(), context)
    yield "steps of the draft model", lambda: steps.step_times(made.draft(), made.bandwidth(), context)
    yield "greedy pairs", pair(0.0, 1)
    yield "drawn pairs", pair(1.0, 1)
    yield "greedy pairs in a batch", pair(0.0, chosen.num_prompts)
    made.free()
    for name in QUANTISATIONS:
        yield f"steps of the target in {name}", lambda name=name: made.quantised_steps(name)  # type: ignore[misc]
    yield "Transformers", made.transformers


class _Made:
    """Models and numbers, made when they are first wanted."""

    def __init__(self, chosen: GpuOptions) -> None:
        self._chosen = chosen
        self._models: dict[str, Model] = {}
        self._bandwidth = 0.0

    def bandwidth(self) -> float:
        """Bytes a second of a copy."""
        from forerun.bench.gpu.device_time import copy_bandwidth
        from forerun.device import resolve_device

        self._bandwidth = self._bandwidth or copy_bandwidth(resolve_device(self._chosen.device))
        return self._bandwidth

    def target(self) -> Model:
        return self._model(BUNDLED_TARGET, self._chosen.parameters)

    def draft(self) -> Model:
        return self._model(BUNDLED_DRAFT, self._chosen.draft_parameters)

    def prompts(self) -> list[list[int]]:
        """Token ids of held-out code."""
        from forerun.models import load_tokenizer
        from forerun.workloads import load

        tokenizer = load_tokenizer(BUNDLED_TARGET)
        texts = [case.prompt for case in load("code") if isinstance(case.prompt, str)][: self._chosen.num_prompts]
        return [tokenizer(text)["input_ids"][-self._chosen.prompt_tokens :] for text in texts]

    def copies(self) -> Table:
        from forerun.bench.report import Table
        from forerun.results.machine import describe, machine

        rate = f"{self.bandwidth() / 1e9:,.0f} GB/s"
        facts = machine()
        where = facts["accelerator"] if self._chosen.device != "cpu" else "the CPU"
        title = f"What {where} copies, bytes read and written together ({describe(facts)})"
        return Table(title, ["", "rate"], [["copy", rate]])

    def models(self) -> Table:
        """How long it takes to make and to capture them, and whether they are exact."""
        from forerun.bench.report import Table

        rows = []
        for make in (self.target, self.draft):
            start = time.perf_counter()
            model = make()
            elapsed = f"{time.perf_counter() - start:.1f}"
            verdict = "yes" if model.exactness.exact else f"no: {model.exactness.reason}"
            rows.append([model.name, f"{model.num_parameters:,}", elapsed, model.kernels, verdict])
        return Table("Models", ["model", "parameters", "s to make, capture and try", "kernels", "exact"], rows)

    def quantised_steps(self, quantize: str) -> Table:
        from forerun.bench.gpu import steps
        from forerun.models.loading import adopt

        model = adopt(self._wide(BUNDLED_TARGET, self._chosen.parameters), self._chosen.parameters, quantize)
        return steps.step_times(model, self.bandwidth(), self._chosen.context)

    def transformers(self) -> Table:
        from forerun.bench.gpu import pairs

        target = self._wide(BUNDLED_TARGET, self._chosen.parameters)
        draft = self._wide(BUNDLED_DRAFT, self._chosen.draft_parameters)
        return pairs.transformers_table(target, draft, self.prompts(), self._chosen.max_tokens)

    def free(self) -> None:
        """Forget the pair: what comes after it makes models of its own."""
        self._models.clear()
        gc.collect()  # engines and drafters hold each other

    def _model(self, source: str, parameters: str) -> Model:
        from forerun.models.loading import adopt

        if source not in self._models:
            self._models[source] = adopt(self._wide(source, parameters), f"{source} at {parameters}")
        return self._models[source]

    def _wide(self, source: str, parameters: str) -> Any:
        """Of Transformers, on the device."""
        from forerun.train.widened import make_wide

        return make_wide(source, parameters, self._chosen.dtype, self._chosen.device)
