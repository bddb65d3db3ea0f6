"""The terminal output of the demo: answers as they come, bars that fill in turn, tables; and a picture of them.

It has a file of its own because it imports rich, PyTorch and the engine, which no other command's start may load.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forerun.lab.bench import tables
from forerun.lab.bench.minute import FORERUN, PLAIN, TRANSFORMERS, Performance

FRAMES_PER_SECOND = 15
QUESTION_LINES, LINES = 3, 10
"""Shown of a question, from its beginning, and of an answer, up to its end."""
BORDERS = 4
"""Columns of a panel's sides."""
PICTURE_WIDTH = 104
LEAST_PIPE_WIDTH = 120
_FONT_FACES = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
"""In rich's pictures: fonts of another site, which a page that shows a picture does not load."""


class Stage:
    """Output of the demo. On a pipe or a dumb terminal it is lines; with `quiet`, standard output stays empty."""

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self._out = console or Console(stderr=quiet, highlight=False)
        self._quiet = quiet
        if not self._out.is_terminal:
            self._out.width = max(self._out.width, LEAST_PIPE_WIDTH)
        self.is_screen = self._out.is_terminal and not self._out.is_dumb_terminal

    def say(self, text: str, style: str = "dim") -> None:
        """Print a line."""
        if not self._quiet or self.is_screen:
            # a pipe has no width: there lines are not broken
            self._out.print(text, style=style if self.is_screen else None, markup=False, soft_wrap=not self.is_screen)

    @contextmanager
    def performance(self, title: str, shown: Performance) -> Iterator[Callable[[], None]]:
        """Show one prompt while it is answered; the function that is returned draws it anew."""
        if not self.is_screen:
            yield lambda: None
            self.say(
                "\n".join([title, *(f"> {line}" for line in _beginning(shown.question)), _answer_text(shown).plain])
            )
            for name in shown.runs:
                self.say(f"{name}: {_measured(shown, name)}")
            return
        last = 0.0
        with Live(console=self._out, auto_refresh=False, transient=self._quiet) as live:

            def redraw() -> None:
                nonlocal last
                if (now := time.perf_counter()) - last >= 1 / FRAMES_PER_SECOND:
                    last = now
                    live.update(panel(title, shown, self._out), refresh=True)

            try:
                yield redraw
            finally:
                live.update(panel(title, shown, self._out), refresh=True)

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a bar that advances when the returned function is called."""
        columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self._out, auto_refresh=False, disable=not self.is_screen) as bar:
            task = bar.add_task(title, total=total)

            def advance() -> None:
                bar.advance(task)
                bar.refresh()

            yield advance

    def table(self, measured: tables.Table) -> None:
        """Print a table; the last cell of a row is red unless it is "yes"."""
        table = Table(header_style="bold", show_edge=False, pad_edge=False)
        for name in measured.header:
            table.add_column(name, justify="right" if table.columns else "left")
        for row in measured.rows:
            table.add_row(*row[:-1], Text(row[-1], style="bold" if row[-1] == "yes" else "bold red"))
        self._out.print(table)


def panel(title: str, shown: Performance, console: Console) -> Panel:
    """Return the frame of one prompt: the question, the answer as far as it has come, and a bar for each method."""
    lines = _answer_text(shown).wrap(console, max(1, console.width - BORDERS))[-LINES:]
    lines.extend([Text()] * (min(LINES, 2 + shown.max_tokens // 16) - len(lines)))
    question = [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in _beginning(shown.question)]
    parts: list[RenderableType] = [*question, Text(), *lines, Text(), bars(shown)]
    return Panel(Group(*parts), title=title, title_align="left")


def _answer_text(shown: Performance) -> Text:
    """Return the answer, with what drafts gave in green."""
    return Text.assemble(*((text, "bold green" if drafted else "") for text, drafted in shown.text))


def bars(shown: Performance) -> Table:
    """Return a bar for each method that has run or is running, as long as its speed beside that of the fastest."""
    grid = Table.grid(padding=(0, 2))
    most = max((run.rate for run in shown.runs.values()), default=0.0) or 1.0
    for name in (TRANSFORMERS, PLAIN, FORERUN):
        rate = shown.runs[name].rate if name in shown.runs else 0.0
        style = "green" if name == FORERUN else "cyan"
        bar = ProgressBar(most, rate, width=40, complete_style=style, finished_style=style)
        grid.add_row(name, bar, _measured(shown, name) if name in shown.runs else "")
    return grid


def picture(performances: Sequence[Performance], table: tables.Table, closing: Sequence[str]) -> str:
    """Draw what the demo has shown, as SVG of a fixed width."""
    console = Console(
        record=True, width=PICTURE_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor",
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    stage = Stage(console=console)
    for number, shown in enumerate(performances, 1):
        console.print(panel(heading(number, len(performances), shown), shown, console))
    stage.table(table)
    for line in closing:
        stage.say(line)
    fonts = _FONT_FACES.sub("", CONSOLE_SVG_FORMAT)
    return console.export_svg(title="forerun demo", code_format=fonts, unique_id="demo")


def heading(number: int, count: int, shown: Performance) -> str:
    """Return the title of one of several prompts."""
    return f"{number} of {count} · {shown.name}"


def _beginning(question: str) -> list[str]:
    lines = [line for line in question.splitlines() if line.strip()]
    more = len(lines) - QUESTION_LINES
    return lines if more <= 0 else [*lines[:QUESTION_LINES], f"[{more} more lines]"]


def _measured(shown: Performance, name: str) -> str:
    """Return one method's speed in words."""
    run = shown.runs[name]
    cut = f", stopped after {run.seconds:.0f} s" if run.is_cut else ""
    return f"{shown.speed(name)} tokens/s, {run.tokens} tokens{cut}"
