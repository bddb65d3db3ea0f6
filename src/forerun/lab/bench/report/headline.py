"""The few figures that the README shows, made from the same files as docs/benchmarks.md, and put between marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from forerun.config import AUTO
from forerun.errors import ConfigError
from forerun.lab.bench.compare import PLAIN as FORERUN_PLAIN
from forerun.lab.bench.peers.worker import PLAIN
from forerun.lab.bench.report.markdown import duration, in_order
from forerun.lab.bench.tables import markdown_table
from forerun.lab.results.schema import Figure, Results

_BEGIN = "<!-- figures: {name}, made by make report -->"
_END = "<!-- end of figures -->"


def sections(every: Sequence[Results]) -> Mapping[str, str]:
    """Return Markdown by name, "engines", "drafters" and "audit"; empty where there are no such results."""
    ordered = in_order(every)
    return {
        "engines": _engines([each for each in ordered if each.kind == "peers" and _is_of_text(each)]),
        "drafters": _drafters([each for each in ordered if each.kind == "generate" and _is_of_file(each)]),
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


def _is_of_file(results: Results) -> bool:
    """Return whether the results are of a published file, and of greedy answers to prompts of several kinds."""
    named = results.target is not None and results.target.name.endswith(".gguf")
    return named and _is_of_text(results) and len({each.category for each in results.prompts}) > 1


def _drafters(every: Sequence[Results]) -> str:
    """Return the tables of drafters by kind of prompt, with machine and date; "" without results."""
    return "\n\n".join(f"{markdown_table(*_drafter_table(results))}\n\n{_source(results)}." for results in every)


def _drafter_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the header, and a row for plain decoding and for each drafter: geometric means of decoding speed, the
    time to the first token apart, over plain decoding's in the same round."""
    assert results.target is not None
    kinds = list(dict.fromkeys(prompt.category for prompt in results.prompts))
    speeds: dict[str, dict[tuple[int, int], float]] = {}
    same: dict[str, list[bool]] = {}
    for run in results.rows:
        if run.num_tokens > 1 and run.temperature == 0:
            seconds = run.seconds - (run.first_token or 0.0)
            speeds.setdefault(run.method, {})[run.prompt, run.round] = (run.num_tokens - 1) / seconds
            same.setdefault(run.method, []).append(run.same_text is not False)
    plain = speeds.pop(FORERUN_PLAIN)
    gains = {method: {key: rate / plain[key] for key, rate in found.items()} for method, found in speeds.items()}
    rows = [["plain, tokens/s", *_by_kind(results, plain, kinds, 1), "–", "–"]]
    for method, found in gains.items():
        name = method.removeprefix("forerun, ").removesuffix(f", {AUTO}")
        text = "identical" if all(same[method]) else f"{sum(same[method])} of {len(same[method])}"
        rows.append([name, *_by_kind(results, found, kinds, 2), f"{min(found.values()):.2f}", text])
    model = results.target.name.removesuffix(".gguf")
    return [f"{model}, times plain", *kinds, "all", "least", "text as plain's"], rows


def _by_kind(
    results: Results, values: Mapping[tuple[int, int], float], kinds: Sequence[str], digits: int
) -> Iterator[str]:
    """Yield the geometric mean of the values of each kind of prompt, and of all. values: by prompt and round."""
    for kind in (*kinds, None):
        found = [each for (prompt, _), each in values.items() if kind in (None, results.prompts[prompt].category)]
        yield f"{geometric_mean(found):.{digits}f}" if found else "–"


def _engines(every: Sequence[Results]) -> str:
    """Return the table of forerun beside other engines, with their versions, machine and date; "" without results."""
    header = ["model, engine", "plain, tokens/s", "with drafts, tokens/s", "first token, ms", "text as forerun's"]
    rows = [row for results in every for row in _engine_rows(results)]
    if not rows:
        return ""
    versions = dict.fromkeys(peer["version"] for results in every for peer in results.details["peers"])
    sources = dict.fromkeys(map(_source, every))
    return f"{markdown_table(header, rows)}\n\n{'; '.join([*versions, *sources])}."


def _engine_rows(results: Results) -> Iterator[list[str]]:
    """Yield a row for each engine: plain decoding, and the fastest of its methods with drafts; and for each that was
    left out, with the reason."""
    assert results.target is not None
    model = results.target.name.removesuffix(".gguf")
    for engine in (peer["name"] for peer in results.details["peers"]):
        methods: dict[str, dict[str, Figure]] = {}
        for each in results.figures:
            if each.labels["peer"] == engine:
                methods.setdefault(str(each.labels["drafter"]), {})[each.name] = each
        plain = methods.pop(PLAIN, {})
        fastest = max(methods, key=lambda name: methods[name]["tokens_per_second"].value or 0.0, default=None)
        drafts = "–" if fastest is None else f"{_of_interval(methods[fastest].get('decoding'), 1)}, {fastest}"
        yield [
            f"{model}, {engine}",
            _of_interval(plain.get("decoding"), 1),
            drafts,
            _of_interval(plain.get("first_token"), 0, 1000),
            _same_text(plain),
        ]
    for left in results.details["left_out"]:
        yield [f"{model}, {left['peer']}", f"left out: {left['reason']}", "–", "–", "–"]


def _same_text(figures: Mapping[str, Figure]) -> str:
    """Return "identical", or how many answers are, and how many first tokens in the median; a dash without."""
    share = figures.get("same_as_forerun")
    shared = figures.get("shared_prefix")
    if share is None or share.value is None or shared is None or shared.value is None:
        return "–"
    if share.value == 1:
        return "identical"
    whole = round(share.value * (share.samples or 0))
    return f"{whole} of {share.samples}; first {shared.value:.0f} tokens"


def _of_interval(figure: Figure | None, digits: int, scale: float = 1.0) -> str:
    """Format a median with its interval; a dash for none."""
    if figure is None or figure.value is None or figure.low is None or figure.high is None:
        return "–"
    median, low, high = (f"{scale * each:.{digits}f}" for each in (figure.value, figure.low, figure.high))
    return f"{median} [{low}, {high}]"


def _source(results: Results) -> str:
    at = results.environment
    return f"{at.processor}, {at.threads} threads, {at.date[:10]}, commit {at.version}"


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


def _finely(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2g} %"
