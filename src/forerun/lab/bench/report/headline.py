"""The few figures that the README shows, made from the same files as docs/benchmarks.md, and put between marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forerun.errors import ConfigError
from forerun.lab.bench.report.markdown import duration, in_order, weaknesses
from forerun.lab.bench.tables import markdown_table, percent
from forerun.lab.results.schema import Figure, Results

_BEGIN = "<!-- figures: {name}, made by make report -->"
_END = "<!-- end of figures -->"


def sections(every: Sequence[Results]) -> Mapping[str, str]:
    """Return Markdown by name, "speed" and "audit"; empty where there are no such results."""
    ordered = in_order(every)
    timed = [each for each in ordered if each.kind == "generate" and _is_of_text(each)]
    rows = [row for results in timed for row in _rows(results)]
    header = [
        "model, text", "drafter", "tokens/s", "times plain", "times Transformers", "tokens a forward", "same text"
    ]  # fmt: skip
    table = [markdown_table(header, rows), "\n".join(map(_source, timed))] if rows else []
    return {
        "speed": "\n\n".join(table),
        "audit": "\n".join(_audited(each) for each in ordered if each.kind == "audit"),
    }


def put_into(path: Path, made: Mapping[str, str]) -> str:
    """Replace each section between its marks in the text of a file, and return the text.

    Raises:
        ConfigError: it cannot be read, or has no such marks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--into is {path}, which cannot be read: {error}. Give a file of Markdown.") from None
    found = 0
    for name, section in made.items():
        mark = _BEGIN.format(name=name)
        before, is_there, following = text.partition(mark)
        if not is_there:
            continue
        _, ends, after = following.partition(_END)
        if not ends or mark in after:
            raise ConfigError(f"--into is {path}: the line {mark} must be there once, with {_END} after it.")
        text = f"{before}{mark}\n\n{section}\n\n{_END}{after}"
        found += 1
    if not found:
        names = ", ".join(_BEGIN.format(name=name) for name in made)
        raise ConfigError(f"--into is {path}, but it has none of the lines {names}. Add one, and {_END} after it.")
    return text


def _is_of_text(results: Results) -> bool:
    """Return whether the results are of texts of a model as it is."""
    target = results.target
    return target is not None and not target.random_weights and not target.cost_padded


def _rows(results: Results) -> Iterator[list[str]]:
    """Yield, for greedy text, a row for each workload and drafter with K chosen automatically."""
    assert results.target is not None
    name = ", ".join(filter(None, (results.target.name, results.target.number_format)))
    whole = [each for each in results.figures if not each.labels.get("category") and not each.labels.get("temperature")]
    for workload in dict.fromkeys(str(each.labels.get("workload")) for each in whole):
        here = [each for each in whole if str(each.labels.get("workload")) == workload]
        for method in dict.fromkeys(str(each.labels["method"]) for each in here):
            of = {each.name: each for each in here if each.labels["method"] == method and each.value is not None}
            if not method.endswith(", auto") or "over_plain" not in of:
                continue
            yield [
                f"{name}: {workload}",
                method.removeprefix("forerun, ").removesuffix(", auto"),
                _decimal(of.get("tokens_per_second"), 1),
                _decimal(of["over_plain"], 2),
                _decimal(of.get("over_transformers"), 2),
                _decimal(of.get("acceptance_length"), 2),
                percent(of["same_text"].value if "same_text" in of else None),
            ]


def _source(results: Results) -> str:
    at = results.environment
    words = [f"`{results.command}`", f"{at.date[:10]}, commit {at.version}", f"{at.processor}, {at.threads} threads"]
    busy = [f"load average {at.load_before[0]:.1f} before"] if at.load_before else []
    count = sum(1 for _ in weaknesses(results))
    warned = f"; [warnings: {count}](docs/benchmarks.md)" if count else ""
    return f"- {'; '.join([*words, *busy])} (`benchmarks/{results.file_name}`){warned}."


def _audited(results: Results) -> str:
    """Summarise a certificate in a line."""
    at = results.environment
    target = results.target
    counts = dict.fromkeys(("Bits", "Rule", "Engine"), 0.0)
    stated = {each.labels["method"] for each in results.figures if each.name == "found"}
    for each in results.figures:
        layer = str(each.labels.get("layer"))
        if each.name == "compared" and layer in counts and each.labels["method"] in stated:
            counts[layer] += each.value or 0.0
    found = {
        layer: max(
            (each.value or 0.0 for each in results.figures if each.name == "found" and each.labels["layer"] == layer),
            default=None,
        )
        for layer in counts
    }
    name = target.name if target is not None else ""
    drafter = results.drafters[0].name if results.drafters else ""
    return (
        f"- `{results.command}` ({name} with {drafter}, {at.date[:10]}, commit {at.version}, {duration(at.seconds)}): "
        f"**{results.details.get('headline', '')}** {counts['Bits']:,.0f} answers were compared bit for bit; "
        f"{counts['Rule']:,.0f} samples of the acceptance rules would have shown a total variation of "
        f"{_finely(found['Rule'])} in any of them, and {counts['Engine']:,.0f} requests through the engine one of "
        f"{_finely(found['Engine'])} under any of the options, each with probability 0.9."
    )


def _decimal(figure: Figure | None, digits: int) -> str:
    """Format a value, with its interval where it has one; a dash for none."""
    if figure is None:
        return "–"
    is_ratio = figure.unit == "times" and figure.low is not None and figure.high is not None
    bounds = f" [{figure.low:.{digits}f}, {figure.high:.{digits}f}]" if is_ratio else ""
    return f"{figure.value:.{digits}f}{bounds}"


def _finely(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2g} %"
