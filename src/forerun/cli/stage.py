"""What the demo shows on a terminal: text as it streams, a progress bar, a table.

Nothing is drawn while something is being timed: the streams shown are not the runs that are measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from forerun.lab.bench import tables as report

FRAMES_PER_SECOND = 15
ACCEPTED = "bold green"
PROMPT = "dim"
LINES = 18
BORDERS = 4
"""Columns of a panel's sides."""


def split_accepted(tokenizer: Any, chunk: Any) -> tuple[str, str]:
    """A chunk's text in two: what came from the draft, and the token that the target added.

    The first `num_accepted_draft` tokens of a chunk are the draft's. A chunk whose text does not begin with them as
    decoded alone (a character in several tokens, a stop string cut off) counts as the draft's if most of it is.
    """
    count = chunk.num_accepted_draft
    if not count:
        return "", chunk.text
    drafted = tokenizer.decode(chunk.token_ids[:count])
    if chunk.text.startswith(drafted):
        return drafted, chunk.text[len(drafted) :]
    return (chunk.text, "") if 2 * count >= len(chunk.token_ids) else ("", chunk.text)


class Scene:
    """One text as it grows: the prompt's last lines dim, draft tokens in colour."""

    def __init__(self, title: str, prompt: str, redraw: Callable[[], None]) -> None:
        self.title = title
        self._text = Text.assemble((prompt, PROMPT))
        self.answer = ""
        self._redraw = redraw
        self._tokens = self._accepted = 0
        self._start = time.perf_counter()

    def add(self, tokenizer: Any, chunk: Any) -> None:
        """Append a StreamChunk."""
        drafted, added = split_accepted(tokenizer, chunk)
        self._text.append(drafted, style=ACCEPTED)
        self._text.append(added)
        self.answer += chunk.text
        self._tokens += len(chunk.token_ids)
        self._accepted += chunk.num_accepted_draft
        self._redraw()

    @property
    def status(self) -> str:
        seconds = time.perf_counter() - self._start
        return f"{self._tokens} tokens, {self._tokens / seconds:.0f} tokens/s, {self._accepted} of them drafted"

    def panel(self, console: Console) -> Panel:
        """The text's last lines, as wide as the console."""
        lines = self._text.wrap(console, max(1, console.width - BORDERS))[-LINES:]
        body = Group(*lines, *[Text()] * (LINES - len(lines)))
        return Panel(body, title=self.title, subtitle=self.status, title_align="left", subtitle_align="right")


class Stage:
    """The terminal, or its absence: on a pipe the streams are not drawn, with quiet nothing reaches standard output."""

    def __init__(self, quiet: bool) -> None:
        self._out = Console(stderr=quiet, highlight=False)
        self._quiet = quiet
        self._live: Live | None = None
        self._last_frame = 0.0

    def __enter__(self) -> Stage:
        if self._out.is_terminal:
            self._live = Live(console=self._out, auto_refresh=False, transient=self._quiet)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """A line for people."""
        if not self._quiet or self._out.is_terminal:
            # a pipe has no width: there lines are not broken
            self._out.print(text, style=PROMPT, markup=False, soft_wrap=not self._out.is_terminal)

    @contextmanager
    def performance(self, title: str, prompt: str) -> Iterator[Scene]:
        """Show one text as it grows; its last frame stays until the next begins."""

        def redraw() -> None:
            now = time.perf_counter()
            if self._live is not None and now - self._last_frame >= 1 / FRAMES_PER_SECOND:
                self._last_frame = now
                self._live.update(scene.panel(self._out), refresh=True)

        scene = Scene(title, prompt, redraw)
        yield scene
        if self._live is not None:
            self._live.update(scene.panel(self._out), refresh=True)
        elif not self._quiet:
            self.say(f"{scene.title}: {scene.status}")

    def transcript(self, question: str, answer: str) -> None:
        """Where nothing is redrawn, such as on a pipe, what was asked and answered, once."""
        if self._live is None and not self._quiet:
            self.say("\n".join(f"> {line}" for line in question.splitlines()))
            self.say(f"{answer}\n")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar that moves when the function is called, and at no other time. The last text stays above it."""
        bar = Progress(TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), auto_refresh=False)
        task = bar.add_task(title, total=total)
        last = self._live.renderable if self._live is not None else None

        def advance() -> None:
            bar.advance(task)
            if self._live is not None and last is not None:
                self._live.update(Group(last, bar.get_renderable()), refresh=True)

        yield advance
        if self._live is not None and last is not None:
            self._live.update(last, refresh=True)

    def table(self, measured: report.Table) -> None:
        """Each row by whether its last cell says yes."""
        table = Table(header_style="bold")
        for number, name in enumerate(measured.header):
            table.add_column(name, justify="left" if number == 0 else "right")
        for row in measured.rows:
            style = "bold" if row[-1] == "yes" else "red"
            table.add_row(*row[:-1], Text(row[-1], style=style))
        # A pipe has no width: without one the table would be folded to 80 columns.
        console = self._out if self._out.is_terminal else Console(file=sys.stdout, width=120, highlight=False)
        console.print(table)
