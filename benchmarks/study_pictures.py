"""The tables and pictures of docs/study.md from the files in benchmarks/study: no figure of them is written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.bench.report import markdown_table, percent
from forerun.bench.summary.chart import Chart, Point, Series
from forerun.bench.summary.draw import drawn
from forerun.bench.summary.page import theme

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "study"
PAGE = ROOT / "docs" / "study.md"
PICTURES = ROOT / "docs" / "study"
CATEGORIES = ("code", "factual", "formulaic", "creative")
ALL = ""
NAMES = {
    "draft-model": "distilled, 1.1 M parameters (`draft-model`)",
    "draft-model:model=earlier-draft": "distilled from an earlier target, 1.2 M",
    "draft-model:model=sibling": "smaller sibling, 1.1 M, text alone",
    "draft-model:model=earlier-target": "earlier checkpoint, 12.9 M",
    "draft-model:model=bundled,quantize=int8": "the target in 8 bits, 12.9 M",
    "draft-model:model=bundled,quantize=int4": "the target in 4 bits, 12.9 M",
    "draft-model:model=smollm2,quantize=int4": "the target in 4 bits, 135 M",
    "cross-vocab": "sibling with another tokenizer, 0.9 M (`cross-vocab`)",
    "eagle": "`eagle` head",
}
"""Drafter -> what it is, where drafts of several kinds stand side by side."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the prompts of a category came to together.

    Attributes:
        k: largest number of draft tokens of a step.
        length: tokens a forward of the target.
        rate: accepted over drafted.
        positions: of each position of a draft, the chance that its token is accepted where it is looked at.
    """

    category: str
    drafter: str
    k: int
    temperature: float
    prompts: int
    length: float
    rate: float
    positions: Sequence[float]

    @property
    def per_token(self) -> float:
        """The chance that a token which is looked at, because all before it were accepted, is accepted too."""
        reached, total, accepted = 1.0, 0.0, 0.0
        for chance in self.positions:
            total += reached
            reached *= chance
            accepted += reached
        return accepted / total if total else 0.0


def table_of(name: str) -> list[list[Any]]:
    """The rows of a file as they stand there; none where it is missing."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []


def rows(name: str) -> list[Row]:
    """Of a file of acceptance."""
    return [Row(*each) for each in table_of(name)]


def ordered(names: Iterable[str]) -> list[str]:
    """Without repetitions."""
    return list(dict.fromkeys(names))


def by_category(name: str, named: Callable[[str], str] = lambda drafter: f"`{drafter}`") -> str:
    """A row for each drafter: per token, of all drafted, and tokens a forward, by category. Greedy."""
    every = [row for row in rows(name) if row.temperature == 0]
    lines = []
    for drafter in ordered(row.drafter for row in every):
        of = {row.category: row for row in every if row.drafter == drafter}
        cells = [_cell(of[category]) if category in of else "–" for category in (*CATEGORIES, ALL)]
        lines.append([named(drafter), *cells])
    return markdown_table(["drafter", *CATEGORIES, "all"], lines)


def _cell(row: Row) -> str:
    return f"{percent(row.per_token)}, {percent(row.rate)}, {row.length:.2f}"


def temperatures(name: str) -> str:
    """Per token and tokens a forward by temperature."""
    every = [row for row in rows(name) if row.category == ALL]
    heats = sorted({row.temperature for row in every})
    lines = []
    for drafter in ordered(row.drafter for row in every):
        of = {row.temperature: row for row in every if row.drafter == drafter}
        lines.append([f"`{drafter}`", *(f"{percent(of[heat].per_token)}, {of[heat].length:.2f}" for heat in heats)])
    return markdown_table(["drafter", *(f"{heat:g}" for heat in heats)], lines)


def sides() -> str:
    """Kinds of drafts beside each other: memory, acceptance greedy and at temperature 1."""
    every = rows("sides")
    shares = memory_shares("bundled")
    lines = []
    for drafter in ordered(row.drafter for row in every):
        cells = [NAMES.get(drafter, drafter)]
        weights, cache = shares.get(drafter, (None, None))
        cells += [percent(weights), percent(cache)]
        for heat in (0, 1):
            found = [row for row in every if (row.drafter, row.temperature, row.category) == (drafter, heat, ALL)]
            cells += [_cell(found[0]) if found else "–"]
        lines.append(cells)
    return markdown_table(["draft", "weights", "keys and values", "greedy", "temperature 1"], lines)


def memory_shares(target: str) -> dict[str, tuple[float, float]]:
    """Drafter -> its weights over its target's, and its keys and values over its target's."""
    every = table_of("memory")
    return {name: (weights / own, cache / page) for of, name, own, page, weights, cache in every if of == target}


def memory() -> str:
    """Bytes and shares of all drafters."""
    lines = [
        [
            of,
            f"`{name}`",
            f"{weights / 1e6:.1f} of {own / 1e6:.1f} MB",
            percent(weights / own),
            f"{cache:,} of {page:,} bytes",
            percent(cache / page),
        ]
        for of, name, own, page, weights, cache in table_of("memory")
    ]
    return markdown_table(["target", "drafter", "weights", "share", "keys and values a position", "share"], lines)


