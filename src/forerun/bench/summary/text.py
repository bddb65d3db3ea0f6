"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.bench.report import markdown_table
from forerun.bench.summary.warnings import between, weaknesses
from forerun.results import KINDS, Results, describe


def title(results: Results) -> str:
    """Of a file's section."""
    target = results.target
    about = ", ".join(filter(None, (target.name, target.number_format))) if target is not None else ""
    return f"{KINDS[results.kind]}{': ' * bool(about)}{about}"


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def in_order(every: Sequence[Results]) -> list[Results]:
    """As reports show them: by kind, then by file."""
    return sorted(every, key=lambda each: (list(KINDS).index(each.kind), each.file_name))


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


def _about(results: Results) -> str:
    at = results.environment
    busy = f"load average {at.load_before[0]:.1f} before and {at.load_after[0]:.1f} after" if at.load_before else ""
    stolen = "" if at.stolen is None else f"{100 * at.stolen:.1f} % of the processors' time taken by the host"
    parts = [f"{at.date[:10]}, {duration(at.seconds)}", f"`{results.file_name}`", describe(at), busy, stolen]
    return "; ".join(filter(None, parts)) + "."


def _quoted(texts: Sequence[str]) -> str:
    return "\n".join(f"> - {text}" for text in texts)
