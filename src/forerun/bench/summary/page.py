"""One HTML page of results: pictures, tables, warnings and what made them. It asks nothing of any other place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from forerun.bench.summary.draw import drawn
from forerun.bench.summary.facts import environment_rows, file_name, title
from forerun.bench.summary.series import charts
from forerun.bench.summary.text import in_order
from forerun.bench.summary.warnings import between, weaknesses
from forerun.results import Results, TableFacts

_LIGHT = ("#0067a8", "#c2500a", "#00805a", "#a3498a", "#7a6100", "#2b8cc4", "#5a5a5a", "#8a2be2")
_DARK = ("#5db8f5", "#ff9a5a", "#3fd0a0", "#e79ad0", "#e0c14a", "#9cd6ff", "#b5b5b5", "#c79bff")
_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1b1d21; --soft: #5c6470; --line: #d9dde3; --card: #f6f7f9;
  --grid: #e3e6ea; --reference: #8a8f98; --warn: #fff4d6; --warn-line: #e0b23c; LIGHT }
@media (prefers-color-scheme: dark) { :root { --back: #14161a; --text: #e6e8eb; --soft: #a0a7b2; --line: #343a43;
  --card: #1c1f25; --grid: #2c313a; --reference: #7d8490; --warn: #33290f; --warn-line: #8f6f1e; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1, h2, h3, nav { overflow-wrap: anywhere; } h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
nav { font-size: .9rem; } nav li { margin: .15rem 0; } a { color: var(--s0); }
.warnings { background: var(--warn); border: 1px solid var(--warn-line); border-radius: 8px; padding: .6rem 1rem;
  font-size: .9rem; margin: .5rem 0; }
.warnings ul { margin: .3rem 0; padding-left: 1.2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem;
  margin: 1rem 0; align-items: start; }
figure { margin: 0; padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure h3 { margin: 0 0 .25rem; font-size: .95rem; } figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: .8rem; color: var(--soft); }
details { margin: .5rem 0; } summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .82rem; margin: .5rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .85rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 32rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } body { padding: .6rem; } }
"""
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>forerun: measured results</title>
<style>{style}</style>
</head>
<body>
"""


def page(every: Sequence[Results]) -> str:
    """The whole page. Raises ImportError without Matplotlib (`draw.check_installed` says it better)."""
    ordered = in_order(every)
    return "\n".join([_HEAD.format(style=_style()), *_body(ordered), "</body>", "</html>", ""])


def theme() -> tuple[str, str]:
    """CSS declarations for a picture outside of the page (`draw.drawn`), light and dark."""
    light, dark = _series_colours()
    return (
        f"color: #1b1d21; --grid: #e3e6ea; --reference: #8a8f98; {light}",
        f"color: #e6e8eb; --grid: #2c313a; --reference: #7d8490; {dark}",
    )


def _style() -> str:
    light, dark = _series_colours()
    return _STYLE.replace("LIGHT", light).replace("DARK", dark)


def _series_colours() -> tuple[str, str]:
    light, dark = (" ".join(f"--s{place}: {colour};" for place, colour in enumerate(each)) for each in (_LIGHT, _DARK))
    return light, dark


def _body(ordered: Sequence[Results]) -> Iterator[str]:
    yield "<h1>forerun: measured results</h1>"
    yield _warned(list(between(ordered)))
    if len(ordered) > 1:
        links = "".join(
            f'<li><a href="#r{place}">{escape(title(each))}</a> ({escape(file_name(each))})</li>'
            for place, each in enumerate(ordered)
        )
        yield f"<nav><ul>{links}</ul></nav>"
    number = 0
    for place, results in enumerate(ordered):
        yield f'<section id="r{place}"><h2>{escape(title(results))}</h2>'
        yield _warned(list(weaknesses(results)))
        yield _facts(results)
        pictures = []
        for chart in charts(results):
            number += 1
            pictures.append(
                f"<figure><h3>{escape(chart.title)}</h3>{drawn(chart, number)}"
                f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
            )
        if pictures:
            yield f'<div class="charts">{"".join(pictures)}</div>'
        yield from (_table(table, is_open=not pictures) for table in results.tables)
        yield "</section>"


def _warned(texts: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<div class="warnings"><strong>To be kept in mind</strong><ul>{items}</ul></div>' if items else ""


def _facts(results: Results) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in environment_rows(results))
    return f"<details><summary>What made these figures</summary><dl>{rows}</dl></details>"


def _table(table: TableFacts, *, is_open: bool) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f"<details{' open' * is_open}><summary>{escape(table.title)}</summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )
