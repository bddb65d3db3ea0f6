"""`forerun bench`: the figures of docs/benchmarks.md, measured here and now."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.bench import tables
from forerun.bench.measure import PADDED_NOTE, Interval, describe, is_cost_padded, machine
from forerun.bench.workloads import load, own_temperatures
from forerun.cli import options
from forerun.cli.demo import DRAFT_MODEL, choose_drafters
from forerun.cli.output import print_json
from forerun.config import AUTO, BUNDLED_DRAFT, BUNDLED_TARGET, DEFAULT_DTYPE, NumDraftTokens
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.generate import AcceptanceRow, MethodRow, OverheadRow
    from forerun.engine import LLM

app = typer.Typer(help="Measure forerun on this machine, beside Hugging Face Transformers.", no_args_is_help=True)


@app.command("forward")
def forward(
    model: Annotated[
        str | None,
        typer.Option(help="A folder or hub id.", show_default="a random Llama of 197 M parameters"),
    ] = None,
    rows: Annotated[str, typer.Option(help="Rows of a forward, with commas between them.")] = "1,5,8",
    dtypes: Annotated[str, typer.Option(help="Number formats, with commas between them.")] = "float32,bfloat16",
    prefix: Annotated[int, typer.Option(help="Cached positions before the new rows.", min=1)] = 256,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=1)] = 20,
    threads: options.Threads = None,
    json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """One target forward of K rows, all logits: Transformers' own module against forerun's paths."""
    counts = whole_numbers(rows, "--rows")
    formats = options.comma_list(dtypes, "--dtypes")
    set_threads(threads)
    from forerun.bench import forward as bench
    from forerun.bench.reference import quieten

    quieten()
    with ExitStack() as stack:
        folder = model or stack.enter_context(bench.RandomLlama())
        results = bench.measure_forward(folder, formats, counts, prefix, rounds, say)
    if json:
        print_json({"prefix": prefix, "rounds": rounds, "results": results, "machine": machine()})
        return
    print_heading(f"One forward after {prefix} cached positions, {rounds} interleaved rounds", markdown)
    print_table(bench.header(counts), [bench.cells(row, counts) for row in results], markdown)
    print_machine()


@app.command("generate")
def generate(
    model: options.ModelName = BUNDLED_TARGET,
    draft: options.DraftName = None,
    drafters: Annotated[
        str | None, typer.Option(help="Drafters, with commas between them.", show_default="all there are")
    ] = None,
    workloads: Annotated[
        str, typer.Option(help="Bundled workloads or JSONL files, with commas between them.")
    ] = "code",
    num_draft_tokens: Annotated[
        str, typer.Option(help="Values of K, with commas between them; 'auto' is one.", metavar="K,K,...")
    ] = AUTO,
    temperatures: Annotated[str, typer.Option(help="With commas between them; a workload may have its own.")] = "0",
    prompts: Annotated[int, typer.Option(help="Prompts of each workload, from the first.", min=1)] = 10,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds per prompt.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.", min=2)] = 128,
    dtype: options.DType = DEFAULT_DTYPE,
    reference: Annotated[bool, typer.Option(help="Measure Transformers' generate as well (greedy only).")] = True,
    assisted: Annotated[
        str, typer.Option(help="Values of K for Transformers' assisted generation.", metavar="K,K,...")
    ] = "2,4,6,8",
    details: Annotated[bool, typer.Option(help="Measure overhead and acceptance as well.")] = True,
    threads: options.Threads = None,
    json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Whole generations, batch 1: forerun's methods against Transformers', overhead, and acceptance."""
    cases = {name: load(name, prompts) for name in options.comma_list(workloads, "--workloads")}
    counts = draft_counts(num_draft_tokens)
    heats = non_negative(temperatures, "--temperatures")
    assisted_counts = whole_numbers(assisted, "--assisted")
    chosen = choose_drafters(model, draft, drafters)
    set_threads(threads)
    from forerun.bench import generate as bench
    from forerun.bench.reference import Reference, quieten

    quieten()
    say(f"loading {model}")
    own, acceptance = open_engines(model, chosen, counts, dtype)
    assistant = (draft or BUNDLED_DRAFT) if DRAFT_MODEL in chosen else None
    hf = Reference(model, dtype) if reference else None
    hf_draft = Reference(assistant, dtype) if reference and assistant else None
    encode = own[bench.PLAIN].tokenizer.encode
    measured: dict[str, list[MethodRow]] = {}
    for workload, own_cases in cases.items():
        for heat in own_temperatures(own_cases) or heats:
            label = f"{workload}, {'greedy' if heat == 0 else f'temperature {heat:g}'}"
            say(f"measuring {label}")
            runs = bench.measure_methods(own, hf, hf_draft, assisted_counts, own_cases, max_tokens, rounds, say, heat)
            measured[label] = bench.reduce_methods(runs)
    overhead: list[OverheadRow] = []
    accepted: list[AcceptanceRow] = []
    if details:
        say("measuring overhead")
        every = [encode(case.prompt) for own_cases in cases.values() for case in own_cases]
        overhead = bench.measure_overhead(own, every, max_tokens)
        say("measuring acceptance")
        accepted = bench.measure_acceptance(acceptance, cases, max_tokens)
    if json:
        facts = {"model": model, "cost_padded": is_cost_padded(model), "dtype": dtype, "machine": machine()}
        print_json({**facts, "methods": measured, "overhead": overhead, "acceptance": accepted})
        return
    print_note(model)
    for label, rows in measured.items():
        print_heading(
            f"{model}, {dtype}, {label}, {prompts} prompts of {max_tokens} tokens, rounds: {rounds}", markdown
        )
        print_table(METHODS, [method_cells(row) for row in rows], markdown)
    if details:
        print_heading("Time per step in ms", markdown)
        print_table(OVERHEAD, [overhead_cells(row) for row in overhead], markdown)
        print_heading("Acceptance", markdown)
        print_table(ACCEPTANCE, [acceptance_cells(row) for row in accepted], markdown)
    print_machine()


