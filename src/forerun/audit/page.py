"""A certificate as one HTML page that needs nothing else: styles and picture are in it, light and dark."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from html import escape
from typing import Any

from forerun.audit.certificate import Certificate, Check, Layer
from forerun.audit.power_picture import picture
from forerun.audit.statistics import FOUND

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --dim: #5b6474; --paper: #fbfbfa; --card: #ffffff; --line: #d9dde4;
  --pass: #17703f; --fail: #b3261e; --open: #8a5a00; --measured: #1f5fa8; --a: #1f5fa8; --b: #b1560f; --c: #4a7a2a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --dim: #9aa4b5; --paper: #14171d; --card: #1b1f27;
  --line: #343b48; --pass: #6fd195; --fail: #ff8a80; --open: #f0b95a; --measured: #86b8f5; --a: #86b8f5; --b: #f2a56b;
  --c: #a3d27c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 0; }
p { margin: .5rem 0; } .dim { color: var(--dim); }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem 1.1rem;
  margin: 1rem 0; }
.head { display: flex; gap: .7rem; align-items: baseline; flex-wrap: wrap; }
.mark { font-weight: 650; border: 1px solid currentColor; border-radius: 1rem; padding: 0 .7rem; font-size: .9rem;
  white-space: nowrap; }
.pass { color: var(--pass); } .fail { color: var(--fail); } .inconclusive { color: var(--open); }
.measured { color: var(--measured); } .not-run { color: var(--dim); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; margin: .6rem 0; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 550; } th:first-child, td:first-child, .note { text-align: left; }
h2.next { margin-top: .8rem; }
td:first-child, td.note { white-space: normal; min-width: 9rem; }
ul { margin: .4rem 0; padding-left: 1.2rem; } dl { display: grid; grid-template-columns: max-content 1fr;
  gap: .15rem 1rem; margin: .5rem 0; font-size: .9rem; } dt { color: var(--dim); } dd { margin: 0;
  overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; display: block; }
"""

_SAYS = (
    "Bits: the answers that were compared are equal, to the last bit of each log-probability.",
    (
        "Rule and Engine: no deviation was seen. A smaller one than stated may be there; what would have been found, "
        "and with which probability, stands beside each test."
    ),
    (
        "A distance between distributions is one between the cells that were counted. What differs inside a cell is "
        "not seen."
    ),
)
_SAYS_NOT = (
    "Nothing of other models, machines, versions, options or drafters than those above.",
    "Nothing of how good the answers are, or how fast they come.",
    (
        "The exact probabilities are the same model's, computed by teacher forcing. An error that the model makes with "
        "and without speculation is no loss, and is not looked for."
    ),
)


def html(certificate: Certificate) -> str:
    """The page."""
    verdict = certificate.verdict
    facts = "".join(
        f"<dt>{escape(str(name).replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in {**certificate.subject, **certificate.environment}.items()
        if value is not None
    )
    drawn = picture(certificate)
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>forerun audit: {escape(verdict)}</title><style>{_STYLE}</style></head><body><main>",
            f'<div class="head"><h1>{escape(certificate.headline)}</h1>{_mark(verdict)}</div>',
            (
                f'<p class="dim">All tests together fail by chance with probability {certificate.family_error:g} at '
                f"most, if nothing is wrong. It took {certificate.seconds:.0f} s.</p>"
            ),
            *(_layer(layer) for layer in certificate.layers),
            f"<section><h2>What would have been found</h2>{drawn}</section>" if drawn else "",
            f"<section><h2>What a pass says</h2>{_list(_SAYS)}",
            f'<h2 class="next">What it does not say</h2>{_list(_SAYS_NOT)}</section>',
            f"<section><h2>What was audited</h2><dl>{facts}</dl></section>",
            "</main></body></html>",
            "",
        )
    )


def _layer(layer: Layer) -> str:
    verdict = layer.verdict
    parts = [f'<div class="head"><h2>{escape(layer.name)}</h2>{_mark(verdict)}</div>', f"<p>{escape(layer.about)}</p>"]
    if layer.reason:
        parts.append(f'<p class="dim">Not run: {escape(layer.reason)}.</p>')
    if layer.findings:
        parts.append(f'<div class="{_class(verdict)}">{_list(layer.findings)}</div>')
    if layer.tests:
        parts.append(_table(layer.tests))
    if layer.power:
        parts.append(f'<p class="dim">{escape(layer.power)}</p>')
    parts += [f'<p class="dim">{escape(note)}</p>' for note in layer.notes]
    return f"<section>{''.join(parts)}</section>"


COLUMNS = ("test", "verdict", "compared", "df", "p", "level", f"found with {FOUND:g}", "accepted/drafted", "note")


def row(test: Check) -> tuple[str, ...]:
    """The cells of a test's line under COLUMNS."""
    drafts = f"{test.num_accepted}/{test.num_drafted}" if test.num_drafted else ""
    note = test.note
    if test.deviation is not None:
        seen = test.deviation
        note = f"deviation {100 * seen.seen:.2g} %, between {100 * seen.low:.2g} and {100 * seen.high:.2g} %; {note}"
    return (
        test.name,
        test.verdict,
        f"{test.num_samples} {test.what}",
        "" if test.freedom is None else str(test.freedom),
        "" if test.p_value is None else f"{test.p_value:.2g}",
        "" if test.level is None else f"{test.level:.1g}",
        "" if test.found is None else f"{100 * test.found:.2g} %",
        drafts,
        note,
    )


def _table(tests: Seq[Check]) -> str:
    shown = [row(test) for test in tests]
    used = [column for column in range(len(COLUMNS)) if any(cells[column] for cells in shown)]
    head = "".join(_cell(COLUMNS[column], COLUMNS[column], "th") for column in used)
    lines = []
    for cells in shown:
        line = "".join(_cell(COLUMNS[column], cells[column]) for column in used)
        lines.append(f"<tr>{line}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _cell(column: str, text: str, tag: str = "td") -> str:
    kind = "note" if column == "note" else _class(text) if column == "verdict" else ""
    return f'<{tag} class="{kind}">{escape(text)}</{tag}>' if kind else f"<{tag}>{escape(text)}</{tag}>"


def _mark(verdict: str) -> str:
    return f'<span class="mark {_class(verdict)}">{escape(verdict)}</span>'


def _class(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _list(lines: Seq[Any]) -> str:
    return f"<ul>{''.join(f'<li>{escape(str(line))}</li>' for line in lines)}</ul>"
