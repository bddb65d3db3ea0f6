"""The few figures that the README shows, made from the same files as docs/benchmarks.md, and put between marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from forerun.bench.report import markdown_table
from forerun.bench.summary.facts import file_name
from forerun.bench.summary.series import PLAIN, short
from forerun.bench.summary.text import in_order
from forerun.bench.summary.warnings import weaknesses
from forerun.errors import ConfigError
from forerun.results import Figure, Results

BEGIN, END = "<!-- figures: made by `make report`, not by hand -->", "<!-- end of figures -->"


def headline(every: Sequence[Results]) -> str:
    """How much faster, by model, text and drafter, and whether the text was the same; Markdown."""
    parts = []
    timed = [each for each in in_order(every) if each.kind == "generate" and _is_of_text(each)]
    if rows := [row for results in timed for row in _rows(results)]:
        header = [
            "model, text",
            "drafter",
            "plain tokens/s",
            "tokens/s",
            "times plain",
            "tokens a forward",
            "same text",
        ]
        parts.append(markdown_table(header, rows))
        parts.append("\n".join(_source(each) for each in timed))
    audits = [each for each in in_order(every) if each.kind == "audit"]
    parts += [_audited(each) for each in audits]
    return "\n\n".join(parts)


def put_into(path: Path, section: str) -> str:
    """The text of a file with the section between its marks.

    Raises:
        ConfigError: it cannot be read, or has no such marks, once each.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--into is {path}, which cannot be read: {error}. Give a file of Markdown.") from None
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"--into is {path}, but it must have the lines {BEGIN} and {END}, in this order. Add them.")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{rest.partition(END)[2]}"


def _is_of_text(results: Results) -> bool:
    """Whether it says something about texts of a model as it is."""
    target = results.target
    return target is not None and not target.random_weights and not target.cost_padded


def _rows(results: Results) -> Iterator[list[str]]:
    """Of greedy text: a row for each workload and drafter with K chosen automatically."""
    assert results.target is not None
    name = ", ".join(filter(None, (results.target.name, results.target.number_format)))
    whole = [each for each in results.figures if not each.labels.get("category") and not each.labels.get("temperature")]
    for workload in dict.fromkeys(str(each.labels.get("workload")) for each in whole):
        here = [each for each in whole if str(each.labels.get("workload")) == workload]
        plain = _value(here, "tokens_per_second", PLAIN)
        for method in dict.fromkeys(str(each.labels["method"]) for each in here):
            ratio = next((each for each in here if each.name == "over_plain" and each.labels["method"] == method), None)
            if not method.endswith(", auto") or ratio is None or ratio.value is None:
                continue
            yield [
                f"{name}: {workload}",
                short(method).removesuffix(", auto"),
                _decimal(plain, 1),
                _decimal(_value(here, "tokens_per_second", method), 1),
                _with_interval(ratio),
                _decimal(_value(here, "acceptance_length", method), 2),
                _share(_value(here, "same_text", method)),
            ]


def _source(results: Results) -> str:
    at = results.environment
    words = [f"`{results.command}`", f"{at.date[:10]}, commit {at.version}", f"{at.processor}, {at.threads} threads"]
    busy = [f"load average {at.load_before[0]:.1f} before"] if at.load_before else []
    count = sum(1 for _ in weaknesses(results))
    warned = f"; [{count} warnings](docs/benchmarks.md)" if count else ""
    return f"- {'; '.join([*words, *busy])} (`benchmarks/{file_name(results)}`){warned}."


def _audited(results: Results) -> str:
    """A certificate in two sentences."""
    at, target = results.environment, results.target
    counts = {"Bits": 0.0, "Rule": 0.0, "Engine": 0.0}
    for each in results.figures:
        layer = str(each.labels.get("layer"))
        if each.name == "compared" and layer in counts:
            counts[layer] += each.value or 0.0
    found = {layer: max((each.value or 0.0 for each in _of_layer(results, layer)), default=None) for layer in counts}
    name = target.name if target is not None else ""
    drafter = results.drafters[0].name if results.drafters else ""
    told = [
        f"{counts['Bits']:,.0f} answers compared bit for bit",
        f"{counts['Rule']:,.0f} samples of the acceptance rules (a total variation of {_percent(found['Rule'])} would "
        "have been found with probability 0.9)",
        f"{counts['Engine']:,.0f} through the engine against exact probabilities ({_percent(found['Engine'])})",
    ]
    return (
        f"`{results.command}` ({name} with {drafter}, {at.date[:10]}, commit {at.version}): "
        f"**{results.details.get('headline', '')}** {'; '.join(told)}."
    )


def _of_layer(results: Results, layer: str) -> list[Figure]:
    return [each for each in results.figures if each.name == "found" and each.labels.get("layer") == layer]


def _value(figures: Sequence[Figure], name: str, method: str) -> float | None:
    return next((each.value for each in figures if each.name == name and each.labels["method"] == method), None)


def _with_interval(figure: Figure) -> str:
    bounds = "" if figure.low is None or figure.high is None else f" [{figure.low:.2f}, {figure.high:.2f}]"
    return f"{figure.value:.2f}{bounds}"


def _decimal(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2g} %"
