"""`forerun bench`: the figures of docs/benchmarks.md, measured here and now."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.bench import tables
from forerun.bench.measure import PADDED_NOTE, Interval, describe, is_cost_padded, machine
from forerun.bench.workloads import load
from forerun.cli import options
from forerun.cli.demo import DRAFT_MODEL, choose_drafters
from forerun.cli.output import print_json
from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET, DEFAULT_DTYPE, DEFAULT_NUM_DRAFT_TOKENS
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.generate import AcceptanceRow, MethodRow, OverheadRow
    from forerun.engine import LLM

app = typer.Typer(help="Measure forerun on this machine, beside Hugging Face Transformers.", no_args_is_help=True)

Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")]
Threads = Annotated[int | None, typer.Option(help="Threads of torch.", min=1, show_default="torch's own choice")]


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
    threads: Threads = None,
    json: options.Json = False,
    markdown: Markdown = False,
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
        str, typer.Option(help="Values of K for models that draft, with commas between them.", metavar="K,K,...")
    ] = "2,4,6,8",
    prompts: Annotated[int, typer.Option(help="Prompts of each workload, from the first.", min=1)] = 10,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds per prompt.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.", min=2)] = 128,
    dtype: options.DType = DEFAULT_DTYPE,
    reference: Annotated[bool, typer.Option(help="Measure Transformers' generate as well.")] = True,
    threads: Threads = None,
    json: options.Json = False,
    markdown: Markdown = False,
) -> None:
    """Whole greedy generations, batch 1: forerun's methods against Transformers', overhead, and acceptance."""
    cases = {name: load(name, prompts) for name in options.comma_list(workloads, "--workloads")}
    counts = whole_numbers(num_draft_tokens, "--num-draft-tokens")
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
    tokenizer = own[bench.PLAIN].tokenizer
    prompt_ids = [tokenizer.encode(case.prompt) for own_cases in cases.values() for case in own_cases]
    runs = bench.measure_methods(own, hf, hf_draft, counts, prompt_ids, max_tokens, rounds, say)
    say("measuring overhead")
    overhead = bench.measure_overhead(own, prompt_ids, max_tokens)
    say("measuring acceptance")
    accepted = bench.measure_acceptance(acceptance, cases, max_tokens)
    methods = bench.reduce_methods(runs)
    if json:
        facts = {"model": model, "cost_padded": is_cost_padded(model), "dtype": dtype, "machine": machine()}
        print_json({**facts, "methods": methods, "overhead": overhead, "acceptance": accepted})
        return
    count = len(prompt_ids)
    print_note(model)
    print_heading(f"{model}, {dtype}, greedy, {count} prompts of {max_tokens} tokens, rounds: {rounds}", markdown)
    print_table(METHODS, [method_cells(row) for row in methods], markdown)
    print_heading("Time per step in ms", markdown)
    print_table(OVERHEAD, [overhead_cells(row) for row in overhead], markdown)
    print_heading("Acceptance", markdown)
    print_table(ACCEPTANCE, [acceptance_cells(row) for row in accepted], markdown)
    print_machine()


def open_engines(
    model: str, drafters: dict[str, str], counts: Sequence[int], dtype: str
) -> tuple[dict[str, LLM], dict[tuple[str, int], LLM]]:
    """Engines over one target: by method name for speed, by drafter and K for acceptance.

    A draft model is timed at every K, other drafters at the default K; acceptance is measured at the default K.
    """
    from forerun.bench import generate as bench
    from forerun.drafters import DRAFTERS
    from forerun.engine import LLM

    plain = LLM(model, drafter=None, dtype=dtype)
    own, acceptance = {bench.PLAIN: plain}, {}
    default = DEFAULT_NUM_DRAFT_TOKENS
    for name, spec in drafters.items():
        for k in counts if DRAFTERS[name].kind == "model" else [default]:
            own[bench.own_name(name, k)] = bench.beside(plain, spec, k)
        at_default = own.get(bench.own_name(name, default))
        acceptance[name, default] = at_default or bench.beside(plain, spec, default)
    return own, acceptance


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
