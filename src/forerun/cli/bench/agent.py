"""`forerun bench agent`: a coding agent's conversation, turn by turn, and after a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options
from forerun.cli.bench.shared import CompareOptions, JsonFile, begin, open_plain, print_report, say
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions, choose_drafters, chosen_model
from forerun.config import AUTO
from forerun.lab.bench.tables import Report, Table
from forerun.lab.results.files import without_folders

if TYPE_CHECKING:
    from forerun.engine import LLM
    from forerun.lab.bench.prompts import BenchPrompt


SecondDay = Annotated[
    bool,
    typer.Option(
        "--second-day", help="Measure a second day on the same files instead: drafters with and without --remember."
    ),
]


@with_flags
def agent(
    *,
    model: options.TargetArgument = None,
    compared: Annotated[
        CompareOptions, Flags("drafters", "max_tokens", base=CompareOptions(drafters=AUTO, max_tokens=32))
    ],
    threads: options.Threads = None,
    second_day: SecondDay = False,
    json: JsonFile = None,
) -> None:
    """Replay a coding agent: the first token by turn, cache hits, drafters, restarts with and without the disk."""
    model = chosen_model(model)
    chosen = {without_folders(name): spec for name, spec in choose_drafters(model, None, compared.drafters).items()}
    watch = begin(threads, json)
    from forerun.lab.bench import agent as bench
    from forerun.lab.bench.recorded import drafter_facts, prompt_facts, target_facts

    if second_day:
        bench.check_second_day(chosen, model)
    plain = open_plain(model, LLMOptions(), prefix_reuse="on")
    most = compared.max_tokens
    prompts = bench.encode_turns(plain, bench.conversation(), most)
    name = f"{without_folders(model)}, answers up to {most} tokens"
    if second_day:
        next_day = bench.encode_turns(plain, bench.conversation(task=bench.NEXT_TASK), most)
        with TemporaryDirectory(prefix="forerun-") as folder:
            days = bench.measure_second_day(plain, chosen, prompts, next_day, most, Path(folder), say)
        tables = [Table.of(f"{name}: the second day on the same files", bench.DAY_COLUMNS, days)]
    else:
        tables = _one_day(plain, chosen, prompts, most, name)
    report = Report(
        "agent",
        tables,
        target_facts(model, plain.target),
        drafter_facts(chosen, [AUTO]),
        {"max_tokens": most},
        prompt_facts("agent", prompts),
    )
    print_report(report, watch, json)


def _one_day(
    plain: LLM, chosen: Mapping[str, str], prompts: Sequence[BenchPrompt], most: int, name: str
) -> list[Table]:
    """Return the tables of one day, and of restarts."""
    from forerun.lab.bench import agent as bench

    with TemporaryDirectory(prefix="forerun-") as folder:
        turns, drafters, restarts = bench.measure_agent(plain, chosen, prompts, most, Path(folder), say)
    return [
        Table.of(f"{name}: {next(iter(chosen))}, turn by turn", bench.TURN_COLUMNS, turns),
        Table.of(f"{name}: all turns", bench.DRAFTER_COLUMNS, drafters),
        Table.of(f"{name}: after a restart", bench.RESTART_COLUMNS, restarts),
    ]
