"""`forerun bench acceptance`: how much of their drafts the target accepts, by category; nothing is timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from forerun.bench.report import Report, Table
from forerun.cli import options
from forerun.cli.bench.shared import Compared, draft_counts, non_negative, print_report, say, set_threads
from forerun.cli.default_model import chosen_model
from forerun.cli.demo import choose_drafters
from forerun.cli.flags import Flags, with_flags
from forerun.cli.memory_line import memory_told
from forerun.cli.options import LLMOptions
from forerun.config import AUTO, OFF
from forerun.errors import ConfigError
from forerun.fields import option

MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """What is drafted, and how the target samples."""

    num_draft_tokens: str = option("4", "Values of K, with commas between them.", metavar="K,...")
    temperatures: str = option("0", "With commas between them.", metavar="FLOAT,...")
    ignore_eos: bool = option(False, "Go on past the end of text, as `bench generate` does.")
    max_batch: int = option(8, "Prompts at once.", low=1)


@with_flags
def acceptance(
    *,
    model: options.ModelName = None,
    draft: options.DraftName = None,
    compared: Annotated[Compared, Flags(base=Compared(prompts="questions", max_tokens=MAX_TOKENS))],
    settings: Annotated[AcceptanceOptions, Flags()],
    llm: Annotated[LLMOptions, Flags("dtype", "quantize", "adapter")],
    threads: options.Threads = None,
    json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Acceptance of drafts of K tokens by category and position, many prompts at once: for machines that are busy."""
    cases, counts = compared.cases(), draft_counts(settings.num_draft_tokens)
    if AUTO in counts:
        raise ConfigError("--num-draft-tokens is 'auto', but what is accepted of K tokens is measured. Give numbers.")
    heats = non_negative(settings.temperatures, "--temperatures")
    model = chosen_model(model)
    chosen = choose_drafters(model, draft, compared.drafters)
    set_threads(threads)
    from forerun.bench import acceptance_rate
    from forerun.bench.prompts import prepare
    from forerun.engine import LLM

    say(f"loading {model}")
    with memory_told(say):
        plain = LLM(model, drafter=None, dtype=llm.dtype, adapter=llm.adapter, quantize=llm.quantize, prefix_reuse=OFF)
    prompts = prepare(plain, cases, compared.max_tokens)
    rows = []
    for name, spec in chosen.items():
        for k in counts:
            assert isinstance(k, int)
            say(f"{name}, K={k}")
            engine = LLM(
                plain.target,
                drafter=spec,
                num_draft_tokens=k,
                tokenizer=plain.tokenizer,
                seed=0,
                max_batch=settings.max_batch,
                prefix_reuse=OFF,
            )
            rows += acceptance_rate.measure(
                {(name, k): engine},
                prompts,
                compared.max_tokens,
                heats,
                by_category=True,
                ignore_eos=settings.ignore_eos,
            )
    facts = {"model": model, "quantize": plain.target.quantize, "max_tokens": compared.max_tokens, "results": rows}
    tables = [
        Table.of(
            f"{model}, {name}: acceptance, answers of up to {compared.max_tokens} tokens",
            acceptance_rate.BY_CATEGORY,
            [row for row in rows if row.workload == name],
        )
        for name in prompts
    ]
    print_report(Report(facts, tables, model), json, markdown)
