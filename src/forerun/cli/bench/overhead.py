"""`forerun bench overhead`: the time that drafters without a model add to a step in a long context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from forerun.bench.report import Report, Table
from forerun.cli import options
from forerun.cli.bench.shared import JsonFile, begin, print_report, say
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions
from forerun.fields import option


@dataclass(frozen=True, slots=True)
class OverheadOptions:
    """Which drafters are timed, and in what context."""

    drafters: str | None = option(
        None, "Drafters, with commas between them.", default_text="all that run no model of their own"
    )
    context: int = option(8000, "Tokens in the sequence.", low=512)
    budget: int = option(16, "Nodes of a draft.", low=1)
    steps: int = option(300, "Drafts to time.", low=10)
    index: str | None = option(None, "Index for rest.", default_text="the bundled one")


@with_flags
def overhead(
    *,
    timed: Annotated[OverheadOptions, Flags()],
    llm: Annotated[LLMOptions, Flags("dtype", "quantize")],
    threads: options.Threads = None,
    json: JsonFile = None,
    markdown: options.Markdown = False,
) -> None:
    """Drafting without a model, beside one forward of a random Llama of 197 M parameters at the same context."""
    wanted = options.comma_list(timed.drafters, "--drafters") if timed.drafters else []
    watch = begin(threads, json)
    from forerun.bench import overhead as bench

    context, steps = timed.context, timed.steps
    say(f"timing a forward after {context} positions")
    forward = bench.forward_seconds(context, llm.dtype, llm.quantize)
    length = context + bench.TOKENS_PER_STEP * steps
    drafters, text = bench.bundled_drafters(wanted, timed.index, llm.dtype, length)
    results = bench.measure(drafters, text, context, timed.budget, steps, forward, say)
    settings = {"context": context, "dtype": llm.dtype, "quantize": llm.quantize, "budget": timed.budget}
    details = {"forward": forward, "results": results}
    title = f"After {context} tokens; the forward takes {1e3 * forward:.1f} ms"
    table = Table.of(title, bench.COLUMNS, results)
    print_report(Report("overhead", [table], settings=settings, details=details), watch, json, markdown)
