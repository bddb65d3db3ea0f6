"""`forerun plan`: what speculation would gain, before anything is downloaded or trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options
from forerun.cli.flags import Flags, with_flags
from forerun.cli.memory_line import note
from forerun.cli.output import print_json
from forerun.cli.plan_lines import lines
from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET
from forerun.errors import ConfigError
from forerun.plan.options import PlanOptions

if TYPE_CHECKING:
    from forerun.plan.machines import Machine
    from forerun.plan.predictor import ChainAcceptance, StepCosts
    from forerun.plan.shapes import ModelShape

DEFAULT_ACCEPTANCE = "0.7"

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="The target: a model whose configuration is read, or a number of parameters, as 70B or "
        "70B:layers=80,kv_heads=8,head_dim=128.",
        show_default=BUNDLED_TARGET,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="The draft model or the folder of a draft head, or a number of parameters; 'none' for drafts that are "
        "looked up.",
        metavar="MODEL",
        show_default="the bundled draft for the bundled target, else none",
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        help="'here', which is measured, or an accelerator of the table: h100, a100-80gb, l4, rtx4090, ...",
        metavar="NAME",
        show_default="here, or that of --bandwidth and --flops",
    ),
]
Bandwidth = Annotated[float | None, typer.Option(help="Of the machine's memory, in GB/s.", min=0.001, metavar="FLOAT")]
Flops = Annotated[
    float | None, typer.Option(help="Of the machine, dense and in 16 bits, in TFLOP/s.", min=0.000001, metavar="FLOAT")
]
MemorySize = Annotated[float | None, typer.Option(help="Of the machine, in GB.", min=0.001, metavar="FLOAT")]
Acceptance = Annotated[
    str,
    typer.Option(
        help="Chance that a draft token is accepted if those before it were: one for all positions, or one for each "
        "with commas between them.",
        metavar="A,...",
    ),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Load target and draft here, and measure their steps in the engine.")
]


@with_flags
def plan(
    *,
    model: ModelArgument = None,
    draft: Draft = None,
    machine: MachineName = None,
    bandwidth: Bandwidth = None,
    flops: Flops = None,
    memory: MemorySize = None,
    acceptance: Acceptance = DEFAULT_ACCEPTANCE,
    settings: Annotated[PlanOptions, Flags()],
    measure: Measure = False,
    json: options.Json = False,
) -> None:
    """Predict memory, speed and cost of speculation, for models and machines that need not be here."""
    wanted = chosen_machine(machine, bandwidth, flops, memory, measure=measure)
    chances = read_acceptance(acceptance)
    model = model or BUNDLED_TARGET
    draft = draft or (BUNDLED_DRAFT if model == BUNDLED_TARGET else "none")
    if measure:
        check_measured(settings)
    note(f"reading the configuration of {model}")
    from forerun.plan.here import measured_machine
    from forerun.plan.shapes import model_shape
    from forerun.plan.sheet import make_plan

    target = model_shape(model)
    drafting = draft_shape(draft, measure=measure)
    costs = measured_costs(model, draft, settings) if measure else None
    place = wanted if wanted is not None else bare_machine() if measure else measured_machine(note)
    made = make_plan(target, drafting, place, chances, settings, costs)
    if json:
        print_json(made.as_object() | {"acceptance": list(chances.per_position)})
        return
    for line in lines(made, chances):
        typer.echo(line)


def chosen_machine(
    name: str | None, bandwidth: float | None, flops: float | None, memory: float | None, *, measure: bool
) -> Machine | None:
    """The machine that was asked for; None: this one.

    Raises:
        ConfigError: the flags contradict each other, or the name is not in the table.
    """
    from forerun.plan.machines import HERE, Machine, accelerator

    if bandwidth is None and flops is None:
        if memory is not None:
            raise ConfigError("--memory goes with --bandwidth and --flops. Give these too, or leave it out.")
        found = None if name in (None, HERE) else accelerator(str(name))
    elif name is not None or bandwidth is None or flops is None:
        raise ConfigError(
            "--bandwidth and --flops describe a machine together, in place of --machine. Give both of them, or a name."
        )
    else:
        found = Machine.of(f"{bandwidth:g} GB/s, {flops:g} TFLOP/s", memory, bandwidth, flops)
    if measure and found is not None:
        raise ConfigError("--measure measures the models on this machine, and another one is given. Leave one out.")
    return found


def check_measured(settings: PlanOptions) -> None:
    """Raise ConfigError where something else than this machine's steps of one sequence is asked for."""
    if settings.batch > 1 or settings.tensor_parallel > 1:
        raise ConfigError(
            "--measure measures steps of one sequence on this machine. Leave --batch and --tensor-parallel out; "
            "`forerun bench serve --in-process` measures several sequences."
        )


def read_acceptance(text: str) -> ChainAcceptance:
    """The chances of --acceptance. Raises ConfigError where they are not numbers from 0 to 1."""
    from forerun.plan.predictor import ChainAcceptance

    try:
        return ChainAcceptance(tuple(float(part) for part in text.split(",")))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--acceptance is {text!r}, but must be numbers from 0 to 1 with commas between.") from None


def draft_shape(draft: str, *, measure: bool) -> ModelShape | None:
    """The draft's shape; None for drafts that are looked up, or of a drafter that finds its model by itself.

    Raises:
        ConfigError: a drafter's name, where nothing is measured.
        ModelLoadError: as `model_shape`.
    """
    from forerun.drafters.parse_text import split_spec
    from forerun.drafters.table import DRAFTERS
    from forerun.plan.shapes import model_shape

    if draft == "none":
        return None
    if draft.partition(":")[0] not in DRAFTERS:
        return model_shape(draft)
    if not measure:
        raise ConfigError(
            f"--draft is {draft!r}, a drafter, whose steps can only be measured. Add --measure, or give its model: a "
            "name, a folder or a number of parameters."
        )
    model = split_spec(draft)[1].get("model")
    return None if model is None else model_shape(model)


def bare_machine() -> Machine:
    """This machine, of which nothing but its memory is asked."""
    from forerun import processor
    from forerun.machine_memory import total_memory
    from forerun.plan.machines import Machine

    return Machine(processor.model(), total_memory(), lambda _: 1.0, 1.0)


def measured_costs(model: str, draft: str, settings: PlanOptions) -> StepCosts:
    """The steps of these models here; the seam that tests replace."""
    from forerun.plan.measured import measured_steps

    note(f"measuring steps of {model}" + ("" if draft == "none" else f" with {draft}"))
    return measured_steps(model, None if draft == "none" else draft, settings)
