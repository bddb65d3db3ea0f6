"""`forerun bench quality`: measure the loss of quality by a number format of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from forerun.cli import options
from forerun.cli.bench.shared import CompareOptions, JsonFile, begin, print_report, say
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import chosen_model
from forerun.errors import ConfigError
from forerun.lab.bench.tables import Report, Table
from forerun.utils.workloads import Case

if TYPE_CHECKING:
    from forerun.lab.bench.quality import QualityRow

PROMPTS = "prose,questions"
NUM_PROMPTS = 42
MAX_TOKENS = 64


@with_flags
def quality(
    *,
    model: options.TargetArgument = None,
    compared: Annotated[
        CompareOptions,
        Flags(
            "prompts",
            "num_prompts",
            base=CompareOptions(prompts=PROMPTS, num_prompts=NUM_PROMPTS),
        ),
    ],
    threads: options.Threads = None,
    json: JsonFile = None,
) -> None:
    """Measure perplexity, divergence and top-1 agreement beside float32, on text and on the model's greedy answers."""
    cases = compared.cases()
    model = chosen_model(model)
    watch = begin(threads, json)
    from forerun.lab.bench.quality import COLUMNS, FORMATS, REFERENCE
    from forerun.lab.bench.recorded import quality_figures
    from forerun.lab.results.files import without_folders
    from forerun.lab.results.schema import TargetFacts

    rows = measure_quality(model, FORMATS, cases, MAX_TOKENS)
    title = f"{without_folders(model)}: what the weights' format costs, beside float32"
    report = Report(
        "quality",
        [Table.of(title, COLUMNS, rows)],
        TargetFacts(without_folders(model), REFERENCE),
        settings={"max_tokens": MAX_TOKENS, "formats": FORMATS},
        figures=quality_figures(rows),
    )
    print_report(report, watch, json)


def measure_quality(
    model: str | Path,
    formats: Sequence[str],
    cases: Mapping[str, Sequence[Case]],
    max_tokens: int,
    adapter: str | None = None,
) -> list[QualityRow]:
    """Measure the rows of `formats`. Chats are left out, with a note, if the model has no chat template.

    Raises:
        ConfigError: there is nothing left to measure.
    """
    from forerun.engine import LLM
    from forerun.lab.bench import quality as bench
    from forerun.lab.bench.prompts import prepare

    def texts(llm: LLM) -> dict[str, list[bench.Scored]]:
        if llm.tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer, and texts are measured. Put it beside the weights.")
        has_template = getattr(llm.tokenizer, "chat_template", None)
        fit = {name: [case for case in each if has_template or not case.is_chat] for name, each in cases.items()}
        if left_out := [name for name, each in cases.items() if len(fit[name]) < len(each)]:
            say(f"{model} has no chat template: the chats of {', '.join(left_out)} are left out")
        fit = {name: each for name, each in fit.items() if each}
        if not fit:
            raise ConfigError(f"No prompt of --prompts can be given to {model}. Add one of raw text, such as prose.")
        return bench.scored_texts(llm, prepare(llm, fit, max_tokens), max_tokens)

    return bench.compare_formats(model, formats, texts, adapter, say)
