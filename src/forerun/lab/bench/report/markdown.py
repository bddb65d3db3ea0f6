"""Results as Markdown, with warnings of what weakens their figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from forerun.kernels.provenance import Environment, describe_environment
from forerun.lab.bench.tables import markdown_table
from forerun.lab.results.schema import KINDS, Results, TableFacts

LEAST_RUNS = 10
"""Runs behind an interval: with fewer, a bootstrap's is too narrow."""
LEAST_PROMPTS = 5
MOST_LOAD = 0.5
"""Load average before anything was measured."""
MOST_STOLEN = 0.05
MOST_OTHERS = 0.25
"""Of each core, kept busy by other processes."""
SHOWN = 6
"""Names that one warning lists."""


def warnings_of(every: Sequence[Results]) -> list[str]:
    """Return a sentence for each weakness; of several files, with the file's name."""
    found = list(between(every))
    for results in every:
        name = f"{results.file_name or results.kind}: " if len(every) > 1 else ""
        found += [f"{name}{text}" for text in weaknesses(results)]
    return found


def between(every: Sequence[Results]) -> Iterator[str]:
    """Yield what keeps several files from being compared."""
    every = [each for each in every if _is_timed(each)]
    machines = dict.fromkeys(each.environment.machine for each in every)
    if len(machines) > 1:
        shown = "; ".join(f"{cpu}, {cores} cores" for cpu, cores, _ in machines)
        yield f"These results are of {len(machines)} machines ({shown}): their times cannot be compared."
    versions = dict.fromkeys(each.environment.version for each in every)
    if len(versions) > 1:
        yield f"These results are of {len(versions)} versions of forerun ({', '.join(versions)})."


def weaknesses(results: Results) -> Iterator[str]:
    """Yield the weaknesses of one file."""
    yield from _of_text(results)
    yield from _of_figures(results)
    if _is_timed(results):
        yield from disturbances(results.environment)


def _is_timed(results: Results) -> bool:
    """Return whether the machine of this run matters: audits and journals time nothing, nor do plans for other
    machines."""
    return results.kind not in ("audit", "journal") and results.details.get("source") != "bound"


def _of_text(results: Results) -> Iterator[str]:
    """Yield the weaknesses of the texts."""
    target = results.target
    random = sum(prompt.random for prompt in results.prompts)
    if random:
        yield f"{random} prompts are random tokens: acceptance on them says nothing about texts."
    if target is not None and target.random_weights:
        yield "The model has random weights: its times stand, but its text and any acceptance mean nothing."
    if target is not None and target.cost_padded:
        yield "The model is cost-padded: text and acceptance of a smaller one, at the cost of one of this size."
    for drafter in results.drafters:
        if drafter.seen:
            yield (
                f"{drafter.seen} of {len(results.prompts)} prompts share 13 words in a row with what {drafter.name} "
                f"was made from ({drafter.seen_source}): its acceptance on them flatters it."
            )
    ours = [row for row in results.rows if row.method.startswith("forerun, ")]
    if differing := _listed([row.method for row in ours if row.same_text is False]):
        exact = " The model is not exact." if target is not None and target.exact is False else ""
        yield f"Texts differ from those of plain decoding: {differing}.{exact}"


def _of_figures(results: Results) -> Iterator[str]:
    odd = [each for each in results.figures if each.value is None]
    if odd:
        yield f"{len(odd)} figures are not numbers, and are left out: {_listed([each.name for each in odd])}."
    few = [each for each in results.figures if each.low is not None and (each.samples or LEAST_RUNS) < LEAST_RUNS]
    if few:
        least = min(each.samples or 0 for each in few)
        yield f"{len(few)} intervals rest on fewer than {LEAST_RUNS} samples ({least} at least): they are too narrow."
    single = [each for each in results.figures if each.low is None and each.samples == 1]
    if single:
        yield f"{len(single)} figures are of a single run, and have no interval."
    if results.rows and len(results.prompts) < LEAST_PROMPTS:
        yield f"There are only {len(results.prompts)} prompts: they stand for no workload."
    names = [
        str(each.labels.get("method", each.name))
        for each in results.figures
        if each.name == "over_plain"
        and None not in (each.low, each.high)
        and (each.low or 0.0) <= 1 <= (each.high or 0.0)
        and each.low != each.high
        and not each.labels.get("category")
    ]
    if names:
        yield f"The interval holds 1, so neither faster nor slower is shown: {_listed(names)}."


