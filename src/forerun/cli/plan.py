"""`forerun plan`: predict memory, speed and cost of speculation from configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options
from forerun.cli.flags import Flags, with_flags
from forerun.cli.output import note, print_json, size_text
from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET
from forerun.errors import ConfigError
from forerun.lab.plan.options import PlanOptions

if TYPE_CHECKING:
    from forerun.lab.plan.machines import Machine
    from forerun.lab.plan.shapes import ModelShape
    from forerun.lab.plan.sheet import SpeculationPlan
    from forerun.speculation.predictor import ChainAcceptance, CostsByK, Predicted


_HEADER = ("K", "tokens a step", "ms a step", "speed-up", "break-even acceptance")
_SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
SOURCES = {
    "given": "given as step_ms",
    "measured": "steps of these models, measured in the engine on this machine",
    "calibrated": "a roofline, with costs of layers, rows and steps that were measured on this machine",
    "bound": "a bound: the roofline alone. Nothing was measured, and real steps take longer",
}


def lines(made: SpeculationPlan, accept_probs: ChainAcceptance, settings: PlanOptions) -> Iterator[str]:
    """Yield the lines of a plan."""
    from forerun.lab.bench.tables import plain_table

    memory = made.memory
    prediction = made.prediction
    drafter = "n-gram drafts" if made.draft is None else made.draft.name
    yield f"{made.target.name} ({_count(made.target.parameters)}) with {drafter} on {made.machine}"
    yield f"times:      {SOURCES[made.source]}"
    yield f"memory:     {'; '.join(_memory(made))}"
    if memory.available is not None and memory.total > memory.available:
        yield f"            does not fit: {size_text(memory.total)} wanted, {size_text(memory.available)} there"
    of_each = "" if made.batch == 1 else f" of each of {made.batch} sequences"
    least = "at least " if made.source == "bound" else ""
    speed = f"{made.plain_speed:.1f} tokens/s{_money(made, made.plain_speed)}"
    yield f"plain:      {least}{1000 * made.costs.plain:.2f} ms a token{of_each}, {speed}"
    yield f"acceptance: {', '.join(f'{each:g}' for each in accept_probs.per_position)}, each after the tokens before it"
    table = settings.step_ms or _SHOWN
    shown = [each for each in prediction.by_k if each.num_draft_tokens in table or each is prediction.best]
    yield ""
    yield plain_table(_HEADER, list(map(_row, shown)))
    yield ""
    yield _verdict(made)


def _row(each: Predicted) -> list[str]:
    """Return the cells of one K, in the order of _HEADER."""
    edge = "never" if each.break_even is None else f"{each.break_even:.2f}"
    cells = f"{each.num_draft_tokens} {each.tokens:.2f} {1000 * each.seconds:.2f} {each.speedup:.2f}".split()
    return [*cells, edge]


def _verdict(made: SpeculationPlan) -> str:
    """Return the last line: the best K and its speed-up, or that no K is faster than plain decoding."""
    best = made.prediction.best
    edge = made.prediction.break_even
    if best is None:
        from_there = "never" if edge is None else f"from an acceptance of {edge:.2f} on"
        return f"No K is faster than plain decoding here: speculation pays {from_there}."
    speed = made.best_speed
    return (
        f"Best: K={best.num_draft_tokens}, {best.speedup:.2f} times plain decoding, {speed:.1f} tokens/s"
        f"{_money(made, speed)}. It pays from an acceptance of {edge:.2f} on."
    )


def _memory(made: SpeculationPlan) -> Iterator[str]:
    """Yield the memory of target, draft and machine, as far as it is known."""
    memory = made.memory
    cache = "cache unknown" if memory.target_cache is None else f"cache {size_text(memory.target_cache)}"
    yield f"target {size_text(memory.target_weights)} in {made.target.number_format}, {cache}"
    if made.draft is not None and memory.draft_weights is not None:
        beside = "" if memory.draft_cache is None else f", cache {size_text(memory.draft_cache)}"
        weights = f"{size_text(memory.draft_weights)} in {made.draft.number_format}"
        yield f"draft {weights}{beside} ({100 * memory.draft_share:.1f} % more)"
    if memory.available is not None:
        yield f"there are {size_text(memory.available)}"


def _money(made: SpeculationPlan, speed: float) -> str:
    """Return the price of a million tokens at so many tokens per second, or "" without a price per hour."""
    cost = made.per_million(speed)
    return "" if cost is None else f", {cost:.2f} for a million tokens"


def _count(parameters: int) -> str:
    """Return a number of parameters in words, such as "70 B parameters"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit} parameters"
    return f"{parameters:,} parameters"