def contexts(*names: str) -> str:
    """Tokens a forward and acceptance by length of context."""
    every = [row for name in names for row in rows(name) if row.category]
    lengths = sorted({int(row.category.split()[0]) for row in every})
    lines = []
    for drafter in ordered(row.drafter for row in every):
        of = {int(row.category.split()[0]): row for row in every if row.drafter == drafter}
        lines.append(
            [
                f"`{drafter}`",
                *(f"{percent(of[each].per_token)}, {of[each].length:.2f}" for each in lengths if each in of),
            ]
        )
    return markdown_table(["drafter", *map(str, lengths)], lines)


def drafted() -> str:
    """Tokens a forward and the share of drafted tokens that is accepted, by K."""
    every = [row for row in rows("drafted") if row.category == ALL]
    counts = sorted({row.k for row in every})
    lines = []
    for drafter in ordered(row.drafter for row in every):
        of = {row.k: row for row in every if row.drafter == drafter}
        lines.append([f"`{drafter}`", *(f"{of[k].length:.2f}, {percent(of[k].rate)}" for k in counts if k in of)])
    return markdown_table(["drafter", *(f"K={k}" for k in counts)], lines)


def source(*names: str) -> str:
    """What made the figures of files."""
    parts = []
    for name in names:
        path = RESULTS / f"{name}.json"
        if path.is_file():
            head = json.loads(path.read_text(encoding="utf-8"))
            parts.append(f"`{head['command']}` ({head['date']}; {head['machine']}; {head['versions']})")
    return "; ".join(parts) + "."


TABLES: dict[str, Callable[[], str]] = {
    "categories": lambda: by_category("categories"),
    "layers": lambda: by_category("layers"),
    "chat-categories": lambda: by_category("chat-categories"),
    "temperatures": lambda: temperatures("temperatures"),
    "chat-temperatures": lambda: temperatures("chat-temperatures"),
    "contexts": lambda: contexts("contexts", "unwindowed"),
    "edge": lambda: contexts("edge"),
    "drafted": drafted,
    "sides": sides,
    "memory": memory,
    "source": lambda: "\n".join(
        f"- {source(path.stem)}" for path in sorted(RESULTS.glob("*.json")) if path.stem != "memory"
    ),
}
"""Name -> what stands between `<!-- NAME -->` and `<!-- end -->` in the page."""


def _lines(points: Iterable[tuple[str, float | str, float]]) -> list[Series]:
    found: dict[str, list[Point]] = {}
    for name, at, value in points:
        found.setdefault(name, []).append(Point(at, value))
    return [Series(name, each, slot=slot) for slot, (name, each) in enumerate(found.items())]


def _rows(points: Iterable[tuple[str, str, float]]) -> list[Series]:
    return _lines((name, at, 100 * value) for name, at, value in points)


def charts() -> dict[str, Chart]:
    """Name of the file -> picture."""
    share = "accepted of tokens looked at, %"
    found: dict[str, Chart] = {}
    for name, target in (("categories", "bundled"), ("chat-categories", "smollm2")):
        shown = [(row.category, row.drafter, row.per_token) for row in rows(name) if row.category]
        found[name] = Chart(f"Acceptance by category, {target}, greedy", "", "rows", "", share, _rows(shown))
    for name, target in (("temperatures", "bundled"), ("chat-temperatures", "smollm2")):
        heats = [(row.drafter, row.temperature, row.per_token) for row in rows(name) if row.category == ALL]
        title = f"Acceptance by temperature, {target}"
        found[name] = Chart(title, "", "lines", "temperature", share[:-3], _lines(heats), is_share=True)
    of_draft = [
        (row.category, row.temperature, row.per_token)
        for row in rows("temperatures")
        if row.category and row.drafter == "draft-model"
    ]
    title = "Acceptance of the draft model by temperature and category, bundled"
    found["temperatures-of-the-draft"] = Chart(
        title, "", "lines", "temperature", share[:-3], _lines(of_draft), is_share=True
    )
    of_lengths = [row for name in ("contexts", "unwindowed") for row in rows(name) if row.category]
    lengths = [(row.drafter, float(row.category.split()[0]), row.length) for row in of_lengths]
    found["contexts"] = Chart(
        "Tokens a forward by length of context, bundled", "", "lines", "tokens of context", "tokens a forward",
        _lines(lengths), reference=1.0, is_log=True,
    )  # fmt: skip
    ks = [(row.drafter, float(row.k), row.length) for row in rows("drafted") if row.category == ALL]
    found["drafted"] = Chart(
        "Tokens a forward by K, bundled, greedy", "", "lines", "K", "tokens a forward", _lines(ks),
        reference=1.0, is_log=True,
    )  # fmt: skip
    kinds = [
        (
            "greedy" if row.temperature == 0 else "temperature 1",
            NAMES.get(row.drafter, row.drafter).replace("`", ""),
            row.per_token,
        )
        for row in rows("sides")
        if row.category == ALL
    ]
    found["sides"] = Chart("Drafts of several kinds, bundled", "", "rows", "", share, _rows(kinds))
    return {name: chart for name, chart in found.items() if chart.series}


def picture(chart: Chart, number: int) -> str:
    """A file of its own: the element with its colours, light and dark."""
    element = drawn(chart, number)
    light, dark = theme()
    style = f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    start = element.index(">") + 1
    names = '<svg width="520" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    return f"{element[:start].replace('<svg ', names)}{style}{element[start:]}\n"


def filled(text: str) -> str:
    """The page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


def write() -> None:
    """All pictures, and the page's tables."""
    PICTURES.mkdir(exist_ok=True)
    for number, (name, chart) in enumerate(charts().items()):
        (PICTURES / f"{name}.svg").write_text(picture(chart, number), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