def disturbances(environment: Environment) -> Iterator[str]:
    """Yield what makes the figures of a run doubtful, as far as its machine tells."""
    if environment.others is None and environment.load_before and environment.load_before[0] > MOST_LOAD:
        yield f"The machine was busy before anything was measured: load average {environment.load_before[0]:.1f}."
    if environment.others is not None and environment.others > MOST_OTHERS * environment.cores:
        yield (
            f"Other processes kept {environment.others:.1f} processors busy while this was measured "
            f"({environment.cores} cores)."
        )
    if environment.stolen is not None and environment.stolen > MOST_STOLEN:
        yield f"{100 * environment.stolen:.0f} % of the processors' time went to other machines of the same host."
    if environment.dirty:
        yield f"The checkout was changed: the figures are not of commit {environment.commit} alone."


def _listed(names: Sequence[str]) -> str:
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    return "; ".join(different[:SHOWN]) + more


def title(results: Results) -> str:
    """Return the title of a file's section."""
    target = results.target
    about = ", ".join(filter(None, (target.name, target.number_format))) if target is not None else ""
    return f"{KINDS[results.kind]}{': ' * bool(about)}{about}"


def duration(seconds: float) -> str:
    """Format a time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def in_order(every: Sequence[Results]) -> list[Results]:
    """Sort results as reports show them: by kind, then by file."""
    return sorted(every, key=lambda each: (list(KINDS).index(each.kind), each.file_name))


def markdown(every: Sequence[Results], head: str = "") -> str:
    """Write a section per file: its command, its machine, warnings and tables. head: text before them.

    A page of one file has all of its tables. A page of several files leaves out plans, which measure nothing, tables
    of a single category, and the columns and rows of `DETAIL_COLUMNS`, `DETAIL_ROWS` and `DETAIL_TABLES`.
    """
    is_short = len(every) > 1
    parts = [head.strip()] if head else []
    measured = [each for each in in_order(every) if not (is_short and each.kind == "plan")]
    if apart := list(between(every)):
        parts.append(_quoted(apart))
    for results in measured:
        parts.append(f"## {title(results)}")
        parts.append(f"`{results.command}`")
        parts.append(_about(results))
        if warned := list(weaknesses(results)):
            parts.append(_quoted(warned))
        for table in _main_tables(results) if is_short else results.tables:
            rows = [markdown_table(table.header, table.rows)] if table.rows else []
            parts.append("\n\n".join([f"#### {table.title}", *rows]))
    return "\n\n".join(parts) + "\n"


DETAIL_TABLES = re.compile(r"Acceptance by draft position|Left out")
DETAIL_COLUMNS = re.compile(
    r"over best assisted|first token ms, median|p90|t\(\d+\) / t\(1\)|gain over generate's"
    r"|between pieces ms|whole s|requests/s|client's CPU|prompts|choosing|predicted"
)
DETAIL_ROWS = re.compile(r"forerun, bare loop|(LLM\.generate|driver thread)(, plain)?")
"""What a page of several files leaves out, by titles and first cells; a page of one file has all of it."""


def _main_tables(results: Results) -> Iterator[TableFacts]:
    categories = {prompt.category for prompt in results.prompts if prompt.category}
    for table in results.tables:
        if DETAIL_TABLES.match(table.title) or table.title.rpartition(", ")[2] in categories:
            continue
        kept = [at for at, name in enumerate(table.header) if not DETAIL_COLUMNS.fullmatch(name)]
        shown = [row for row in table.rows if _is_main_row(results, table, row)]
        yield TableFacts(table.title, [table.header[at] for at in kept], [[row[at] for at in kept] for row in shown])


def _is_main_row(results: Results, table: TableFacts, row: Sequence[str]) -> bool:
    """Of audits no row, since each table's title is a verdict; of tuning the finalists."""
    is_finalist = "choosing" not in table.header or row[table.header.index("over plain")] != "–"
    name = re.sub(r"^\d+ at once, ", "", row[0])
    return results.kind != "audit" and is_finalist and not DETAIL_ROWS.fullmatch(name)


def _about(results: Results) -> str:
    at = results.environment
    busy = f"load average {at.load_before[0]:.1f} before and {at.load_after[0]:.1f} after" if at.load_before else ""
    stolen = "" if at.stolen is None else f"{100 * at.stolen:.1f} % of the processors' time taken by the host"
    file = results.file_name and f"`{results.file_name}`"
    parts = [f"{at.date[:10]}, {duration(at.seconds)}", file, describe_environment(at), busy, stolen]
    return "; ".join(filter(None, parts)) + "."


def _quoted(texts: Sequence[str]) -> str:
    return "\n".join(f"> - {text}" for text in texts)