def open_engines(
    model: str, drafters: dict[str, str], counts: Sequence[NumDraftTokens], dtype: str
) -> tuple[dict[str, LLM], dict[tuple[str, int], LLM]]:
    """Engines over one target: by method name for speed, by drafter and its usual K for acceptance."""
    from forerun.bench import generate as bench
    from forerun.engine import LLM

    plain = LLM(model, drafter=None, dtype=dtype)
    own: dict[str, LLM] = {bench.PLAIN: plain}
    acceptance: dict[tuple[str, int], LLM] = {}
    for name, spec in drafters.items():
        for k in counts:
            own[bench.own_name(name, k)] = bench.beside(plain, spec, k)
        usual = bench.usual_num_draft_tokens(spec)
        acceptance[name, usual] = own.get(bench.own_name(name, usual)) or bench.beside(plain, spec, usual)
    return own, acceptance


def draft_counts(text: str) -> list[NumDraftTokens]:
    """The values of K of a comma-separated flag; "auto" may be one of them.

    Raises:
        ConfigError: an entry is neither a whole number of 1 or more nor "auto".
    """
    entries = options.comma_list(text, "--num-draft-tokens")
    numbers = [entry for entry in entries if entry != AUTO]
    if not all(entry.isdecimal() and int(entry) > 0 for entry in numbers):
        raise ConfigError(
            f"--num-draft-tokens is {text!r}, but must be whole numbers of 1 or more, or {AUTO!r}, with commas between."
        )
    return [AUTO if entry == AUTO else int(entry) for entry in entries]


def non_negative(text: str, what: str) -> list[float]:
    """The numbers of a comma-separated flag.

    Raises:
        ConfigError: an entry is not a number of 0 or more.
    """
    try:
        numbers = [float(entry) for entry in options.comma_list(text, what)]
    except ValueError:
        numbers = [-1.0]
    if min(numbers) < 0:
        raise ConfigError(f"{what} is {text!r}, but must be numbers of 0 or more with commas between them.")
    return numbers


def whole_numbers(text: str, what: str) -> list[int]:
    """The numbers of a comma-separated flag.

    Raises:
        ConfigError: an entry is not a whole number of 1 or more.
    """
    entries = options.comma_list(text, what)
    if not all(entry.isdecimal() and int(entry) > 0 for entry in entries):
        raise ConfigError(f"{what} is {text!r}, but must be whole numbers of 1 or more with commas between them.")
    return [int(entry) for entry in entries]


def set_threads(threads: int | None) -> None:
    """Of torch, for all methods alike."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def say(text: str) -> None:
    """Progress, on standard error."""
    typer.echo(f"forerun bench: {text}", err=True)


METHODS = [
    "method",
    "tokens/s",
    "over forerun plain",
    "over transformers plain",
    "over best assisted",
    "mean acceptance length",
    "acceptance rate",
    "same text",
]
OVERHEAD = ["method", "step", "target", "draft", "engine", "engine share"]
ACCEPTANCE = ["workload, drafter", "K", "temperature", "acceptance rate", "mean acceptance length"]


def method_cells(row: MethodRow) -> list[str]:
    """One line of the table of methods."""

    def times(interval: Interval | None) -> str:
        return "–" if interval is None else f"{interval:.2f}"

    length = "–" if row.mean_acceptance_length is None else f"{row.mean_acceptance_length:.2f}"
    return [
        row.method,
        f"{row.tokens_per_second.median:.1f}",
        times(row.over_plain),
        times(row.over_transformers),
        times(row.over_assisted),
        length,
        tables.percent(row.acceptance_rate),
        tables.percent(row.same_text),
    ]


def overhead_cells(row: OverheadRow) -> list[str]:
    """One line of the table of overhead."""
    parts = [f"{part:.2f}" for part in (row.step, row.target, row.draft, row.engine)]
    return [row.method, *parts, tables.percent(row.engine / row.step)]


def acceptance_cells(row: AcceptanceRow) -> list[str]:
    """One line of the table of acceptance."""
    rate, length = f"{row.acceptance_rate:.3f}", f"{row.mean_acceptance_length:.2f}"
    return [f"{row.workload}, {row.drafter}", str(row.num_draft_tokens), f"{row.temperature:g}", rate, length]


def print_heading(text: str, markdown: bool) -> None:
    """A title over a table."""
    typer.echo(f"\n### {text}\n" if markdown else f"\n{text}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> None:
    """A table, in plain text or in Markdown."""
    typer.echo((tables.markdown if markdown else tables.plain)(header, rows))


def print_note(model: str) -> None:
    """What a reader of the figures must know about the model."""
    if is_cost_padded(model):
        typer.echo(f"\n{PADDED_NOTE}")


def print_machine() -> None:
    """What the figures were measured on."""
    typer.echo(f"\n{describe(machine())}")
