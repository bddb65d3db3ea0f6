"""`forerun tune`: find the fastest drafter and K for given prompts, and write them as a configuration."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.bench.shared import check_json, whole_numbers
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED
from forerun.cli.options import KEPT, LLMOptions, chosen_model
from forerun.cli.output import TimedProgress, log_memory_plan, note, print_json, terminal_width
from forerun.config import OFF, SamplingParams
from forerun.utils.fields import Checked, option
from forerun.utils.workloads import Case, bundled_workloads, categories_in_turn, load_workload

if TYPE_CHECKING:
    from forerun.engine import LLM
    from forerun.kernels.provenance import Environment, Watch
    from forerun.lab.tune.outcome import TuningOutcome
    from forerun.lab.tune.tuning import Task


@dataclass(frozen=True, slots=True)
class TuneOptions(Checked):
    """How long to tune, on which prompts, and where the answer is written."""

    minutes: float = option(
        3.0, "Time to spend, loading the target apart. Tuning ends earlier if it can.", low=0, above=True
    )
    max_tokens: int = option(128, "Tokens of each answer.", low=2)
    load: str = option("1", "Requests at once, with commas between several levels.", metavar="N,...")
    drafters: str | None = option(
        None,
        "Drafters to try, with commas between them; with semicolons where their options hold commas.",
        metavar="DRAFTER,...",
        default_text="all that fit the target",
    )
    out: Path = option(Path("forerun.toml"), "Where the configuration is written; --config reads it.", metavar="FILE")
    results: Path | None = option(
        None, "Write all trials and figures into this JSON file, for `forerun bench report`.", metavar="FILE"
    )


NUM_PROMPTS = 24
"""Of a bundled workload."""
_RAW, _CHATS = "code", "questions"
"""The bundled workloads that are taken where no prompts are given: raw text, and for a target with a chat template."""
_TYPED = ("minutes", "max_tokens", "load", "drafters", "out", "results")

Prompts = Annotated[
    str | None,
    typer.Option(
        help=f"Your prompts, a bundled workload {options.WORKLOAD_FILE}",
        metavar="FILE",
        show_default=f"{_RAW}, or {_CHATS} for a chat model: give your own",
    ),
]


@with_flags
def tune(
    *,
    model: options.TargetArgument = None,
    prompts: Prompts = None,
    draft: options.DraftName = None,
    settings: Annotated[TuneOptions, Flags(typed=_TYPED)],
    llm: Annotated[LLMOptions, Flags(*KEPT, typed=("device", "quantize"))],
    json: options.Json = False,
) -> None:
    """Find the fastest drafter and K for your prompts, and write them down; or say that none is faster than plain."""
    from forerun.lab.tune.config_file import check_config_path

    check_config_path(settings.out)
    check_json(settings.results, "--results")
    levels = whole_numbers(settings.load, "--load")
    drafters = options.comma_list(settings.drafters, "--drafters") if settings.drafters else []
    cases = None if prompts is None else chosen_cases(prompts)
    model, plain, watch = begin_tuning(model, llm, f", then tuning for {settings.minutes:g} min at most", note)
    if prompts is None or cases is None:
        prompts = _CHATS if is_chat(plain) else _RAW
        note(f"no --prompts given, so these are the bundled workload {prompts!r}; your own tell more")
        cases = chosen_cases(prompts)
    from forerun.lab.tune.tuning import find_fastest

    seconds = 60 * settings.minutes
    params = SamplingParams(temperature=0, max_tokens=settings.max_tokens)
    task = make_task(plain, model, cases, prompts, params, seconds, levels=levels, drafters=drafters, draft=draft)
    with TimedProgress("tuning", task.seconds) as progress:
        outcome = find_fastest(task, progress)
    written = write(outcome, task, settings, llm) if outcome.search.rounds else None
    facts = outcome.results(typed_command(), _target_facts(model, plain), watch.environment(), asdict(settings))
    from forerun.lab.results.files import as_object, save_results

    if settings.results is not None:
        save_results(facts, settings.results)
    if json:
        print_json(as_object(facts))
    else:
        show_outcome(outcome, facts.environment)
        _show_configuration(model, written)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def begin_tuning(
    model: str | None, llm: LLMOptions, work: str, plan_to: Callable[[str], None] | None
) -> tuple[str, LLM, Watch]:
    """Load the target without a drafter. Return its name, the engine, and what watches the machine from now on.

    work: what follows, the end of the line that is noted. plan_to: takes the memory plan; None: nobody.
    """
    from forerun.kernels.provenance import Watch

    name = chosen_model(model, "MODEL")
    options.set_threads(None)
    watch = Watch.begin()
    note(f"loading {name}{work}")
    with log_memory_plan(plan_to):
        return name, open_plain_target(name, llm), watch


def chosen_cases(prompts: str) -> list[Case]:
    """Load the prompts, categories in turn. Raises ConfigError as `load_workload`."""
    cases = load_workload(prompts)
    return categories_in_turn(cases)[: NUM_PROMPTS if prompts in bundled_workloads() else len(cases)]


def open_plain_target(model: str, settings: LLMOptions) -> LLM:
    """Open the target without a drafter. Tests replace this function."""
    from forerun.engine import LLM

    return LLM(model, drafter=None, prefix_reuse=OFF, **kept_options(settings))


def kept_options(settings: LLMOptions) -> dict[str, Any]:
    """Return the options with which the target is loaded."""
    return {name: getattr(settings, name) for name in KEPT}


def is_chat(llm: LLM) -> bool:
    """Return whether the model has a chat template."""
    return bool(getattr(llm.tokenizer, "chat_template", None))


def make_task(
    plain: LLM, model: str, cases: list[Case], prompts: str, params: SamplingParams, seconds: float, **more: Any
) -> Task:
    """Prepare the prompts; more: of `Task`. Raises ConfigError if they are too few or do not fit the context."""
    from forerun.lab.bench.prompts import prepare
    from forerun.lab.tune.tuning import Task, check_requests

    requests = prepare(plain, {prompts: cases}, params.max_tokens)[prompts]
    check_requests(requests, prompts, more.get("levels", [1]))
    return Task(plain, model, requests, prompts, params, seconds, **more)


def write(outcome: TuningOutcome, task: Task, settings: TuneOptions, llm: LLMOptions) -> str:
    """Write the configuration and return its path."""
    from forerun.lab.tune.config_file import write_config

    own = kept_options(LLMOptions())
    changed = {name: value for name, value in kept_options(llm).items() if value != own[name]}
    notes = [outcome.verdict.reason, f"Made by: {typed_command()}", time.strftime("%Y-%m-%d")]
    arm = outcome.verdict.arm
    write_config(settings.out, task.model, arm, changed, chat=is_chat(task.plain), notes=notes)
    return str(settings.out)


def typed_command() -> str:
    """Return the command line, without the folders of files."""
    from forerun.lab.results.files import command_line

    return command_line(sys.argv[1:])


def _target_facts(model: str, plain: LLM) -> Any:
    """Describe the target in the results."""
    from forerun.lab.bench.measure import is_cost_padded
    from forerun.lab.results.files import without_folders
    from forerun.lab.results.schema import TargetFacts
    from forerun.models import number_format

    return TargetFacts(
        without_folders(model),
        number_format(plain.target),
        plain.target.quantize,
        cost_padded=is_cost_padded(model),
        exact=plain.exact,
    )


def show_outcome(outcome: TuningOutcome, environment: Environment) -> None:
    """Print what was measured, and the verdict."""
    from forerun.lab.bench.report.markdown import disturbances
    from forerun.lab.bench.tables import Report

    width = terminal_width()
    typer.echo(Report("tune", outcome.tables()).text(environment, width=width) + "\n")
    for line in disturbances(environment):
        typer.echo(line)
    for name, reason in outcome.left_out.items():
        typer.echo(textwrap.fill(f"Left out: {name}: {reason}", width or 120, subsequent_indent="    "))
    reason = "Interrupted: this is the best so far. " * outcome.interrupted + outcome.verdict.reason
    typer.echo(textwrap.fill(reason, width or 120))


def _show_configuration(model: str, written: str | None) -> None:
    """Print where the configuration was written, and the public drafts of the model."""
    from forerun.lab.tune.public_drafts import public_drafts

    if written is None:
        typer.echo("Interrupted before anything was measured: nothing is written.")
        return
    for each in public_drafts(model):
        typer.echo(f"Public draft, not tried unless named: --drafters {each.text} ({each.licence})")
    typer.echo(f"Written to {written} (* is what it runs). Use it: forerun --config {written} generate PROMPT")
