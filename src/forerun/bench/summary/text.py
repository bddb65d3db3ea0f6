"""Results as Markdown, and as lines for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from forerun.bench.report import markdown_table
from forerun.bench.summary.facts import duration, file_name, title
from forerun.bench.summary.warnings import between, weaknesses
from forerun.results import KINDS, Results, describe

_COLUMNS = ("file", "kind", "target", "commit", "processor", "figure", "unit", "value", "low", "high", "samples")


def in_order(every: Sequence[Results]) -> list[Results]:
    """As reports show them: by kind, then by file."""
    return sorted(every, key=lambda each: (KINDS.index(each.kind), file_name(each)))


def markdown(every: Sequence[Results], head: str = "") -> str:
    """A section per file: its command, its machine, warnings and tables. head: text before them."""
    parts = [head.strip()] if head else []
    if apart := list(between(every)):
        parts.append(_quoted(apart))
    for results in in_order(every):
        parts.append(f"## {title(results)}")
        parts.append(f"`{results.command}`")
        parts.append(_about(results))
        if warned := list(weaknesses(results)):
            parts.append(_quoted(warned))
        parts += [f"#### {each.title}\n\n{markdown_table(each.header, each.rows)}" for each in results.tables]
    return "\n\n".join(parts) + "\n"


def csv_lines(every: Sequence[Results]) -> str:
    """A line per figure: file, what it is of, value and interval; a column per label."""
    labels = list(dict.fromkeys(name for results in every for each in results.figures for name in each.labels))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, *labels])
    for results in in_order(every):
        target = results.target.name if results.target is not None else ""
        at = results.environment
        for each in results.figures:
            writer.writerow(
                [file_name(results), results.kind, target, at.commit, at.processor, each.name, each.unit]
                + [each.value, each.low, each.high, each.samples]
                + [each.labels.get(name) for name in labels]
            )
    return text.getvalue()


def _about(results: Results) -> str:
    at = results.environment
    busy = f"load average {at.load_before[0]:.1f} before and {at.load_after[0]:.1f} after" if at.load_before else ""
    stolen = "" if at.stolen is None else f"{100 * at.stolen:.1f} % of the processors' time taken by the host"
    parts = [f"{at.date[:10]}, {duration(at.seconds)}", f"`{file_name(results)}`", describe(at), busy, stolen]
    return "; ".join(filter(None, parts)) + "."


def _quoted(texts: Sequence[str]) -> str:
    return "\n".join(f"> - {text}" for text in texts)