DEFAULT_ACCEPTANCE = "0.7"

ModelArgument = Annotated[
    str | None,
    options.model_argument(
        "The target: a model whose configuration is read, or a number of parameters, as 70B or "
        "70B:layers=80,kv_heads=8,head_dim=128.",
        BUNDLED_TARGET,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="The draft model or the folder of a draft head, or a number of parameters; 'none' for n-gram drafts.",
        metavar="MODEL",
        show_default="that of auto, else none",
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
        help="Probability that a draft token is accepted if those before it were: one for all positions, or one for "
        "each with commas between them.",
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
    settings: Annotated[PlanOptions, Flags(typed=("precision", "batch", "context", "tensor_parallel"))],
    measure: Measure = False,
    json: options.Json = False,
) -> None:
    """Predict memory, speed and cost of speculation, for models and machines that need not be here."""
    chosen = chosen_machine(machine, bandwidth, flops, memory, measure=measure)
    accept_probs = read_acceptance(acceptance)
    model = model or BUNDLED_TARGET
    draft = draft or found_draft(model)
    if measure:
        check_measured(settings)
    note(f"reading the configuration of {model}")
    from forerun.lab.plan.measured import measured_machine
    from forerun.lab.plan.shapes import model_shape
    from forerun.lab.plan.sheet import make_plan

    target = model_shape(model)
    drafting = draft_shape(draft, measure=measure)
    costs = measured_here(model, draft, settings) if measure else None
    on = chosen or (bare_machine() if measure or settings.step_ms else measured_machine(note))
    made = make_plan(target, drafting, on, accept_probs, settings, costs)
    if json:
        print_json(made.as_object() | {"acceptance": list(accept_probs.per_position)})
        return
    typer.echo("\n".join(lines(made, accept_probs, settings)))


def chosen_machine(
    name: str | None, bandwidth: float | None, flops: float | None, memory: float | None, *, measure: bool
) -> Machine | None:
    """Return the machine that the flags describe; None for this one.

    Raises:
        ConfigError: the flags contradict each other, or the name is not in the table.
    """
    from forerun.lab.plan.machines import HERE, Machine, accelerator

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
    """Raise ConfigError unless the plan is for one sequence on one device, whose steps are not given."""
    if settings.step_ms:
        raise ConfigError("--measure measures steps, and step_ms gives their times. Leave one out.")
    if settings.batch > 1 or settings.tensor_parallel > 1:
        raise ConfigError(
            "--measure measures steps of one sequence on this machine. Leave --batch and --tensor-parallel out; "
            "`forerun bench serve --in-process` measures several sequences."
        )


def read_acceptance(text: str) -> ChainAcceptance:
    """Parse the probabilities of --acceptance. Raises ConfigError unless they are numbers from 0 to 1."""
    from forerun.speculation.predictor import ChainAcceptance

    try:
        return ChainAcceptance(tuple(float(part) for part in text.split(",")))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--acceptance is {text!r}, but must be numbers from 0 to 1 with commas between.") from None


def found_draft(model: str) -> str:
    """Return the draft model that `auto` takes for a target; "none" if it takes none, or a head."""
    if model == BUNDLED_TARGET:
        return BUNDLED_DRAFT
    from forerun.drafters.build import automatic_drafter, build_drafter

    named = build_drafter(automatic_drafter(model))[0].models_to_load(model)
    return next((str(each.name) for each in named if not each.is_head), "none")


def draft_shape(draft: str, *, measure: bool) -> ModelShape | None:
    """Return the shape of the draft model; None for n-gram drafts, and for a drafter that finds its model itself.

    Raises:
        ConfigError: a drafter's name without --measure.
        ModelLoadError: as `model_shape`.
    """
    from forerun.drafters.parse_text import split_spec
    from forerun.drafters.registry import DRAFTERS
    from forerun.lab.plan.shapes import model_shape

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
    """Return this machine with its memory, without measured rates."""
    from forerun.lab.plan.machines import Machine
    from forerun.utils.machine import model, total_memory

    return Machine(model(), total_memory(), lambda _: 1.0, 1.0)


def measured_here(model: str, draft: str, settings: PlanOptions) -> CostsByK:
    """Measure steps of these models on this machine. Tests replace this function."""
    from forerun.lab.plan.measured import measured_steps

    note(f"measuring steps of {model}" + ("" if draft == "none" else f" with {draft}"))
    return measured_steps(model, None if draft == "none" else draft, settings)
