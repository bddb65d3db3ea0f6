"""`forerun bench overhead`: what drafters that run no model cost a step in a long context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forerun.bench.measure import machine
from forerun.bench.workloads import load, names
from forerun.cli import options
from forerun.cli.bench import print_heading, print_machine, print_table, say, set_threads
from forerun.cli.output import print_json
from forerun.config import BUNDLED_TARGET, DEFAULT_DTYPE

if TYPE_CHECKING:
    from forerun.bench.upkeep import UpkeepRow

HEADER = ["drafter", "step in ms", "99 %", "prompt in ms", "nodes", "memory in MB", "share of a forward"]


def overhead(
    drafters: Annotated[
        str | None,
        typer.Option(help="Drafters, with commas between them.", show_default="all that run no model of their own"),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens in the sequence.", min=512)] = 8000,
    budget: Annotated[int, typer.Option(help="Nodes of a draft.", min=1)] = 16,
    steps: Annotated[int, typer.Option(help="Drafts to time.", min=10)] = 300,
    index: Annotated[str | None, typer.Option(help="Index for rest.", show_default="the bundled one")] = None,
    dtype: options.DType = DEFAULT_DTYPE,
    threads: options.Threads = None,
    json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Drafting without a model, beside one forward of a random Llama of 197 M parameters at the same context."""
    set_threads(threads)
    from forerun.bench.forward import RandomLlama
    from forerun.bench.step_costs import target_costs
    from forerun.bench.upkeep import long_text, measure_upkeep
    from forerun.drafters import Binding, make_drafter
    from forerun.models import load_model, load_tokenizer

    wanted = options.comma_list(drafters, "--drafters") if drafters else _without_model()
    with RandomLlama(context + 256) as folder:
        say(f"timing a forward after {context} positions")
        forward = target_costs(load_model(folder, dtype), context, 10, rows=(1,))(1)
    target, tokenizer = load_model(BUNDLED_TARGET, dtype), load_tokenizer(BUNDLED_TARGET)
    pieces = [case.prompt + case.reference for name in names() for case in load(name)]
    text = long_text(tokenizer.encode, pieces, context + 20 * steps)
    rows = []
    for name in wanted:
        say(f"timing {name}")
        spec = f"{name}:index={index}" if index and name == "rest" else name
        drafter, _ = make_drafter(spec, Binding(target, tokenizer, 0))
        rows.append(measure_upkeep(name, drafter, text, context, budget, steps, forward))
    if json:
        print_json({"context": context, "forward": forward, "machine": machine(), "results": rows})
        return
    print_heading(f"After {context} tokens; the forward takes {1e3 * forward:.1f} ms", markdown)
    print_table(HEADER, [cells(row) for row in rows], markdown)
    print_machine()


def _without_model() -> list[str]:
    from forerun.drafters import DRAFTERS

    return [name for name, row in DRAFTERS.items() if row.kind != "model"]


def cells(row: UpkeepRow) -> list[str]:
    """One line of the table."""
    return [
        row.drafter,
        f"{row.step:.3f}",
        f"{row.slowest:.3f}",
        f"{row.prompt:.1f}",
        f"{row.nodes:.1f}",
        f"{row.nbytes / 1e6:.1f}",
        f"{100 * row.share:.2f} %",
    ]
